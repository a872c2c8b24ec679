"""The two sides of `benchmarks.validator_speed`."""
