"""Signed HTTP requests: authentication of the caller, and refusal of replays.

The signature (ed25519) covers the run, the method, the path with its query, the BLAKE3 of the body,
the time and the nonce, each length-prefixed. So a captured request is valid for no other run, path
or body. It expires after `CLOCK_SKEW_S`, and until then it is refused as a replay. The body's
digest is a header, so a server can refuse a stranger before it reads the body.

    Runspec-Key         the signer's public key, 64 hex characters
    Runspec-Time        seconds since the epoch, a decimal integer
    Runspec-Nonce       16 random bytes, 32 hex characters
    Runspec-Body        BLAKE3 of the body, 64 hex characters
    Runspec-Signature   128 hex characters
"""

from __future__ import annotations

import heapq
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runspec.core.hashing import digest_bytes, hash_parts, is_digest
from runspec.core.keys import SigningKey, is_public_key, signature_is_valid
from runspec.core.signed import CLOCK_SKEW_S

KEY, TIME, NONCE = "Runspec-Key", "Runspec-Time", "Runspec-Nonce"
BODY, SIGNATURE = "Runspec-Body", "Runspec-Signature"
ENVELOPE = "Runspec-Envelope"
"""Base64 of the signed envelope that goes with a table."""

_NONCE = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"[0-9]{1,12}")


class Unauthorised(Exception):
    """Raised for a request that is not authentic, with the reason."""


@dataclass(frozen=True)
class SignedRequest:
    """Key that signed a request, and the digest that the body must have."""

    key: str
    body_digest: str


def sign_request(
    key: SigningKey, *, run: str, method: str, path: str, body: bytes, now: float | None = None
) -> dict[str, str]:
    """Return headers that sign one attempt of a request; a retry needs a new signature.

    Args:
        key: key of the caller.
        run: name of the run that the server serves.
        method: method of the request, in capitals.
        path: path as sent, with its query if there is one.
        body: body as sent; empty for GET.
        now: seconds since the epoch; the clock if None.
    """
    moment = str(int(time.time() if now is None else now))
    nonce, body_digest = secrets.token_hex(16), digest_bytes(body)
    message = _message(run, method, path, body_digest, moment, nonce)
    return {
        KEY: key.public_hex,
        TIME: moment,
        NONCE: nonce,
        BODY: body_digest,
        SIGNATURE: key.sign(message),
    }


class RequestChecker:
    """Checks the headers of signed requests and remembers them until they expire.

    The server's rates (`verify.coordinator.edge.limits`) limit how many it remembers. A restart
    forgets them. A request that is replayed in the seconds after a restart does no harm, because
    repeated requests change nothing.

    Args:
        run: name of the run that the server serves.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen: set[tuple[str, str]] = set()
        """Key and nonce of each request."""
        self._order: list[tuple[float, tuple[str, str]]] = []
        """Heap of the time at which a request expires, its key and its nonce."""

    def check(
        self,
        headers: Mapping[str, str],
        *,
        method: str,
        path: str,
        now: float | None = None,
        admit: Callable[[str], None] = lambda key: None,
    ) -> SignedRequest:
        """Return who signed the request; the caller still compares the body with `body_digest`.

        Args:
            headers: headers of the request.
            method, path: method and path of the request, as sent.
            now: seconds since the epoch; the clock if None.
            admit: called with the signer's key before the request is remembered; its errors are
                raised to the caller.

        Raises:
            Unauthorised: the request is malformed, was seen before, or is for another time, run,
                path or method.
        """
        now = time.time() if now is None else now
        key, moment, nonce = (headers.get(name, "") for name in (KEY, TIME, NONCE))
        body_digest, signature = headers.get(BODY, ""), headers.get(SIGNATURE, "")
        if not (is_digest(key) and is_digest(body_digest)):
            raise Unauthorised(f"{KEY} and {BODY} must be 64 hex characters each")
        if not is_public_key(key):
            raise Unauthorised(f"{key[:16]} is a weak key that anybody can sign for: make another")
        if not (_TIME.fullmatch(moment) and _NONCE.fullmatch(nonce)):
            raise Unauthorised(f"{TIME} must be seconds since the epoch, {NONCE} 32 hex characters")
        if abs(now - int(moment)) > CLOCK_SKEW_S:
            way = "behind" if now > int(moment) else "ahead of"
            raise Unauthorised(
                f"the caller's clock is {abs(now - int(moment)):.0f} s {way} ours, "
                f"{CLOCK_SKEW_S:.0f} s are allowed: set the clock"
            )
        message = _message(self._run, method, path, body_digest, moment, nonce)
        if not signature_is_valid(key, message, signature):
            raise Unauthorised(f"the signature of {key[:16]} does not match this request")
        while self._order and self._order[0][0] < now:  # these have expired
            self._seen.remove(heapq.heappop(self._order)[1])
        if (key, nonce) in self._seen:
            raise Unauthorised("this request was made before; sign each attempt anew")
        admit(key)
        self._seen.add((key, nonce))
        heapq.heappush(self._order, (int(moment) + CLOCK_SKEW_S, (key, nonce)))
        return SignedRequest(key, body_digest)


def _message(run: str, method: str, path: str, body_digest: str, moment: str, nonce: str) -> bytes:
    return hash_parts("runspec/v1 request", run, method, path, body_digest, moment, nonce)
