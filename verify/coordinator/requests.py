"""Reads requests and sends large answers, limited in size and time.

A small body is read whole. An upload is streamed to disk, and stored as a whole or not at all. A
large answer is sent in pieces.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
import os
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp import web
from blake3 import blake3

from runspec.core.canonical import MalformedJson, digest_bytes, is_digest, parse_object
from runspec.core.connection_limits import connection_of
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from verify.coordinator_http import ENVELOPE, SignedRequest, Unauthorised

UPLOAD_TIMEOUT_S = 600.0
MAX_BODY_BYTES = 64 * 1024
"""Largest size of a JSON body."""
BODY_S = 30.0
"""Seconds a JSON body may take to arrive."""
MAX_WAIT_S = 30.0
_MAX_HOLDING = 64
PIECE_BYTES = 1 << 20
_PIECE_S = 120.0
"""Seconds that a client may take for one piece; a slower client is disconnected."""
_MAX_WORDS = 500
"""Largest number of characters of a refusal; it may repeat what a stranger sent."""
_TEMPORARY = ".tmp-"  # what runspec.core.files.remove_leftovers removes


class Refusal(Exception):
    """Raised to answer a request with an error.

    Args:
        status: status of HTTP.
        words: the error's text for the caller.
        retry_after_s: seconds after which the caller may try again, with 429 and 503.
    """

    def __init__(self, status: int, words: str, *, retry_after_s: float | None = None) -> None:
        self.status, self.words = status, words[:_MAX_WORDS]
        self.retry_after_s = retry_after_s
        super().__init__(self.words)


@contextmanager
def refusing(status: int, *errors: type[Exception], what: str = "") -> Iterator[None]:
    """Raise errors of the block as a `Refusal`.

    Args:
        status: status of HTTP.
        errors: classes of the errors.
        what: words before those of the error.
    """
    try:
        yield
    except errors as error:
        raise Refusal(status, f"{what}{error}") from error


# -- Small bodies ------------------------------------------------------------------------------


async def read_body(
    request: web.Request, caller: SignedRequest, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """Return a request's body. While it arrives, the connection counts as idle.

    Raises:
        Refusal: it is too large or too slow.
        Unauthorised: it is not the body that the caller signed.
    """
    data = bytearray()
    try:
        with connection_of(request).receiving():
            async with asyncio.timeout(BODY_S):
                async for chunk in request.content.iter_chunked(MAX_BODY_BYTES):
                    data += chunk
                    if len(data) > max_bytes:
                        raise Refusal(413, f"larger than the {max_bytes} bytes allowed")
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {BODY_S:.0f} s") from None
    body = bytes(data)
    if digest_bytes(body) != caller.body_digest:
        raise Unauthorised("the body is not the one that was signed")
    return body


async def read_json(
    request: web.Request,
    caller: SignedRequest,
    fields: Collection[str],
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """Return the body of a JSON request; it must have `fields` and may have `optional`.

    Raises:
        Refusal: it is too large or too slow, is no JSON object, or has other fields.
        Unauthorised: it is not the body that the caller signed.
    """
    data = await read_body(request, caller)
    with refusing(400, MalformedJson):
        body = parse_object(data, max_bytes=MAX_BODY_BYTES)
    if set(body) - set(optional) != set(fields):
        raise Refusal(400, f"fields {sorted(body)} instead of {sorted(fields)}")
    return body


def wait_and_holding(body: Mapping[str, Any]) -> tuple[float, list[str]]:
    """Return the seconds that a caller waits, at most `MAX_WAIT_S`, and the digests that it holds.

    Raises:
        Refusal: 400.
    """
    wait, holding = body["wait"], digests("holding", body["holding"])
    # Compared before the conversion, because a float cannot hold every integer of JSON.
    if type(wait) not in (int, float) or not 0 <= wait < math.inf:
        raise Refusal(400, "wait must be a number of seconds")
    return float(min(wait, MAX_WAIT_S)), holding


def digests(name: str, value: Any) -> list[str]:
    """Return a list of at most 64 digests.

    Raises:
        Refusal: 400, it is none; `name` says which.
    """
    if not isinstance(value, list) or len(value) > _MAX_HOLDING:
        raise Refusal(400, f"{name} must be a list of at most {_MAX_HOLDING} digests")
    if not all(is_digest(digest) for digest in value):
        raise Refusal(400, f"{name} must be a list of digests")
    return value


def read_envelope(request: web.Request) -> bytes:
    """Return the signed envelope of an upload, from its header.

    Raises:
        Refusal: 400.
    """
    try:
        return base64.b64decode(request.headers[ENVELOPE], validate=True)
    except KeyError as error:
        raise Refusal(400, f"header {ENVELOPE} is missing") from error
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, f"header {ENVELOPE} is not base64: {error}") from error


# -- Uploads -----------------------------------------------------------------------------------


@asynccontextmanager
async def received(
    chunks: AsyncIterator[bytes], folder: Path, *, digest: str, size: int
) -> AsyncIterator[Path]:
    """Yield a temporary file in `folder` that holds the whole body, synced to disk.

    The block renames the file. A file that still has its temporary name at the end is removed.

    Args:
        chunks: the body.
        folder: where the file lies; it is made if it does not exist.
        digest: BLAKE3 of the body.
        size: bytes of the body, exactly.

    Raises:
        Refusal: the body is too large, too small, too slow, or has another digest; or the disk has
            no room.
    """
    path = folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                hasher, copied = blake3(), 0
                async for chunk in chunks:
                    copied += len(chunk)
                    if copied > size:
                        raise Refusal(413, f"larger than the {size} bytes allowed")
                    hasher.update(chunk)
                    file.write(chunk)
            if copied < size:
                raise Refusal(400, f"the body has {copied} bytes, and {size} were announced")
            if (found := hasher.hexdigest()) != digest:
                raise Refusal(400, f"the body's digest is {found}, not {digest}")
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        yield path
    except TimeoutError:
        raise Refusal(408, f"the body took longer than {UPLOAD_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Refusal(507, f"cannot store the file: {error.strerror or error}") from error
    finally:
        path.unlink(missing_ok=True)


def write_small(path: Path, data: bytes) -> None:
    """Write an envelope, whole or not at all.

    Raises:
        Refusal: the disk has no room.
    """
    try:
        write_atomic(path, data)
    except UserError as error:
        raise Refusal(507, f"cannot store the file: {error.thing}") from error


async def to_the_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread and return when it has ended, even if the caller is cancelled.

    `asyncio.to_thread` would leave the thread running, and it could write a file after its removal.
    """
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


# -- Large answers -----------------------------------------------------------------------------


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
        return await send(request, file, size, {"Content-Type": "application/octet-stream"})


async def send(
    request: web.Request, file: BinaryIO, left: int, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Answer with the next `left` bytes of a file; a slow reader keeps one piece in memory."""
    response = web.StreamResponse(headers=headers)
    response.content_length = left
    await response.prepare(request)
    try:
        while left > 0 and request.method == "GET":
            piece = await asyncio.to_thread(file.read, min(left, PIECE_BYTES))
            if not piece:
                raise ConnectionAbortedError("the file has become shorter")
            async with asyncio.timeout(_PIECE_S):
                await response.write(piece)
            left -= len(piece)
    except (ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response
