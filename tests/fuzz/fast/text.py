"""Lanes: what comes as a line, a header, a query or a body of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_network
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from broadcast.access import Tokens
from broadcast.answers import byte_range
from broadcast.app import MAX_WAIT_S, _poll_parameters
from broadcast.transport import base_url
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.join_link import parse_join_link
from tests.fuzz.bounds import bounded
from tests.fuzz.fast.mutate import EDGES, Changer, damaged, damaged_json
from tests.fuzz.test_proofs import (
    PROOFS,
    WORDS,
    check_activations,
    check_lines,
    check_proof,
    check_proofs_from_outside,
    check_proofs_together,
    with_activations,
)
from tests.fuzz.test_requests import (
    BODIES,
    HEADERS,
    INFO,
    NOW,
    ODD,
    OURS,
    RUN,
    check_headers,
    check_heartbeats,
    check_json,
    signed_headers,
)
from verify.coordinator import server
from verify.coordinator.activity import scalars
from verify.coordinator.addresses import UNKNOWN, place_of
from verify.coordinator.intake import Refusal
from verify.request_auth import BODY, NONCE, SIGNATURE, TIME, _message
from verify.toploc import TOP_K

Case = Callable[[Random], bool]
MEMORY = 4 << 20
_NUMBERS = [str(edge).encode() for edge in EDGES if abs(edge) < 10**40]
_TEXT_PIECES = [
    *(
        *_NUMBERS,
        b"",
        b" ",
        b"\t",
        b"\n",
        b"\r\n",
        b"\0",
        b",",
        b";",
        b":",
        b"-",
        b"=",
        b"/",
        b"//",
    ),
    *(b"%", b"%00", b"%zz", b"&", b"#", b"?", b"[", b"]", b"[::1]", b"::", b"@", b".", b"..", b"*"),
    *(
        b"\xc3\xa9",
        b"\xff",
        b"\xd9\xa1",
        b"1e9",
        b"inf",
        b"nan",
        b"0" * 40,
        b"x" * 300,
        b"9" * 4400,
    ),
]


def _texts(sound: Sequence[str], *, latin: bool = False) -> Callable[[Random], str]:
    """Draws texts as they come over the wire: sound ones with damage."""
    originals = [text.encode() for text in sound]

    def draw(rng: Random) -> str:
        data = damaged(rng, rng.choice(originals), originals, _TEXT_PIECES)
        return data.decode("latin-1") if latin else data.decode("utf-8", "surrogateescape")

    return draw


def _proofs() -> Callable[[Random], bytes]:
    """Draws TOPLOC's bytes: honest ones whose words are changed, cut or longer, and any."""
    words = [word.to_bytes(2, "big") for word in WORDS]

    def draw(rng: Random) -> bytes:
        data, what = rng.choice(PROOFS), rng.random()
        if what < 0.6:
            made = bytearray(data)
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                at = 2 * rng.choice((0, int(rng.random() * 129)))
                made[at : at + 2] = rng.choice(words)
            return bytes(made)
        if what < 0.8:
            return damaged(rng, data, PROOFS, words)
        return rng.randbytes(rng.choice((0, 1, 257, 258, 258, 258, 259, 600)))

    return draw


_KS = (1, 2, 16, 127, TOP_K, TOP_K)


def proof() -> Case:
    """One proof."""
    draw = _proofs()
    return lambda rng: check_proof(draw(rng), rng.choice(_KS))


def proofs_together() -> Case:
    """Up to four of a submission."""
    draw = _proofs()

    def case(rng: Random) -> bool:
        sent = [draw(rng) for _ in range(rng.choice((0, 1, 2, 3, 4)))]
        return check_proofs_together(sent, [rng.choice(_KS) for _ in sent])

    return case


def proofs_of_a_rollout() -> Case:
    """Proofs of all chunks, and the statistics of those that are well formed."""
    return check_proofs_from_outside


def proof_lines() -> Case:
    """A file of them, a line of base64 a chunk, for `python -m verify check`."""
    return _in_folder(check_lines)


def activations() -> Case:
    """An .npy file of them."""
    return _in_folder(check_activations)


def _in_folder(check: Callable[[Path, Random], bool]) -> Case:
    folder = TemporaryDirectory()
    with_activations(Path(folder.name))
    return lambda rng: check(Path(folder.name), rng)


def chunk_range() -> Case:
    """The header Range of whoever fetches chunks."""
    draw = _texts(["bytes=0-", "bytes=5-9", "bytes=-5", "bytes=0-0,5-6", "bytes=7-3"], latin=True)

    def case(rng: Random) -> bool:
        size = rng.choice((0, 1, 10, 2**31, 2**44))
        header = draw(rng)[:4096]  # `broadcast.door` takes no longer one
        with bounded(MEMORY):
            part = byte_range(header, size)
        assert part is None or (part.step == 1 and part.start >= 0 and part.stop <= max(size, 0))
        return part is not None

    return case


def forwarded() -> Case:
    """X-Forwarded-For, which anybody may write, behind a proxy and not."""
    proxies = tuple(map(ip_network, ("10.0.0.0/24", "fd00::/8")))
    addresses = _texts(["1.2.3.4", "10.0.0.7", "[fd00::1]:80", "::ffff:1.2.3.4", "fe80::1%eth0"])
    lines = _texts(["1.2.3.4, 10.0.0.7", "unknown", "::1,fd00::2,fd00::3", "1.2.3.4:99"])

    def case(rng: Random) -> bool:
        remote = rng.choice((None, "10.0.0.7", "fd00::1", "9.9.9.9", addresses(rng)))
        headers = [lines(rng) for _ in "xx"[: rng.choice((0, 1, 1, 2))]]
        with bounded(MEMORY):
            place = place_of(remote, headers, proxies)
        assert place == UNKNOWN or ip_network(place).prefixlen in (32, 64)
        return place != UNKNOWN

    return case


def poll_parameters() -> Case:
    """?after=VERSION&wait=SECONDS of a long poll."""
    draw = _texts(["after=3&wait=20", "wait=1e3", "after=-1", "wait=nan", "after=1_0&wait=+5"])

    def case(rng: Random) -> bool:
        request: Any = SimpleNamespace(query=dict(parse_qsl(draw(rng), keep_blank_values=True)))
        with bounded(MEMORY):
            try:
                after, wait_s = _poll_parameters(request)
            except web.HTTPBadRequest:
                return False
        assert (after is None or type(after) is int) and 0 <= wait_s <= MAX_WAIT_S
        return True

    return case


def bearer() -> Case:
    """The header Authorization."""
    token = "t" * 40
    tokens = Tokens({token: "ann"})
    draw = _texts([f"Bearer {token}", f"bearer {token} ", f"Basic {token}", "Bearer"])

    def case(rng: Random) -> bool:
        header = draw(rng)
        with bounded(MEMORY):
            name = tokens.name_of(header)
        assert (name == "ann") == (header[:7].lower() == "bearer " and header[7:].strip() == token)
        return name is not None

    return case


def join_link() -> Case:
    """What a volunteer is sent, and the addresses of servers in it."""
    root = "ab" * 32
    draw = _texts(
        [
            f"http://host.example:8000/#run=demo&root={root}",
            f"https://[::1]:8000/pre/#run=de%20mo&root={root}&invite=abc.def",
            "http://127.0.0.1:8000",
        ]
    )

    def case(rng: Random) -> bool:
        text = draw(rng)
        with bounded(MEMORY):
            taken = False
            try:
                assert base_url(text) == text.rstrip("/")
            except UserError as error:
                assert len(str(error)) < 20_000
            try:
                link = parse_join_link(text)
                taken = True
            except UserError as error:
                assert len(str(error)) < 2000
        if taken:
            assert link.root is None or is_digest(link.root)
            if link.run is not None and link.root is not None:
                again = parse_join_link(str(link))
                assert (again.run, again.root) == (link.run or None, link.root)
        return taken

    return case


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


def json_object() -> Case:
    """Objects of every kind, and objects with damage."""
    draw = Changer([{"a": [INFO, [INFO, 1.5, "é"]], "b": {"c": {"d": [[], {}]}}}, *BODIES.values()])
    sound = [text.encode() for text in draw.texts]

    def case(rng: Random) -> bool:
        if rng.random() < 0.7:
            return check_json(damaged_json(rng, rng.choice(sound), sound)) is not None
        value = draw(rng)
        found = check_json(canonical_json(value), max_bytes=1 << 18)
        assert found is None or found == value
        return found is not None

    return case


def _signed(number: int) -> dict[str, str]:
    """As a worker signs a request, but for the nonce, which is the same each time."""
    headers = {**signed_headers(), NONCE: f"{number:032x}"}
    said = (headers[name] for name in (BODY, TIME, NONCE))
    return {**headers, SIGNATURE: OURS.sign(_message(RUN, "POST", "/v1/leases", *said))}


def request_headers() -> Case:
    """Signed requests, with real signatures."""
    true = [_signed(number) for number in range(64)]
    draw = _texts([*true[0].values(), *true[1].values()])
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
