"""Prefill of a validator in torch: transformers' model, on GPUs or a CPU.

It does not sample, and imports neither vLLM nor JAX.
"""
