"""Shapes of models and devices as plain data: parameters, FLOPs, memory, without JAX."""
