"""Model shapes and devices as plain data, without JAX: parameters, FLOPs, memory."""
