"""The arrays that a compiled program computes."""

from __future__ import annotations

from collections.abc import Iterator

from learner_jax.hlo import ArrayType, parse


def arrays(text: str) -> Iterator[ArrayType]:
    """Yield the result of every instruction of a module, from its HLO text."""
    for computation in parse(text)[0].values():
        for instruction in computation.values():
            yield from instruction.result
