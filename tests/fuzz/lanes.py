"""The fuzz lanes: each parser of bytes from outside. Here are those of texts and of requests."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from aiohttp import web
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from broadcast.admission import Tokens
from broadcast.answers import byte_range
from broadcast.server import MAX_WAIT_S, _poll_parameters
from broadcast.transport import base_url
from runspec.core.address import parse_join_link
from runspec.core.canonical import canonical_json, digest_bytes, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.http_server import UNKNOWN, client_address
from runspec.core.signed import SigningKey, sign_document
from tests.fuzz import documents, files
from tests.fuzz.bounds import Lane
from tests.fuzz.strategies import TEXT_PIECES, changed, damaged, damaged_json, texts
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import granted, post
from tests.verify.small_model import fixed_key
from verify.coordinator import authentication as limits
from verify.coordinator import requests as received
from verify.coordinator.handlers.workers import Activity, scalars
from verify.coordinator.requests import Refusal
from verify.coordinator_http import RequestChecker, SignedRequest, Unauthorised, sign_request

# --- texts --------------------------------------------------------------------------------------

TOKEN, ROOT = "t" * 40, "ab" * 32
TOKENS = Tokens({TOKEN: "ann"})
PROXIES = tuple(map(ip_network, ("10.0.0.0/24", "fd00::/8")))
LINKS = texts(
    f"http://host.example:8000/#run=demo&root={ROOT}",
    f"https://[::1]:8000/pre/#run=de%20mo&root={ROOT}&invite=abc.def",
    "http://127.0.0.1:8000",
)


def _part(given: tuple[str, int]) -> slice | None:
    part = byte_range(*given)
    assert part is None or (part.step == 1 and part.start >= 0 and part.stop <= given[1])
    return part


def _address(given: tuple[str | None, list[str]]) -> str | None:
    found = client_address(*given, PROXIES)
    assert found == UNKNOWN or ip_network(found).prefixlen in (32, 64)
    return None if found == UNKNOWN else found


def _poll(query: str) -> tuple[int | None, float]:
    request: Any = SimpleNamespace(query=dict(parse_qsl(query, keep_blank_values=True)))
    after, wait_s = _poll_parameters(request)
    assert (after is None or type(after) is int) and 0 <= wait_s <= MAX_WAIT_S
    return after, wait_s


def _bearer(header: str) -> str | None:
    name = TOKENS.name_of(header)
    assert bool(name) == (header[:7].lower() == "bearer " and header[7:].strip() == TOKEN)
    return name


def _check_link(link: Any, text: str) -> None:
    assert link.root is None or is_digest(link.root)
    if link.run is not None and link.root is not None:
        again = parse_join_link(str(link))
        assert (again.run, again.root) == (link.run or None, link.root)


# --- requests -----------------------------------------------------------------------------------

OURS, NOW, DIGEST = fixed_key(9), 1.8e9, "ab" * 32
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
SOUND = [canonical_json(body) for body in BODIES.values()]
HEADERS = [
    sign_request(OURS, run=RUN, method="POST", path="/v1/leases", body=b"{}", now=NOW)
    for _ in range(8)
]
HEADER_VALUES = st.one_of(
    st.none(),
    st.sampled_from([str(int(NOW)), "1٣", "１", "1e9", " 1", "+1", "", "0" * 12, "é", "AB" * 32]),
    st.sampled_from([value for headers in HEADERS for value in headers.values()]),
    texts(*HEADERS[0].values()),
)


@st.composite
def headers(draw: DrawFn) -> tuple[dict[str, str], dict[str, str]]:
    """Signed headers, and what is sent of them: all, or with some replaced."""
    true = draw(st.sampled_from(HEADERS))
    names = st.sampled_from(list(HEADERS[0]))
    sent = true | draw(st.dictionaries(names, HEADER_VALUES, max_size=3))
    return true, {name: value for name, value in sent.items() if value is not None}


def _checked(given: tuple[dict[str, str], dict[str, str]]) -> SignedRequest:
    """Who has signed the headers; sent again they are refused."""
    checker = RequestChecker(RUN)
    found = checker.check(given[1], method="POST", path="/v1/leases", now=NOW)
    with pytest.raises(Unauthorised):
        checker.check(given[1], method="POST", path="/v1/leases", now=NOW)
    return found


def _check_headers(found: SignedRequest, given: tuple[dict[str, str], dict[str, str]]) -> None:
    true, sent = given
    assert sent == true
    assert (found.key, found.body_digest) == (OURS.public_hex, digest_bytes(b"{}"))


def _refused_headers(given: tuple[dict[str, str], dict[str, str]]) -> None:
    assert given[0] != given[1]


def _asked(sent: bytes) -> dict[str, Any]:
    """A JSON body, and what the coordinator makes of it."""
    body = parse_object(sent, max_bytes=1 << 16)
    if {"wait", "holding"} <= set(body):
        wait_s, holding = received.wait_and_holding(body)
        assert 0 <= wait_s <= received.MAX_WAIT_S
        assert len(holding) <= 64 and all(map(is_digest, holding))
    for name in {"leases", "submissions"} & set(body):
        assert all(map(is_digest, received.digests(name, body[name])))
    if isinstance(body.get("info"), dict):
        scalars(body["info"])
    return body


def _check_body(body: dict[str, Any], sent: bytes) -> None:
    again = canonical_json(body)
    assert canonical_json(parse_object(again, max_bytes=1 << 20)) == again


def _beats(given: tuple[list[Mapping[str, Any]], float]) -> Activity | None:
    """Heartbeats one after the other; rates are finite whatever was sent before."""
    states, step = given
    activity, taken = Activity(), False
    for number, state in enumerate(states):
        now = NOW + number * step
        try:
            activity.heartbeat("key", state, now)
        except ValueError as error:
            assert len(str(error)) < 300
            continue
        taken, peer = True, activity.peers["key"]
        assert peer.state == scalars(state)
        assert len(json.dumps(peer.state, allow_nan=False)) < 16 * 1600
        busy, tokens = activity.busy_fraction(now), peer.tokens_per_s
        assert (busy is None) == (tokens is None)
        if busy is not None and tokens is not None:
            assert 0 <= busy <= 1 and math.isfinite(tokens) and tokens >= 0
    return activity if taken else None


# --- a coordinator at work ----------------------------------------------------------------------

UPLOADS = {"/v1/submissions": "submission", "/v1/verdicts": "verdict"}
"""The kind of document that goes with a file; 202 of a verdict: on a submission nobody knows."""
REFUSED = {400, 401, 403, 404, 409, 413, 422}
NO_WAIT: list[Any] = [0, 0.0, -1, -(10**400), 1e-9, True, "0", None, [], 1e-300]


@dataclass
class AtWork:
    """A coordinator at work, and the sound upload of a submission that it lacks."""

    site: Site
    keys: dict[str, SigningKey]
    signed: bytes
    table: bytes


AT_WORK: list[AtWork] = []
"""The coordinator, while cases of the lane `requests` run."""


@contextmanager
def serving() -> Iterator[None]:
    """Starts a coordinator; at the end it still runs, and takes the submission that was sound."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        site = Site(Path(folder), tiny_spec(lease_timeout="24h"))
        site.publish(0)
        patch.setattr(logging.getLogger("verify"), "level", logging.WARNING)
        patch.setattr(limits, "RATES", dict.fromkeys(limits.RATES, limits.Rate(1e9, 10**9)))
        with site.origin(), site.serving() as task:
            key, client = site.worker()
            data, lease = granted(site, client)
            keys = {"worker": key, "validator": site.validator, "stranger": OURS}
            AT_WORK.append(AtWork(site, keys, *submission(data, lease, key)))
            yield
            found = AT_WORK.pop()
            assert not task.done(), f"the coordinator ended: {task.result()}"
            client.submit(found.signed, found.table)


@st.composite
def requests(draw: DrawFn) -> tuple[str, str, bytes, bytes]:
    """Path, signer, body and envelope: a JSON body, or an upload that no change makes sound."""
    work = AT_WORK[-1]
    if draw(st.booleans()):
        path, who = draw(st.sampled_from(sorted(BODIES))), draw(st.sampled_from(list(work.keys)))
        body = draw(changed([BODIES[path]], ODD))
        if "wait" in BODIES[path]:  # the server waits as long as it is asked to
            return path, who, canonical_json(body | {"wait": draw(st.sampled_from(NO_WAIT))}), b""
        sound = canonical_json(body)
        return path, who, draw(damaged_json([sound])) if len(sound) > 2 else sound, b""
    path, who = draw(st.sampled_from(list(zip(UPLOADS, work.keys, strict=False))))
    table = draw(damaged([work.table], TEXT_PIECES))
    flaw = {"lease": DIGEST, "digest": digest_bytes(table), "bytes": len(table)}
    payload = draw(changed([parse_object(work.signed, max_bytes=1 << 16)["payload"] | flaw], ODD))
    sound = sign_document(UPLOADS[path], payload, work.keys[who])
    envelope = draw(st.just(sound) | damaged_json([work.signed]) | st.binary(min_size=1))
    return path, who, table, envelope


def _answered(given: tuple[str, str, bytes, bytes]) -> bool | None:
    """Whether a request succeeds; one that is refused says why and leaves nothing behind."""
    path, who, body, envelope = given
    work = AT_WORK[-1]
    answer = post(work.site, work.keys[who], path, body, envelope=envelope[:12_000])
    if not answer.is_success:
        assert answer.status_code in REFUSED, answer.text[:500]
        assert 0 < len(answer.json()["error"]) <= 500
    assert not list((work.site.run_dir / "rollouts").glob("step_0/*"))
    return True if answer.is_success else None


_LANES = [
    Lane(
        "chunk range",
        st.tuples(
            texts("bytes=0-", "bytes=5-9", "bytes=-5", "bytes=0-0,5-6", latin=True).map(
                lambda header: header[:4096]  # the server accepts no longer one
            ),
            st.sampled_from((10, 0, 1, 2**31, 2**44)),
        ),
        _part,
    ),
    Lane(
        "forwarded",
        st.tuples(
            st.sampled_from(("10.0.0.7", "fd00::1", "9.9.9.9", None))
            | texts("1.2.3.4", "[fd00::1]:80", "::ffff:1.2.3.4", "fe80::1%eth0"),
            st.lists(
                texts("1.2.3.4, 10.0.0.7", "unknown", "::1,fd00::2", "1.2.3.4:99"), max_size=2
            ),
        ),
        _address,
    ),
    Lane(
        "poll parameters",
        texts("after=3&wait=20", "wait=1e3", "after=-1", "wait=nan", "after=1_0&wait=+5"),
        _poll,
        refusals=(web.HTTPBadRequest,),
    ),
    Lane(
        "bearer", texts(f"Bearer {TOKEN}", f"bearer {TOKEN} ", f"Basic {TOKEN}", "Bearer"), _bearer
    ),
    Lane("server address", LINKS, base_url, refusals=(UserError,), longest=20_000),
    Lane("join link", LINKS, parse_join_link, _check_link, (UserError,), longest=2000),
    Lane(
        "heartbeat",
        st.tuples(
            st.lists(changed([INFO], ODD), min_size=1, max_size=3),
            st.sampled_from((5.0, 0.0, 1e-9, 60.0)),
        ),
        _beats,
    ),
    Lane(
        "request body",
        changed(list(BODIES.values()), ODD).map(canonical_json) | damaged_json(SOUND),
        _asked,
        _check_body,
        (Refusal, ValueError),
        longest=1000,
    ),
    Lane(
        "request headers",
        headers(),
        _checked,
        _check_headers,
        (Unauthorised,),
        _refused_headers,
        longest=500,
    ),
    Lane("requests", requests(), _answered, memory=None, around=serving),
    *documents.LANES,
    *files.LANES,
]
LANES = {lane.name: lane for lane in _LANES}
