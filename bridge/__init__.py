"""The bridge between JAX trees of parameters and Hugging Face safetensors, both ways.

One declarative weight map; a streaming reader and writer of each form. Imports no JAX.
"""
