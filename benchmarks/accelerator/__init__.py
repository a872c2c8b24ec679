"""What only an accelerator can show: numerics first, then speed. `make accelerator` runs it."""
