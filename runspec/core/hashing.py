"""BLAKE3 digests as 64 lower-case hexadecimal characters."""

from __future__ import annotations

import re
from pathlib import Path

from blake3 import blake3

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the BLAKE3 digest of bytes."""
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file, memory-mapped, so that it may be larger than memory."""
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def is_digest(text: object) -> bool:
    """Return whether `text` has the form of a digest, which is safe as a file name."""
    return isinstance(text, str) and _HEX_DIGEST.fullmatch(text) is not None


def hash_parts(*parts: bytes | str | int) -> bytes:
    """Return BLAKE3 over length-prefixed parts, 32 bytes; another split gives another hash.

    Strings are UTF-8, integers 8 bytes big-endian. Each part follows its length in 8 bytes.
    """
    hasher = blake3()
    for part in parts:
        if isinstance(part, int):
            part = part.to_bytes(8, "big")
        elif isinstance(part, str):
            part = part.encode()
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.digest()
