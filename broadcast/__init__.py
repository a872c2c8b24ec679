"""Distributes each version of the weights from the publisher to all clients.

Versions are signed, cut into chunks and checked. This package handles named files, not tensors.
"""
