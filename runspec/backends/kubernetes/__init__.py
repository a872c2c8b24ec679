"""A run on a Kubernetes cluster: one JobSet and what it needs."""
