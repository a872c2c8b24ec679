"""A run on a Kubernetes cluster: one JobSet and what it needs."""

from runspec.backends.kubernetes.client import KubernetesBackend

__all__ = ["KubernetesBackend"]
