"""What applying a spec would change, and what the run would need."""
