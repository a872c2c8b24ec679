"""Numbers that divide, for suggestions."""

from __future__ import annotations

MOST = 4096
"""Larger ones are nobody's mesh, and a spec may say 10 ** 30."""


def divisors(number: int, limit: int) -> list[int]:
    """The divisors of `number` up to `limit` and `MOST`, 1 first."""
    return [n for n in range(1, min(number, limit, MOST) + 1) if number % n == 0]
