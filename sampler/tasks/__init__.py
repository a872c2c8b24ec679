"""The tasks of a run: problems, prompts, grading, and the traces of a warm start.

Free of torch, vLLM and transformers: sampler and validator build the same tasks from the spec.
"""
