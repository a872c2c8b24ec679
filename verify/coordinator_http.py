"""Requests to a coordinator: their signatures, and a client that limits, retries and checks.

`verify.client` interprets the answers.
"""

from __future__ import annotations

import base64
import heapq
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from runspec.core.address import is_server_url
from runspec.core.canonical import MalformedJson, digest_bytes, hash_parts, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.http_client import Answer, LongAnswer, NoAnswer, Retry, fetch_now
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles
from runspec.core.signed import (
    CLOCK_SKEW_S,
    BadSignature,
    SigningKey,
    is_public_key,
    signature_is_valid,
)

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

    The server's rates (`verify.coordinator.authentication`) limit how many it remembers. A restart
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


_log = logging.getLogger(__name__)

T = TypeVar("T")
ROLES_REFRESH_S = 300.0

MAX_ANSWER_BYTES = 64 * 1024
_TIMEOUT_S = 30.0
_MAX_WORDS = 1000
"""Largest number of characters of a refusal that a message repeats."""
_LONGEST_RETRY_S = 60.0
"""Longest wait after a 429, in seconds, whatever the coordinator asks for."""


class RunFinished(Exception):
    """Raised when the run has its last batch: there is no more work, and the caller may exit 0."""


class SubmissionRefused(UserError):
    """Raised if the coordinator refuses a submission, for example because its lease expired.

    It may accept the next one.
    """


class ContentRefused(UserError):
    """Raised if the coordinator refuses the content of a request (400, 413): sent again, it would
    be refused again."""


class CoordinatorHttp:
    """Sends requests to one coordinator; threads may share it.

    Args:
        url: URL such as http://127.0.0.1:8000.
        key: signs each request.
        run: name of the run.
        deadline_s: seconds for which a call retries while the coordinator cannot be reached,
            answers 429 or 5xx, or does not complete its answer; then it raises UserError.
        root_public_key: the pinned root key (hex), by which roles.json is checked.

    Raises:
        UserError: the URL is not one of a server.
    """

    def __init__(
        self, url: str, key: SigningKey, *, run: str, deadline_s: float, root_public_key: str = ""
    ) -> None:
        self.url, self._deadline_s = url.rstrip("/"), deadline_s
        self._key, self._run, self._root_public_key = key, run, root_public_key
        self._roles: tuple[float, Roles] | None = None
        """When roles.json was read, and its contents."""
        if not is_server_url(self.url):
            raise UserError(
                f"{url[:200]!r} is no address of a coordinator",
                place="coordinator",
                remedy="write for example http://127.0.0.1:8000",
            )

    def roles_document(self) -> bytes:
        """Return the run's roles.json, checked against the root key."""
        data = self.call("GET", "/v1/roles", max_bytes=MAX_ROLES_BYTES).content
        try:
            pinned = self._root_public_key
            roles = self.opened(data, open_roles, root_public_key=pinned, run=self._run)
        except UserError:
            with suppress(MalformedJson, KeyError, BadSignature):
                open_roles(data, root_public_key=None, run=self._run)
                raise UserError(
                    "signed under another root: this run has a new root, or another server answers",
                    place=f"coordinator {self.url}",
                    remedy="a rollback makes one: ask for the current link",
                ) from None
            raise
        self._roles = time.monotonic(), roles
        return data

    def roles(self) -> Roles:
        """Return the run's roles, read again every few minutes."""
        if self._roles is None or time.monotonic() - self._roles[0] > ROLES_REFRESH_S:
            self.roles_document()
        assert self._roles is not None
        return self._roles[1]

    def opened(self, data: bytes, read: Callable[..., T], **expected: Any) -> T:
        """Return what `read` makes of an answer; raise its errors as a `UserError`."""
        try:
            return read(data, **expected)
        except (MalformedJson, KeyError, BadSignature) as error:
            raise self.not_believed(error) from error

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        envelope: bytes | None = None,
        wait_s: float = 0.0,
        backlog_s: float = 0.0,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Answer:
        """Send a request, signed again each time, until it is answered or the deadline passes.

        Args:
            method, path: method and path of the request.
            body: body of the request.
            envelope: envelope of a submission or verdict, sent in a header.
            wait_s: seconds that the coordinator may wait before it answers, added to the deadline.
            backlog_s: seconds during which an answer 429 resets the deadline.
            max_bytes: largest size of the answer.

        Raises:
            RunFinished: the coordinator answers 410.
            SubmissionRefused: it answers 409.
            ContentRefused: it answers 400 or 413.
            UserError: it refuses for another reason, cannot be reached until the deadline, or sends
                too long an answer.
        """
        began = time.monotonic()
        name = f"the coordinator {self.url}"
        retry = Retry(name, began + self._deadline_s + wait_s, _log)
        while True:
            busy_s, answered = 0.0, None
            try:
                # An attempt that begins late still has the time that an answer needs.
                least_s = min(_TIMEOUT_S, self._deadline_s) + wait_s
                answer = self._try(
                    *(method, path, body, envelope),
                    max_bytes=max_bytes,
                    timeout_s=max(retry.deadline - time.monotonic(), least_s),
                    idle_s=_TIMEOUT_S + wait_s,
                )
                busy_s, answered = _busy_s(answer), answer.status
                if answer.status < 500 and not busy_s:
                    break
                trouble = f"answers {answer.status}: {_words(answer)}"
            except NoAnswer as error:
                trouble = f"cannot be reached: {error}"
            if busy_s and time.monotonic() < began + backlog_s:  # it is up but overloaded
                retry.deadline = time.monotonic() + busy_s + self._deadline_s + wait_s
            if not retry.pause(trouble, busy_s):
                raise UserError(
                    f"{trouble} (tried {method} {path} for {self._deadline_s:.0f} s)",
                    place=f"coordinator {self.url}",
                    remedy=_remedy(answered),
                )
        retry.answered()
        if answer.status == HTTPStatus.GONE:
            raise RunFinished(_words(answer))
        if answer.is_success:
            return answer
        refused = _REFUSALS.get(answer.status, UserError)
        words = f"{method} {path}: {answer.status}, {_words(answer)}"
        raise refused(words, place=f"coordinator {self.url}")

    def _try(
        self, method: str, path: str, body: bytes, envelope: bytes | None, **limits: Any
    ) -> Answer:
        headers = sign_request(self._key, run=self._run, method=method, path=path, body=body)
        if envelope is not None:
            headers[ENVELOPE] = base64.b64encode(envelope).decode()
        try:
            return fetch_now(method, self.url + path, body=body, headers=headers, **limits)
        except LongAnswer as error:
            raise self.not_believed(BadSignature(f"{method} {path}: {error}")) from error

    def not_believed(self, error: Exception) -> UserError:
        """Return the error of an answer that no coordinator sends."""
        return UserError(
            f"an answer that cannot be verified: {error}",
            place=f"coordinator {self.url}",
            remedy="check --coordinator, --run and --public-key",
        )


_REFUSALS: dict[int, type[UserError]] = {
    HTTPStatus.CONFLICT: SubmissionRefused,
    HTTPStatus.BAD_REQUEST: ContentRefused,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ContentRefused,
}


def _busy_s(answer: Answer) -> float:
    """Return the seconds after which to ask an overloaded coordinator (429) again; else 0.0."""
    if answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        return 0.0
    asked_s = Retry.LONGEST_S if answer.busy_s is None else answer.busy_s
    return min(max(asked_s, Retry.FIRST_S), _LONGEST_RETRY_S)


def _remedy(answered: int | None) -> str:
    """Return what a person can do if the coordinator did not answer in time.

    Args:
        answered: status of its last answer; None if there was none.
    """
    if answered is None:
        return "check that the coordinator runs and that its address is right"
    if answered == HTTPStatus.TOO_MANY_REQUESTS:
        return "it is overloaded: try again later, or ask the person who runs it"
    return "it is up: its log says what it waits for (a full disk, its database)"


def _words(answer: Answer) -> str:
    try:
        words = str(parse_object(answer.content, max_bytes=MAX_ANSWER_BYTES)["error"])
    except (MalformedJson, KeyError):
        words = answer.content[:800].decode(errors="replace")[:200]
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in words[:_MAX_WORDS])
