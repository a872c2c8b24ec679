"""vLLM behind a few calls: load a policy version, sample requests, prove what was done."""
