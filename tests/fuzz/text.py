"""Lanes: what comes as a line, a header, a query or a body of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_network
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from broadcast.answers import byte_range
from broadcast.app import MAX_WAIT_S, _poll_parameters
from broadcast.credentials import Tokens
from broadcast.transport import base_url
from runspec.core.address import parse_join_link
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import EDGES, damaged
from verify.coordinator.edge.authentication import UNKNOWN, client_address

Case = Callable[[Random], bool]
MEMORY = 4 << 20
_NUMBERS = [str(edge).encode() for edge in EDGES if abs(edge) < 10**40]
TEXT_PIECES = [
    *_NUMBERS,
    *(b"", b" ", b"\t", b"\n", b"\r\n", b"\0", b",", b";", b":", b"-", b"=", b"/", b"//"),
    *(b"%", b"%00", b"%zz", b"&", b"#", b"?", b"[", b"]", b"[::1]", b"::", b"@", b".", b"..", b"*"),
    *(b"\xc3\xa9", b"\xff", b"\xd9\xa1", b"1e9", b"inf", b"nan"),
    *(b"0" * 40, b"x" * 300, b"9" * 4400),
]


def texts(sound: Sequence[str], *, latin: bool = False) -> Callable[[Random], str]:
    """Draws texts as they come over the wire: sound ones with damage."""
    originals = [text.encode() for text in sound]

    def draw(rng: Random) -> str:
        data = damaged(rng, rng.choice(originals), originals, TEXT_PIECES)
        return data.decode("latin-1") if latin else data.decode("utf-8", "surrogateescape")

    return draw


def chunk_range() -> Case:
    """The header Range of whoever fetches chunks."""
    draw = texts(["bytes=0-", "bytes=5-9", "bytes=-5", "bytes=0-0,5-6", "bytes=7-3"], latin=True)

    def case(rng: Random) -> bool:
        size = rng.choice((0, 1, 10, 2**31, 2**44))
        header = draw(rng)[:4096]  # `broadcast.server` accepts no longer one
        with bounded(MEMORY):
            part = byte_range(header, size)
        assert part is None or (part.step == 1 and part.start >= 0 and part.stop <= max(size, 0))
        return part is not None

    return case


def forwarded() -> Case:
    """X-Forwarded-For, which anybody may write, behind a proxy and not."""
    proxies = tuple(map(ip_network, ("10.0.0.0/24", "fd00::/8")))
    addresses = texts(["1.2.3.4", "10.0.0.7", "[fd00::1]:80", "::ffff:1.2.3.4", "fe80::1%eth0"])
    lines = texts(["1.2.3.4, 10.0.0.7", "unknown", "::1,fd00::2,fd00::3", "1.2.3.4:99"])

    def case(rng: Random) -> bool:
        remote = rng.choice((None, "10.0.0.7", "fd00::1", "9.9.9.9", addresses(rng)))
        headers = [lines(rng) for _ in "xx"[: rng.choice((0, 1, 1, 2))]]
        with bounded(MEMORY):
            place = client_address(remote, headers, proxies)
        assert place == UNKNOWN or ip_network(place).prefixlen in (32, 64)
        return place != UNKNOWN

    return case


def poll_parameters() -> Case:
    """?after=VERSION&wait=SECONDS of a long poll."""
    draw = texts(["after=3&wait=20", "wait=1e3", "after=-1", "wait=nan", "after=1_0&wait=+5"])

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
    draw = texts([f"Bearer {token}", f"bearer {token} ", f"Basic {token}", "Bearer"])

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
    draw = texts(
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
