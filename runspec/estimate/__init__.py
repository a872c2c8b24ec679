"""What a run will need and how long it will take, computed from its spec alone."""
