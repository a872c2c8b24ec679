"""Signed requests: what is believed, and every way not to be."""

import pytest

from runspec.core.keys import SigningKey
from verify.request_auth import (
    BODY,
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
