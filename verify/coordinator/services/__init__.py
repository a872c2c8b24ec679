"""Services of the coordinator for workers, validators and the operator, and its timed actions."""
