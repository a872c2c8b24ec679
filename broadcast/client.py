"""The client: fetches versions, believes nothing, waits for nothing without a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runspec.common.latest import Latest


class WeightsClient:
    """Synchronous client of origins and relays. Not for use from several threads at once.

    Args:
        urls: base URLs of relays or origins, any of which may be down, slow or lying.
        run: the run's id.
        root_public_key: pinned; all trust starts there.
        cache_dir: versions appear here as `v<N>`; partial downloads are kept here and resumed.
    """

    def __init__(
        self, urls: Sequence[str], *, run: str, root_public_key: str, cache_dir: Path
    ) -> None:
        raise NotImplementedError

    def latest(self, after: int | None, wait_s: float) -> Latest | None:
        """The newest version where it is newer than `after` (any, where None), else None.

        Waits up to `wait_s` for one to be announced. Never goes back behind what was seen before.

        Raises:
            UserError: within `wait_s` no URL gave an answer that could be believed.
        """
        raise NotImplementedError

    def fetch(self, version: int, *, manifest_digest: str | None, deadline_s: float) -> Path:
        """Fetches a version: `cache_dir/v<N>`, whole and checked; at once where it is there.

        Args:
            version: which.
            manifest_digest: the only manifest accepted (of a lease or latest.json); None accepts
                any that a publisher of the run signed.
            deadline_s: seconds to give up after.

        Returns:
            The directory: the published files and `manifest.json`.

        Raises:
            UserError: not there in time; names the relays and what was wrong with each.
        """
        raise NotImplementedError

    def prune(self, keep: set[int]) -> None:
        """Removes fetched versions other than `keep`."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the connections."""
        raise NotImplementedError

    def __enter__(self) -> WeightsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
