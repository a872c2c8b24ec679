"""The rules, one module a group. Importing this package registers them all."""

from runspec.lint.rules import (
    algorithm,
    asynchrony,
    file,
    memory,
    mesh,
    placement,
    reward,
    samplers,
    verification,
)

__all__ = [
    "algorithm",
    "asynchrony",
    "file",
    "memory",
    "mesh",
    "placement",
    "reward",
    "samplers",
    "verification",
]
