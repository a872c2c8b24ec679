"""Serves the files of the spec's sources, by digest, to volunteers who have no copy.

The coordinator lists the files of `source_files` when it starts. A request names a digest, never a
path.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.source_files import data_digest, file_digest, source_files
from verify.coordinator.intake import Refusal, refusing
from verify.formats.joining import MAX_FILES, Site, SiteFile, sign_site

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_PIECE_S = 120.0
"""Seconds that a client may take for one piece; a slower client is disconnected."""


class SiteService:
    """Answers `GET /v1/site` and `GET /v1/data/<digest>`.

    Args:
        spec: the run's resolved spec.
        key: key of the coordinator, which signs the site.
        weights: public URLs of relays and origin.
    """

    def __init__(self, spec: RunSpec, key: SigningKey, weights: Sequence[str]) -> None:
        self._spec, self._key, self._weights = spec, key, list(weights)
        self._paths: dict[str, Path] = {}
        self._ready = asyncio.ensure_future(asyncio.to_thread(self._look))

    async def document(self) -> bytes:
        """Return the signed site, once the files are hashed.

        Raises:
            Refusal: a file was removed meanwhile.
        """
        with refusing(404, OSError, what="the data cannot be read: "):
            return await asyncio.shield(self._ready)

    async def path(self, digest: str) -> Path | None:
        """Return the file of a digest; None if the site lists none."""
        await self.document()
        return self._paths.get(digest)

    def close(self) -> None:
        self._ready.cancel()

    def _look(self) -> bytes:
        if self._spec.supervised is not None:  # nobody else trains on its documents
            return sign_site(Site(self._spec.name, self._weights, [], ""), self._key)
        try:
            files, digest = self._files(), data_digest(self._spec)
        except UserError as error:
            # Workers with a copy of the data still work; workers without it fail with a message.
            _log.warning("volunteers cannot fetch the data here: %s", error)
            files, digest = [], ""
        if files:
            total = sum(file.bytes for file in files)
            _log.info("volunteers can fetch %d files of data, %d bytes", len(files), total)
        return sign_site(Site(self._spec.name, self._weights, files, digest), self._key)

    def _files(self) -> list[SiteFile]:
        files = []
        for source in self._spec.data.sources:
            for name, path in source_files(source).items():
                digest = file_digest(path)
                self._paths[digest] = path
                files.append(SiteFile(source.name, name, path.stat().st_size, digest))
        if len(files) > MAX_FILES:
            raise UserError(
                f"{len(files)} files, volunteers can be given {MAX_FILES}",
                place="data.sources",
                remedy="put the rows into fewer files",
            )
        return files


async def send_file(request: web.Request, path: Path) -> web.StreamResponse:
    """Answer with a file. aiohttp's own answer would send a compressed copy that lies beside it.

    Raises:
        Refusal: the file cannot be read any more.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise Refusal(404, f"the file cannot be read any more: {error.strerror}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        return await _send(request, file, size, {"Content-Type": "application/octet-stream"})


async def send_json(
    request: web.Request, document: bytes, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Answer with a document that may be large; a slow reader keeps one piece in memory."""
    headers = {"Content-Type": "application/json", **headers}
    return await _send(request, io.BytesIO(document), len(document), headers)


async def _send(
    request: web.Request, file: BinaryIO, left: int, headers: Mapping[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_length = left
    await response.prepare(request)
    try:
        while left > 0 and request.method == "GET":
            piece = await asyncio.to_thread(file.read, min(left, _PIECE_BYTES))
            if not piece:
                raise ConnectionAbortedError("the file has become shorter")
            async with asyncio.timeout(_PIECE_S):
                await response.write(piece)
            left -= len(piece)
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response
