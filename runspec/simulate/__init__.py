"""A run on a virtual clock: the coordinator's own state machine, and a population from a file."""
