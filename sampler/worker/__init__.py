"""Sampling worker: lease -> version -> rollouts -> rewards and proofs -> submission."""
