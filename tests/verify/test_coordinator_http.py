"""Requests to a coordinator: signed, tried again while it is away, and refused in its words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from runspec.core import http_client
from runspec.core.errors import UserError
from runspec.core.http_client import Answer, LongAnswer, NoAnswer
from tests.verify.small_model import fixed_key
from verify import coordinator_http
from verify.coordinator_http import (
    BODY,
    ENVELOPE,
    NONCE,
    CoordinatorHttp,
    RequestChecker,
    RunFinished,
    SignedRequest,
    SubmissionRefused,
    Unauthorised,
    sign_request,
)

URL, KEY, NOW = "http://coordinator:1", fixed_key(1), 1_700_000_000.0
DEADLINE_S = 5.0
AWAY = NoAnswer("refused")


def answer(status: int, content: bytes = b"", retry_after: str = "") -> Answer:
    return Answer(status, retry_after, content)


@dataclass
class Coordinator:
    """Gives some answers one after the other, the last one for ever, on a clock of its own."""

    answers: list[Answer | Exception] = field(default_factory=list)
    now: float = 1000.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    @property
    def client(self) -> CoordinatorHttp:
        return CoordinatorHttp(URL + "/", KEY, run="demo", deadline_s=DEADLINE_S)

    def time(self) -> float:
        return NOW

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def fetch_now(self, method: str, url: str, **options: Any) -> Answer:
        self.asked.append({"method": method, "url": url, **options})
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    found = Coordinator()
    monkeypatch.setattr(coordinator_http, "fetch_now", found.fetch_now)
    for module in (coordinator_http, http_client):
        monkeypatch.setattr(module, "time", found)
    return found


def test_a_request_is_signed_anew_until_it_is_answered(coordinator: Coordinator) -> None:
    coordinator.answers = [AWAY, answer(503), answer(503), answer(200, b"here")]
    found = coordinator.client.call(
        "POST", "/v1/leases?a=1", body=b"{}", envelope=b"signed", max_bytes=77
    )
    assert found.content == b"here"
    assert coordinator.pauses == [0.05, 0.1, 0.2]
    asked = coordinator.asked
    assert len({each["headers"][NONCE] for each in asked}) == len(asked) == 4
    assert {(e["method"], e["url"], e["body"], e["max_bytes"]) for e in asked} == {
        ("POST", f"{URL}/v1/leases?a=1", b"{}", 77)
    }
    assert {each["headers"][ENVELOPE] for each in asked} == {"c2lnbmVk"}
    assert [e["timeout_s"] for e in asked] == [5.0] * 4 and asked[0]["idle_s"] == 30.0


def test_a_coordinator_may_take_the_time_that_it_was_given_besides(coordinator):
    coordinator.answers = [AWAY]
    with pytest.raises(UserError):
        coordinator.client.call("GET", "/", wait_s=20.0)
    assert coordinator.asked[0]["timeout_s"] == 25.0 and coordinator.asked[0]["idle_s"] == 50.0
    assert 23.0 <= sum(coordinator.pauses) <= 25.0
    assert max(coordinator.pauses) == 2.0


@pytest.mark.parametrize(
    ("last", "words", "remedy"),
    [
        (AWAY, "cannot be reached: refused", "check that the coordinator runs and that its addr"),
        (answer(503, b'{"error": "waits for its disk"}'), "answers 503: waits for", "its log says"),
        (answer(429, b"busy", "30"), "answers 429: busy", "overloaded"),
    ],
)
def test_whoever_waited_in_vain_is_told_for_what(coordinator, last, words, remedy):
    coordinator.answers = [last]
    with pytest.raises(UserError, match=rf"{words}.* \(tried POST /v1/leases for 5 s\)") as out:
        coordinator.client.call("POST", "/v1/leases")
    assert out.value.place == f"coordinator {URL}" and remedy in (out.value.remedy or "")
    assert sum(coordinator.pauses) <= DEADLINE_S


@pytest.mark.parametrize(
    ("status", "error"), [(410, RunFinished), (409, SubmissionRefused), (403, UserError)]
)
def test_a_refusal_is_in_the_words_of_the_coordinator(coordinator, status, error):
    coordinator.answers = [answer(status, b'{"error": "not you"}')]
    with pytest.raises(error, match="not you") as raised:
        coordinator.client.call("GET", "/v1/roles")
    assert type(raised.value) is error and len(coordinator.asked) == 1


@pytest.mark.parametrize(
    "said", [b"\x1b[2J" + b"x" * 9000, b'{"error": "\\u001b[2J%b"}' % (b"x" * 9000)]
)
def test_words_that_are_none_of_a_coordinators_are_short_and_plain(coordinator, said):
    coordinator.answers = [answer(403, said)]
    with pytest.raises(UserError) as out:
        coordinator.client.call("GET", "/v1/roles")
    assert "GET /v1/roles: 403, " in str(out.value) and "\x1b" not in str(out.value)
    assert len(str(out.value)) < 1100


def test_more_bytes_than_were_asked_for_are_not_believed(coordinator: Coordinator) -> None:
    coordinator.answers = [LongAnswer("11 bytes, at most 10 expected")]
    with pytest.raises(UserError, match="cannot be verified: GET /v1/roles: 11 bytes") as out:
        coordinator.client.call("GET", "/v1/roles", max_bytes=10)
    assert out.value.place == f"coordinator {URL}" and "--public-key" in (out.value.remedy or "")


@pytest.mark.parametrize(
    ("said", "pause"), [("1", 1.0), ("3600", 60.0), ("0", 0.05), ("soon", 2.0)]
)
def test_a_coordinator_with_too_much_to_do_is_asked_when_it_says(coordinator, said, pause):
    coordinator.answers = [answer(429, retry_after=said), answer(200, b"here")]
    assert coordinator.client.call("GET", "/v1/roles", backlog_s=1.0).content == b"here"
    assert coordinator.pauses == [pause]
    # and no longer than the caller allows
    coordinator.answers, coordinator.pauses = [answer(429, retry_after="30")], []
    with pytest.raises(UserError, match="answers 429"):
        coordinator.client.call("GET", "/v1/roles", backlog_s=100.0)
    assert coordinator.pauses == [30.0] * 4


# --- signed requests ----------------------------------------------------------------------------


PATH = "/v1/leases?a=1"


def signed(at: float = NOW) -> dict[str, str]:
    return sign_request(KEY, run="run", method="POST", path=PATH, body=b"{}", now=at)


def checked(
    checker: RequestChecker, headers: dict[str, str] | None = None, **asked: Any
) -> SignedRequest:
    headers = headers or signed()
    return checker.check(headers, **{"method": "POST", "path": PATH, "now": NOW, **asked})


def test_a_request_is_believed_once_for_five_minutes() -> None:
    checker, headers = RequestChecker("run"), signed()

    def refuse(key: str) -> None:
        raise PermissionError(key)

    # given that it was refused for another path, or for who asks, which does not use it up
    with pytest.raises(Unauthorised):
        checked(checker, headers, path="/v1/verdicts")
    with pytest.raises(PermissionError, match=KEY.public_hex):
        checked(checker, headers, admit=refuse)
    assert checked(checker, headers) == SignedRequest(KEY.public_hex, headers[BODY])
    with pytest.raises(Unauthorised, match="made before"):
        checked(checker, headers, now=NOW + 300)
    with pytest.raises(Unauthorised, match="set the clock"):
        checked(checker, headers, now=NOW + 302)
    checked(checker, signed(at=NOW + 302), now=NOW + 302)
    assert len(checker._seen) == 1  # what has expired is forgotten


@pytest.mark.parametrize("way", [-1, 1])
def test_clocks_may_differ_by_five_minutes_and_no_more(way: int) -> None:
    checked(RequestChecker("run"), now=NOW + 300 * way)
    with pytest.raises(Unauthorised, match="behind" if way > 0 else "ahead of"):
        checked(RequestChecker("run"), now=NOW + 301 * way)


@pytest.mark.parametrize(
    ("run", "asked"),
    [
        ("other", {}),
        ("run", {"method": "GET"}),
        ("run", {"path": "/v1/leases"}),
        ("run", {"path": PATH + "2"}),
    ],
)
def test_a_signature_is_for_one_run_method_and_path(run: str, asked: dict[str, Any]) -> None:
    with pytest.raises(Unauthorised, match="does not match"):
        checked(RequestChecker(run), **asked)
