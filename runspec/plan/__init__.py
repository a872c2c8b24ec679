"""The plan of a spec: changes to a run, and the needs of the run."""
