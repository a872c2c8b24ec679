"""The rules, a module or two a group. Importing this package registers them all."""

from runspec.lint.rules import (
    algorithm,
    asynchrony,
    file,
    memory,
    mesh,
    model,
    optimizer,
    placement,
    reward,
    samplers,
    sharding,
    verification,
)

__all__ = [
    "algorithm",
    "asynchrony",
    "file",
    "memory",
    "mesh",
    "model",
    "optimizer",
    "placement",
    "reward",
    "samplers",
    "sharding",
    "verification",
]
