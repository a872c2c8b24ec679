"""Limits how many keys may register without an invite.

A key costs nothing to make, and the ledger remembers it as long as the run lasts. So these keys are
limited twice: those of one address in a day, and all that never had a submission accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from verify.coordinator.edge.limiter import RATES, Limiter, Name
from verify.coordinator.intake import Refusal
from verify.coordinator.machine.state import State

MAX_UNPROVEN = 10_000
"""Registered keys without an invite and without an accepted submission."""


class NewKeys:
    """Counts keys that register without an invite.

    Args:
        limiter: counts the keys of each address.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        limiter: Limiter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter, self._clock = limiter, clock

    def take(self, state: State, address: str) -> None:
        """Count a key that registers.

        Args:
            state: of the run.
            address: of the client.

        Raises:
            Refusal: 403, there are `MAX_UNPROVEN`; 429, the address has registered too many.
        """
        if state.unproven >= MAX_UNPROVEN:
            raise Refusal(
                403,
                f"{MAX_UNPROVEN} keys without accepted work are registered, as many as may be: ask "
                "for a link with an invite",
            )
        wait_s = self._limiter.take(Name("address", "new key", address), now=self._clock())
        if wait_s > 0.0:
            raise Refusal(
                429,
                f"{RATES['address', 'new key'].burst} new keys of your address have registered, as "
                f"many as may in a day: come again in {wait_s:.0f} s, or ask for a link with an "
                "invite",
                retry_after_s=wait_s,
            )
