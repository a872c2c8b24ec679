"""The manifests of a run in a store on disk: each is parsed once while its file is the same."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from broadcast import layout
from broadcast.disk import Identity, identity
from broadcast.manifest import MAX_BYTES, WeightsManifest, open_manifest
from broadcast.pins import owners
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.signed import BadSignature

EVERY_S = 1.0
"""The folder is looked at no more often than this."""


class StoredManifests:
    """What versions a store holds.

    Args:
        store: the store's directory.
        run: the run's id.
        log: gets what is damaged, once for each file.
    """

    def __init__(self, store: Path, run: str, log: logging.Logger) -> None:
        self._store = store
        self._run = run
        self._log = log
        self._looked_at = -math.inf
        self._looking = asyncio.Lock()
        self._parsed: dict[int, tuple[Identity, WeightsManifest | None]] = {}
        self._owners: dict[str, int] = {}

    async def current(self) -> Mapping[int, WeightsManifest]:
        """The manifests by version, as they were at most `EVERY_S` ago."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= EVERY_S:
                await asyncio.to_thread(self._look)
                self._looked_at = time.monotonic()
        return {v: manifest for v, (_, manifest) in self._parsed.items() if manifest is not None}

    async def owner(self, digest: str) -> int | None:
        """The one version that a chunk belongs to; None where there is none or are several."""
        if digest not in self._owners:
            await self.current()
        return self._owners.get(digest)

    def _look(self) -> None:
        parsed = {}
        for version in layout.stored_versions(self._store, self._run):
            path = self._store / layout.manifest_name(self._run, version)
            found, known = identity(path), self._parsed.get(version)
            if found is None:  # pruned meanwhile
                continue
            if known and known[0] == found:
                parsed[version] = known
                continue
            with suppress(FileNotFoundError):
                parsed[version] = found, self._parse(path)
        if parsed != self._parsed:
            self._parsed = parsed
            self._owners = owners(m for _, m in parsed.values() if m is not None)

    def _parse(self, path: Path) -> WeightsManifest | None:
        try:
            return open_manifest(read_bounded(path, MAX_BYTES), run=self._run, publishers=None)
        except (BadSignature, UserError) as error:
            self._log.error("%s: damaged: %s", path, error)
            return None
