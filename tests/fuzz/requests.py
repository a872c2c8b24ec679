"""Lanes: headers, JSON bodies and heartbeats of requests to the coordinator."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runspec.core.canonical import MAX_DEPTH, MalformedJson, canonical_json, parse_object
from runspec.core.hashing import digest_bytes, is_digest
from runspec.core.keys import SigningKey
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import Changer, damaged_json
from tests.fuzz.text import texts
from tests.verify.coordinator.deployment import RUN
from verify.coordinator import server
from verify.coordinator.intake import Refusal
from verify.coordinator.services.activity import Activity, scalars
from verify.request_auth import (
    BODY,
    KEY,
    NONCE,
    SIGNATURE,
    TIME,
    RequestChecker,
    Unauthorised,
    _message,
    sign_request,
)

Case = Callable[[Random], bool]
MEMORY = 8 << 20
OURS = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
NOW = 1.8e9
DIGEST = "ab" * 32
INFO = {"host": "somewhere", "gpus": 1, "version": None, "busy_s": 1.5, "tokens": 7}
ODD = [DIGEST, DIGEST[:-1], "near", "../x", 10**15, 10**15 + 1, "x" * 121, True]

BODIES: dict[str, dict[str, Any]] = {
    "/v1/workers": {"pool": "near", "info": INFO},
    "/v1/heartbeat": {"state": INFO},
    "/v1/leases": {"wait": 0, "holding": [DIGEST]},
    "/v1/release": {"leases": [DIGEST]},
    "/v1/validator/next": {"wait": 0, "holding": [DIGEST]},
    "/v1/validator/release": {"submissions": [DIGEST], "fault": "a check broke"},
}

# --- headers ------------------------------------------------------------------------------------

HEADERS = [KEY, TIME, NONCE, BODY, SIGNATURE]


def check_headers(true: dict[str, str], replaced: Mapping[str, str | None]) -> bool:
    """Only what was signed is believed, and that once."""
    sent = {**true, **replaced}
    headers = {name: value for name, value in sent.items() if value is not None}
    checker = RequestChecker(RUN)
    for attempt in range(2):
        with bounded(MEMORY):
            try:
                found = checker.check(headers, method="POST", path="/v1/leases", now=NOW)
            except Unauthorised as error:
                assert len(str(error)) < 500
                assert attempt == 1 or headers != true
                continue
        assert attempt == 0 and headers == true
        assert (found.key, found.body_digest) == (OURS.public_hex, digest_bytes(b"{}"))
    return headers == true


def signed_headers() -> dict[str, str]:
    return sign_request(OURS, run=RUN, method="POST", path="/v1/leases", body=b"{}", now=NOW)


# --- JSON and what is made of it ----------------------------------------------------------------


def check_json(sent: bytes, *, max_bytes: int = 1 << 16) -> dict[str, Any] | None:
    """What is taken is an object of one canonical form, and that is taken again."""
    with bounded(MEMORY):
        try:
            found = parse_object(sent, max_bytes=max_bytes)
        except MalformedJson as error:
            assert len(str(error)) < 1000
            return None
    assert isinstance(found, dict) and depth(found) <= MAX_DEPTH
    again = canonical_json(found)
    assert canonical_json(parse_object(again, max_bytes=1 << 20)) == again
    return found


def depth(value: object) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


def check_heartbeats(states: Sequence[Mapping[str, Any]], step: float) -> bool:
    """Rates are finite whatever was sent before; what is kept is a small map of scalars."""
    activity, taken = Activity(), False
    for number, state in enumerate(states):
        now = NOW + number * step
        with bounded(MEMORY):
            try:
                activity.heartbeat("key", state, now)
            except ValueError as error:
                assert len(str(error)) < 300
                continue
        taken = True
        kept = activity.peers["key"].state
        assert kept == scalars(state) and len(json.dumps(kept, allow_nan=False)) < 16 * 1600
        busy, tokens = activity.busy_fraction(now), activity.peers["key"].tokens_per_s
        assert (busy is None) == (tokens is None)
        if busy is not None and tokens is not None:
            assert 0 <= busy <= 1 and math.isfinite(tokens) and tokens >= 0
    return taken


def heartbeat() -> Case:
    """What workers say of themselves, one time after the other."""
    draw = Changer([INFO], ODD)

    def case(rng: Random) -> bool:
        states = [draw(rng) for _ in "xxx"[: rng.choice((1, 1, 2, 3))]]
        return check_heartbeats(states, rng.choice((0.0, 1e-9, 5.0, 60.0)))

    return case


def request_body() -> Case:
    """The JSON that workers and validators ask with, as the coordinator reads it."""
    draw = Changer(list(BODIES.values()), ODD)
    sound = [canonical_json(body) for body in BODIES.values()]

    def case(rng: Random) -> bool:
        if rng.random() < 0.2:
            sent = damaged_json(rng, rng.choice(sound), sound)
        else:
            sent = canonical_json(draw(rng))
        body = check_json(sent)
        return body is not None and _asked(body)

    return case


def _asked(body: dict[str, Any]) -> bool:
    """What is made of a body: bounded values, or `Refusal`."""
    with bounded(MEMORY):
        try:
            if {"wait", "holding"} <= set(body):
                wait_s, holding = server._wait_and_holding(body)
                assert 0 <= wait_s <= server.MAX_WAIT_S
                assert len(holding) <= 64 and all(map(is_digest, holding))
            for name in ("leases", "submissions"):
                if name in body:
                    assert all(map(is_digest, server._digests(name, body[name])))
            if isinstance(body.get("info"), dict):
                scalars(body["info"])
        except Refusal as error:
            assert error.status == 400 and len(error.words) < 500
            return False
        except ValueError as error:
            assert len(str(error)) < 300
            return False
    return True


def _signed(number: int) -> dict[str, str]:
    """As a worker signs a request, but for the nonce, which is the same each time."""
    headers = {**signed_headers(), NONCE: f"{number:032x}"}
    said = (headers[name] for name in (BODY, TIME, NONCE))
    return {**headers, SIGNATURE: OURS.sign(_message(RUN, "POST", "/v1/leases", *said))}


def request_headers() -> Case:
    """Signed requests, with real signatures."""
    true = [_signed(number) for number in range(64)]
    draw = texts([*true[0].values(), *true[1].values()])
    odd = [str(int(NOW)), "1٣", "１", "1e9", " 1", "+1", "", "0" * 12, "9" * 5000, "é", "AB" * 32]

    def case(rng: Random) -> bool:
        headers = rng.choice(true)
        replaced: dict[str, str | None] = {}
        for _ in "xxx"[: rng.choice((0, 1, 1, 1, 2, 3))]:
            other = (None, draw(rng), rng.choice(odd), rng.choice(list(headers.values())))
            replaced[rng.choice(HEADERS)] = rng.choice(other)
        if rng.random() < 0.1:  # a captured request's time, nonce or signature with another's
            name = rng.choice(HEADERS)
            replaced[name] = rng.choice(true)[name]
        return check_headers(headers, replaced)

    return case
