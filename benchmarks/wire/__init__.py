"""What the benchmarks of `broadcast` share: its processes, and what they are compared with."""
