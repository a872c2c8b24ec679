"""Signed requests: what is believed, and every way not to be."""

import pytest

from runspec.core.keys import SigningKey
from verify.request_auth import (
    BODY,
    RequestChecker,
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
