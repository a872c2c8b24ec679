"""Requests to a coordinator with one key: signed, limited in size, retried.

`verify.client` interprets the answers.
"""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from runspec.core.address import is_server_url
from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.http_client import Answer, LongAnswer, NoAnswer, Retry, Sink, fetch_now
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature
from verify.request_auth import ENVELOPE, sign_request

_log = logging.getLogger(__name__)

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

    Raises:
        UserError: the URL is not one of a server.
    """

    def __init__(self, url: str, key: SigningKey, *, run: str, deadline_s: float) -> None:
        self.url = url.rstrip("/")
        self._key, self._run, self._deadline_s = key, run, deadline_s
        if not is_server_url(self.url):
            raise UserError(
                f"{url[:200]!r} is no address of a coordinator",
                place="coordinator",
                remedy="write for example http://127.0.0.1:8000",
            )

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
        into: Sink | None = None,
    ) -> Answer:
        """Send a request, signed again each time, until it is answered or the deadline passes.

        Args:
            method, path: method and path of the request.
            body: body of the request.
            envelope: envelope of a submission or verdict, sent in a header.
            wait_s: seconds that the coordinator may wait before it answers, added to the deadline.
            backlog_s: seconds during which an answer 429 resets the deadline.
            max_bytes: largest size of the answer.
            into: receives the pieces of a long answer, from the first one at each attempt. Each
                attempt that gets further than those before resets the deadline.

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
        came = furthest = 0

        @contextmanager
        def counted(into: Sink) -> Iterator[Callable[[bytes], None]]:
            with into() as write:

                def take(piece: bytes) -> None:
                    nonlocal came
                    came += len(piece)
                    write(piece)

                yield take

        while True:
            came, busy_s, answered = 0, 0.0, None
            try:
                # An attempt that begins late still has the time that an answer needs.
                least_s = min(_TIMEOUT_S, self._deadline_s) + wait_s
                answer = self._try(
                    *(method, path, body, envelope),
                    max_bytes=max_bytes,
                    timeout_s=max(retry.deadline - time.monotonic(), least_s)
                    if into is None
                    else math.inf,
                    idle_s=_TIMEOUT_S + wait_s,
                    into=None if into is None else partial(counted, into),
                )
                busy_s, answered = _busy_s(answer), answer.status
                if answer.status < 500 and not busy_s:
                    break
                trouble = f"answers {answer.status}: {_words(answer)}"
            except NoAnswer as error:
                trouble = f"cannot be reached: {error}"
            if came > furthest:
                furthest, retry.deadline = came, time.monotonic() + self._deadline_s
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
        changed = "" if into is None else "its data changed: start the same command again"
        raise refused(words, place=f"coordinator {self.url}", remedy=changed)

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
