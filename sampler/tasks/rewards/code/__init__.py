"""Programs: run in a sandbox, tested from outside it."""
