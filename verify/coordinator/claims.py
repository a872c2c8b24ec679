"""Which validator works on which submission: a queue that a dying validator takes nothing from.

Claims live in memory. After a restart of the coordinator everything unjudged is offered again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

CLAIM_TIMEOUT_S = 300.0
"""A claim without a verdict after this long is offered to the next validator that asks."""


@dataclass(frozen=True)
class Claim:
    validator: str
    until: float


class Claims:
    def __init__(self, timeout_s: float = CLAIM_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._claims: dict[str, Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def keep(self, validator: str, holding: Collection[str]) -> None:
        """Frees what the validator's key has claimed and its process no longer knows of."""
        self._claims = {
            submission: claim
            for submission, claim in self._claims.items()
            if claim.validator != validator or submission in holding
        }

    def claim(self, validator: str, submissions: Iterable[str], now: float) -> str | None:
        """Claims the first of the submissions that no one works on."""
        for submission in submissions:
            claim = self._claims.get(submission)
            if claim is None or claim.until <= now:
                self._claims[submission] = Claim(validator, now + self._timeout_s)
                return submission
        return None

    def settle(self, submission: str) -> None:
        """The submission is judged."""
        self._claims.pop(submission, None)

    def next_expiry(self) -> float | None:
        """When the next claim runs out."""
        return min((claim.until for claim in self._claims.values()), default=None)
