"""Signed requests: what is believed, and every way not to be."""

import pytest

from runspec.core.keys import SigningKey
from verify.request_auth import (
    BODY,
    KEY,
    NONCE,
    SIGNATURE,
    TIME,
    RequestChecker,
    TooManyRequests,
    Unauthorised,
    sign_request,
)

NOW = 1_700_000_000.0
BODY_BYTES = b'{"wait":1}'


def signed(key: SigningKey, *, run: str = "run", at: float = NOW) -> dict[str, str]:
    return sign_request(key, run=run, method="POST", path="/v1/leases?a=1", body=BODY_BYTES, now=at)


def check(
    checker: RequestChecker,
    headers: dict[str, str],
    *,
    method: str = "POST",
    path: str = "/v1/leases?a=1",
    now: float = NOW,
):
    return checker.check(headers, method=method, path=path, now=now)


def test_a_signed_request_names_its_key_and_its_body():
    key = SigningKey.generate()
    headers = signed(key)

    request = check(RequestChecker("run"), headers)

    assert request.key == key.public_hex
    assert request.body_digest == headers[BODY]


def test_the_same_request_is_refused_until_it_is_stale_and_afterwards_too():
    key, checker = SigningKey.generate(), RequestChecker("run")
    headers = signed(key)
    check(checker, headers)

    with pytest.raises(Unauthorised, match="made before"):
        check(checker, headers, now=NOW + 299)
    with pytest.raises(Unauthorised, match="set the clock"):
        check(checker, headers, now=NOW + 302)
    check(checker, signed(key, at=NOW + 302), now=NOW + 302)  # signed anew it is good


def test_what_is_stale_is_forgotten():
    key, checker = SigningKey.generate(), RequestChecker("run", skew_s=10)
    for second in range(100):
        check(checker, signed(key, at=NOW + second), now=NOW + second)

    assert len(checker) <= 12


@pytest.mark.parametrize("seconds", [-301, 301])
def test_clocks_may_differ_by_five_minutes_and_no_more(seconds: int):
    key = SigningKey.generate()

    check(RequestChecker("run"), signed(key), now=NOW + seconds * 299 / 301)
    with pytest.raises(Unauthorised, match="set the clock"):
        check(RequestChecker("run"), signed(key), now=NOW + seconds)


@pytest.mark.parametrize(
    "asked", [{"method": "GET"}, {"path": "/v1/leases"}, {"path": "/v1/leases?a=2"}]
)
def test_a_signature_is_for_one_method_and_path(asked: dict[str, str]):
    with pytest.raises(Unauthorised, match="does not match"):
        check(RequestChecker("run"), signed(SigningKey.generate()), **asked)


def test_a_signature_is_for_one_run():
    with pytest.raises(Unauthorised, match="does not match"):
        check(RequestChecker("run"), signed(SigningKey.generate(), run="other"))


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (KEY, SigningKey.generate().public_hex),
        (BODY, "0" * 64),
        (NONCE, "0" * 32),
        (TIME, str(int(NOW) + 1)),
        (SIGNATURE, "0" * 128),
    ],
    ids=["key", "body", "nonce", "time", "signature"],
)
def test_no_header_can_be_exchanged(header: str, value: str):
    headers = {**signed(SigningKey.generate()), header: value}

    with pytest.raises(Unauthorised, match="does not match"):
        check(RequestChecker("run"), headers)


@pytest.mark.parametrize("header", [KEY, BODY, NONCE, TIME, SIGNATURE])
@pytest.mark.parametrize("value", [None, "", "x", "-1", "1e9", "٣", "0" * 10_000])
def test_malformed_headers_are_refused(header: str, value: str | None):
    headers = signed(SigningKey.generate())
    if value is None:
        del headers[header]
    else:
        headers[header] = value

    with pytest.raises(Unauthorised):
        check(RequestChecker("run"), headers)


def test_a_refused_request_does_not_use_up_its_nonce():
    key, checker = SigningKey.generate(), RequestChecker("run")
    headers = signed(key)
    with pytest.raises(Unauthorised):
        check(checker, headers, path="/v1/verdicts")

    check(checker, headers)


def test_a_key_that_fills_its_memory_is_told_when_to_come_again_and_others_are_not():
    flooder, other = SigningKey.generate(), SigningKey.generate()
    checker = RequestChecker("run", max_of_a_key=5)
    for second in range(5):
        check(checker, signed(flooder, at=NOW + second), now=NOW + second)

    with pytest.raises(TooManyRequests) as refused:
        check(checker, signed(flooder, at=NOW + 10), now=NOW + 10)

    assert refused.value.retry_after_s == 290.0  # the first is stale 300 s after it was made
    check(checker, signed(other, at=NOW + 10), now=NOW + 10)
    check(checker, signed(flooder, at=NOW + 301), now=NOW + 301)


def test_a_full_memory_has_room_for_keys_below_their_share():
    # given a memory that two keys have filled
    flooders, others = ([SigningKey.generate() for _ in range(n)] for n in (2, 3))
    checker = RequestChecker("run", max_remembered=400)
    for _ in range(200):
        for key in flooders:
            check(checker, signed(key))
    assert len(checker) == 400

    # then they are held back, and no other is until it has as much as they
    for key in flooders:
        with pytest.raises(TooManyRequests):
            check(checker, signed(key))
    for key in others:
        for _ in range(80):  # 400 among five
            check(checker, signed(key))
        assert len(checker) <= 400 + 3 * 80
    for key in others:
        with pytest.raises(TooManyRequests):
            check(checker, signed(key))

    # and a replay is known for one all the while
    headers = signed(others[0], at=NOW + 301)
    check(checker, headers, now=NOW + 301)  # all before are stale
    assert len(checker) == 1
    with pytest.raises(Unauthorised, match="made before"):
        check(checker, headers, now=NOW + 302)


def test_what_is_not_admitted_takes_no_room():
    key, checker = SigningKey.generate(), RequestChecker("run", max_of_a_key=1)

    def refuse(key: str) -> None:
        raise PermissionError

    for _ in range(3):
        with pytest.raises(PermissionError):
            checker.check(signed(key), method="POST", path="/v1/leases?a=1", now=NOW, admit=refuse)
    assert len(checker) == 0
    check(checker, signed(key))


def test_a_clock_that_was_ahead_for_a_moment_does_not_fill_the_memory():
    """What came then is stale in a day; what came after is forgotten as ever."""
    key, checker = SigningKey.generate(), RequestChecker("run", max_of_a_key=10)
    later = NOW + 86400.0
    check(checker, signed(key, at=later), now=later)

    for n in range(40):  # one a minute, of which six are remembered
        now = NOW + 60.0 * n
        check(checker, signed(key, at=now), now=now)

    assert len(checker) <= 7
