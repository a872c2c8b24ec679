"""Sources of problems."""
