"""What the coordinator does for workers, validators and the operator, and when time passes."""
