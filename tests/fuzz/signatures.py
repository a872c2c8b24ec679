"""A keyed hash in place of ed25519, for campaigns on what lies behind a signature.

Signing and checking take 0.2 ms, three times the rest of a case. The campaigns `envelope` and
`request headers` ask ed25519.
"""

from __future__ import annotations

from blake3 import blake3

from runspec.core import keys, signed


def cheap_signatures() -> None:
    """From now on all keys of this process sign with the hash. Before documents are signed."""
    keys.SigningKey.sign = _sign  # type: ignore[method-assign]
    signed.signature_is_valid = _is_valid


def _sign(key: keys.SigningKey, message: bytes) -> str:
    return _code(key.public_hex, message)


def _is_valid(public_hex: str, message: bytes, signature_hex: str) -> bool:
    return _code(public_hex, message) == signature_hex


def _code(public_hex: str, message: bytes) -> str:
    return 2 * blake3(public_hex.encode() + message).hexdigest()
