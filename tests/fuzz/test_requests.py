"""Whatever a request to the coordinator holds: its headers, its body, the envelope with it."""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from runspec.core.canonical import MAX_DEPTH, MalformedJson, canonical_json, parse_object
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.signed import sign_document
from tests.fuzz.bounds import bounded, costly
from tests.fuzz.json_values import changed, damaged, pieces, text, values
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from verify.coordinator.activity import Activity, scalars
from verify.coordinator.edge import limiter
from verify.formats.lease import open_lease
from verify.formats.verdict import VerdictEnvelope
from verify.request_auth import (
    BODY,
    ENVELOPE,
    KEY,
    NONCE,
    SIGNATURE,
    TIME,
    RequestChecker,
    Unauthorised,
    sign_request,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MEMORY = 8 << 20
OURS = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
NOW = 1.8e9
DIGEST = "ab" * 32
INFO = {"host": "somewhere", "gpus": 1, "version": None, "busy_s": 1.5, "tokens": 7}
ODD = [DIGEST, DIGEST[:-1], "near", "../x", 10**15, 10**15 + 1, "x" * 121, True]
anything = values(ODD, [INFO, [DIGEST]])

# --- headers ------------------------------------------------------------------------------------

HEADERS = [KEY, TIME, NONCE, BODY, SIGNATURE]
header_values = st.one_of(
    st.text(max_size=70),
    st.text("0123456789abcdefABCDEF", max_size=130),
    st.from_regex(r"[0-9a-f]{32}|[0-9a-f]{64}|[0-9a-f]{128}", fullmatch=True),
    st.integers(-(10**13), 10**13).map(str),
    st.sampled_from([str(int(NOW)), "1٣", "１", "1e9", " 1", "+1", "", "0" * 12, "9" * 5000, "é"]),
)


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


@costly
@given(replaced=st.dictionaries(st.sampled_from(HEADERS), st.none() | header_values, max_size=5))
def test_headers(replaced: dict[str, str | None]) -> None:
    check_headers(signed_headers(), replaced)


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


@costly
@given(value=st.dictionaries(text, anything, max_size=5), data=st.data())
def test_json_objects(value: dict[str, Any], data: st.DataObject) -> None:
    sound = canonical_json(value)
    assert check_json(sound) == value
    check_json(data.draw(damaged([sound]))[0])


@costly
@given(data=st.binary(max_size=300) | st.lists(pieces, max_size=40).map(b"".join))
def test_json_of_any_bytes(data: bytes) -> None:
    check_json(data, max_bytes=4096)


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


@costly
@given(states=st.lists(changed([INFO], anything), min_size=1, max_size=4), step=st.floats(0, 60))
def test_heartbeats(states: list[dict[str, Any]], step: float) -> None:
    check_heartbeats(states, step)


# --- requests to a server -----------------------------------------------------------------------

PATIENT = limiter.Rate(1e9, 10**9)
NO_WAIT = [0, 0.0, -1, -(10**400), 1e-9, True, "0", None, [], 1e-300]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/workers": {"pool": "near", "info": INFO},
    "/v1/heartbeat": {"state": INFO},
    "/v1/leases": {"wait": 0, "holding": [DIGEST]},
    "/v1/release": {"leases": [DIGEST]},
    "/v1/validator/next": {"wait": 0, "holding": [DIGEST]},
    "/v1/validator/release": {"submissions": [DIGEST], "fault": "a check broke"},
}
SUBMISSIONS, VERDICTS = "/v1/submissions", "/v1/verdicts"


@dataclass(frozen=True)
class Served:
    """A coordinator at work, and what would be sound to say to it."""

    site: Site
    http: httpx.Client
    keys: dict[str, SigningKey]
    table: bytes
    signed: bytes
    """Envelope of a submission that could be made."""
    envelopes: dict[str, dict[str, Any]]
    """Payloads: of that submission, and of a verdict on one that was made."""

    def post(self, path: str, body: bytes, who: str, envelope: str = "") -> httpx.Response:
        headers = sign_request(self.keys[who], run=RUN, method="POST", path=path, body=body)
        if envelope:
            headers[ENVELOPE] = envelope
        return self.http.post(self.site.url + path, content=body, headers=headers)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    site = Site(tmp_path_factory.mktemp("fuzz-requests"), tiny_spec(lease_timeout="24h"))
    site.publish(0)
    logging.getLogger("verify").setLevel(logging.WARNING)
    with (
        pytest.MonkeyPatch.context() as patch,
        site.origin(),
        site.serving() as task,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        patch.setattr(limiter, "RATES", dict.fromkeys(limiter.RATES, PATIENT))
        key, client = site.worker()
        made = []
        for _ in range(2):
            data = client.lease(20.0)
            assert data is not None
            lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
            made.append(submission(data, lease, key, note=len(made)))
            if len(made) == 1:
                client.submit(*made[0])
        signed, table = made[1]
        judged = VerdictEnvelope(RUN, 0, digest_bytes(made[0][1]), True, "", [0], DIGEST, 9)
        yield Served(
            site,
            http,
            {"worker": key, "validator": site.validator, "stranger": OURS},
            table,
            signed,
            {SUBMISSIONS: json.loads(signed)["payload"], VERDICTS: asdict(judged)},
        )
        assert not task.done(), "the coordinator went on"
    logging.getLogger("verify").setLevel(logging.NOTSET)


@costly
@given(
    path=st.sampled_from(sorted(BODIES)),
    who=st.sampled_from(["worker", "validator", "stranger"]),
    wait=st.sampled_from(NO_WAIT),
    data=st.data(),
)
def test_bodies(served: Served, path: str, who: str, wait: object, data: st.DataObject) -> None:
    """An answer that blames the caller, or a sound one; never a fault of the server."""
    body = data.draw(changed([BODIES[path]], anything))
    if "wait" in body:
        body["wait"] = wait  # the server waits as long as it is asked to
    sent = canonical_json(body)
    if "wait" not in body and data.draw(st.booleans()):
        sent, _ = data.draw(damaged([sent]))

    answer = served.post(path, sent, who)

    assert answer.status_code in (200, 204, 400, 401, 403, 413), answer.text[:500]
    assert answer.is_success or 0 < len(answer.json()["error"]) <= 500


@costly
@given(
    path=st.sampled_from([SUBMISSIONS, VERDICTS]),
    flaw=st.sampled_from(["bytes", "index", "digest", "none"]),
    data=st.data(),
)
def test_uploads(served: Served, path: str, flaw: str, data: st.DataObject) -> None:
    """What is uploaded is no verdict table, and each submission has a flaw: none is taken."""
    table = data.draw(damaged([served.table]))[0]
    payload = {**served.envelopes[path], "digest": digest_bytes(table), "bytes": len(table)}
    if path == SUBMISSIONS:
        flaws = {"bytes": len(table) - 1, "index": 7, "digest": DIGEST}
        payload[flaw if flaw in flaws else "index"] = flaws.get(flaw, 7)
    made = payload if flaw != "none" else data.draw(changed([payload], anything))
    kind, who = ("submission", "worker") if path == SUBMISSIONS else ("verdict", "validator")
    envelope = base64.b64encode(sign_document(kind, made, served.keys[who])).decode()

    answer = served.post(path, table, who, envelope[:16_000])

    # 202 of a verdict: on another submission that nobody knows.
    expected = (202, 400, 403, 409, 413) if path == VERDICTS else (400, 403, 409, 413)
    assert answer.status_code in expected, answer.text[:500]
    assert answer.is_success or 0 < len(answer.json()["error"]) <= 500
    folder = served.site.run_dir / "rollouts" / "step_0"
    assert len(list(folder.iterdir())) == 2, "what was refused leaves nothing behind"


@costly
@given(path=st.sampled_from([SUBMISSIONS, VERDICTS]), data=st.data())
def test_envelope_headers(served: Served, path: str, data: st.DataObject) -> None:
    broken = data.draw(damaged([served.signed]))
    printable = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
    header = data.draw(printable | st.just(base64.b64encode(broken[0]).decode()))
    who = "worker" if path == SUBMISSIONS else "validator"
    answer = served.post(path, served.table + b"x", who, header)  # never what was signed
    assert answer.status_code in (400, 403), answer.text[:500]


def test_what_was_changed_was_sound(served: Served) -> None:
    """Last, since it answers the lease."""
    header = base64.b64encode(served.signed).decode()
    assert served.post(SUBMISSIONS, served.table, "worker", header).status_code == 202
