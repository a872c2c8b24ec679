"""What a server says is newest, and who waits for the next."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Announcement:
    """The newest latest.json of a run, and everyone who waits for a newer one."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.version = -1
        self.waiting = 0
        self._changed = asyncio.Condition()

    async def post(self, data: bytes, version: int) -> None:
        """A newer version wakes those who wait; a fresh signature on the same one does not."""
        self.data = data
        if version > self.version:
            self.version = version
            async with self._changed:
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Nothing is newest any more, as far as one knows."""
        self.data, self.version = None, -1

    async def newer_than(self, after: int | None, wait_s: float) -> bytes | None:
        if after is not None and wait_s > 0 and self.version <= after:
            self.waiting += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s), self._changed:
                        await self._changed.wait_for(lambda: self.version > after)
            finally:
                self.waiting -= 1
        return self.data
