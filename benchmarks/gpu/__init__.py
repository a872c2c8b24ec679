"""Both sides of `benchmarks.gpu_learner`, a process each."""
