"""The files of the spec's sources, for volunteers who have no copy: by digest, and no others.

What is served is fixed when the coordinator starts: the regular files at each `data.sources[].uri`
that lies on this machine. A request names a digest, never a path.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from runspec.common.files import expand_user
from runspec.common.keys import SigningKey
from runspec.spec.schema import RunSpec
from verify.coordinator.intake import Refusal
from verify.formats.site import MAX_FILES, Site, SiteFile, is_inside, sign_site

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 22


class SiteDesk:
    """Answers `GET /v1/site` and `GET /v1/data/<digest>`.

    Args:
        spec: the run's.
        key: the coordinator's.
        weights: addresses of relays and origin as others reach them.
    """

    def __init__(self, spec: RunSpec, key: SigningKey, weights: Sequence[str]) -> None:
        self._spec, self._key, self._weights = spec, key, list(weights)
        self._paths: dict[str, Path] = {}
        self._ready = asyncio.ensure_future(asyncio.to_thread(self._look))

    async def document(self) -> bytes:
        """The signed site; waits until the files are hashed.

        Raises:
            Refusal: a file cannot be read, or there are too many.
        """
        try:
            return await asyncio.shield(self._ready)
        except (OSError, ValueError) as error:
            raise Refusal(404, f"the data cannot be served: {error}") from error

    async def path(self, digest: str) -> Path | None:
        """The file of a digest; None where the site lists none."""
        await self.document()
        return self._paths.get(digest)

    def close(self) -> None:
        self._ready.cancel()

    def _look(self) -> bytes:
        files = []
        for source in self._spec.data.sources:
            for name, path in _source_files(source.uri):
                if len(files) == MAX_FILES:
                    raise ValueError(f"more than {MAX_FILES} files")
                digest, size = _digest(path)
                self._paths[digest] = path
                files.append(SiteFile(source.name, name, size, digest))
        if files:
            total = sum(file.bytes for file in files)
            _log.info("volunteers can fetch %d files of data, %d bytes", len(files), total)
        return sign_site(Site(self._spec.name, self._weights, files), self._key)


def _source_files(uri: str | None) -> Iterator[tuple[str, Path]]:
    """Name below the source, and resolved path, of each regular file; none of what is not here."""
    if uri is None or "://" in uri:
        return
    root = expand_user(Path(uri)).resolve()
    if root.is_file():
        yield "", root
        return
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if path.is_file() and is_inside(relative):
                yield relative, path.resolve()


def _digest(path: Path) -> tuple[str, int]:
    hasher, size = blake3(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
    return hasher.hexdigest(), size
