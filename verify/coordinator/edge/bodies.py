"""Reads the small bodies of signed requests, limited in size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from typing import Any

from aiohttp import web

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.connection_limits import connection_of
from runspec.core.hashing import digest_bytes
from verify.coordinator.intake import Refusal, refusing
from verify.coordinator_http import SignedRequest, Unauthorised

MAX_BODY_BYTES = 64 * 1024
"""Largest size of a JSON body."""
BODY_S = 30.0
"""Seconds a JSON body may take to arrive."""


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
    fields: set[str],
    optional: AbstractSet[str] = frozenset(),
) -> dict[str, Any]:
    """Return the body of a JSON request; it must have `fields` and may have `optional`.

    Raises:
        Refusal: it is too large or too slow, is no JSON object, or has other fields.
        Unauthorised: it is not the body that the caller signed.
    """
    data = await read_body(request, caller)
    with refusing(400, MalformedJson):
        body = parse_object(data, max_bytes=MAX_BODY_BYTES)
    if set(body) - optional != fields:
        raise Refusal(400, f"fields {sorted(body)} instead of {sorted(fields)}")
    return body
