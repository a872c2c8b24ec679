"""A token bucket of bytes for each client: pure, the clock is the caller's."""

from __future__ import annotations

from collections import OrderedDict


class RateLimit:
    """So many bytes per second for each client, and one second's worth at once.

    Who is not in debt may take a piece of any size, and is in debt until the rate has paid for it:
    so a piece that is larger than the bucket can be had too, and the average holds. For each
    client one number is kept: when its bucket is full again.

    Args:
        bytes_per_s: the rate of each client, at least 1.
        max_clients: remembered at once; beyond it the one that took something longest ago is
            forgotten, and with it what it still owed.
    """

    def __init__(self, bytes_per_s: int, *, max_clients: int = 10_000) -> None:
        assert bytes_per_s >= 1
        self._bytes_per_s = bytes_per_s
        self._max_clients = max_clients
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def take(self, client: str, size: int, now: float) -> float:
        """Takes `size` bytes for a client, or says in how many seconds it may ask again.

        Args:
            client: its name.
            size: bytes, 0 or more.
            now: seconds on a clock that never goes back.

        Returns:
            0.0 where the bytes are taken; else, nothing is taken, the seconds until they can be.
        """
        full_at = max(self._full_at.get(client, now), now)
        in_debt_s = full_at - now - 1.0
        if in_debt_s > 0:
            return in_debt_s
        self._full_at[client] = full_at + size / self._bytes_per_s
        self._full_at.move_to_end(client)
        if len(self._full_at) > self._max_clients:
            self._full_at.popitem(last=False)
        return 0.0
