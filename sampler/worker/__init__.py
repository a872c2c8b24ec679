"""The loop: lease -> version -> rollouts -> rewards and proofs -> submission."""
