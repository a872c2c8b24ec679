"""HTTP/1.1 as far as fetching chunks needs it: one GET, and an answer of a known length.

Strict where http.client is lenient, because servers are strangers: the head is bounded, its length
must be told, and nothing is decoded, redirected or guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from broadcast.transport import Fault

MAX_HEAD_BYTES = 16 * 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\x00\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_NUMBER = re.compile(rb"[0-9]{1,15}")


@dataclass(frozen=True)
class Address:
    """Where a base URL points."""

    secure: bool
    host: str
    port: int
    name: str
    """As the Host header says it."""
    prefix: str
    """Of every path, without a trailing slash."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Of a URL that `transport.base_url` accepted."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return cls(secure, parts.hostname or "", port, parts.netloc, parts.path)


@dataclass(frozen=True)
class Head:
    """What an answer says of itself before its body."""

    status: int
    length: int | None
    """Bytes of the body; None where that was not told."""
    keeps_alive: bool
    """Whether the connection stays open for another request."""
    retry_after: str
    """As it stands there; empty where it does not."""


def request(address: Address, path: str, headers: dict[str, str]) -> bytes:
    """The bytes of a GET; `path` is relative to the address's prefix."""
    lines = [f"GET {address.prefix}/{path} HTTP/1.1", f"Host: {address.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def parse_head(data: bytes) -> Head:
    """Reads an answer's head: the bytes before the empty line.

    Raises:
        Fault: not HTTP/1.0 or 1.1, malformed, contradictory, or a body in a coding of its own.
    """
    first, *lines = data.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise Fault(f"does not speak HTTP/1.1: {first[:60]!r}")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Fault(f"malformed header: {line[:60]!r}")
        name, value = field[1].lower(), field[2]
        if name == b"content-length" and fields.get(name, value) != value:
            raise Fault("two different content-lengths")
        fields[name] = value
    for name in (b"transfer-encoding", b"content-encoding"):
        if fields.get(name, b"identity").lower() != b"identity":
            raise Fault(f"{name.decode()} {fields[name][:40]!r}, none was asked for")
    length = fields.get(b"content-length")
    if length is not None and _NUMBER.fullmatch(length) is None:
        raise Fault(f"malformed content-length {length[:40]!r}")
    return Head(
        status=int(status[2]),
        length=None if length is None else int(length),
        keeps_alive=status[1] == b"1" and b"close" not in fields.get(b"connection", b"").lower(),
        retry_after=fields.get(b"retry-after", b"").decode("latin-1"),
    )
