"""A validator's prefill in torch: transformers' model, on a GPU where there is one, else on a CPU.

It samples nothing, and knows neither vLLM nor JAX.
"""
