"""A coordinator of little patience and room, and callers that are slow on purpose."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from runspec.core.spec.schema import Backlog
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, tiny_spec
from verify.coordinator import intake
from verify.coordinator.edge import bodies, limits
from verify.request_auth import ENVELOPE, sign_request

WAITING = 2
"""Submissions that may wait for a verdict."""


@contextmanager
def impatient_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The coordinator at work."""
    monkeypatch.setattr(limits, "IDLE_S", 1.0)
    monkeypatch.setattr(limits, "HEAD_S", 1.0)
    monkeypatch.setattr(limits, "LINGER_S", 0.2)
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 24)
    monkeypatch.setattr(bodies, "BODY_S", 1.5)
    monkeypatch.setattr(intake, "UPLOAD_TIMEOUT_S", 1.5)
    spec = tiny_spec()
    backlog = Backlog.model_validate({"submissions": WAITING})
    verify = spec.verify.model_copy(update={"backlog": backlog})
    site = Site(folder, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin(), site.serving():
        yield site


def head(site: Site, key: SigningKey, path: str, body: bytes, envelope: bytes = b"") -> bytes:
    """The head of a signed request that announces this body."""
    headers = sign_request(key, run=RUN, method="POST", path=path, body=body)
    headers |= {"Host": "coordinator", "Content-Length": str(len(body))}
    headers |= {ENVELOPE: base64.b64encode(envelope).decode()} if envelope else {}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def connected(site: Site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def dripped(site: Site, at_once: bytes, drops: bytes, every_s: float = 0.02) -> bytes:
    """Sends some bytes at once and others one by one, until the server ends the connection; what
    it answered. Fails where it never does."""
    answer, ends = b"", time.monotonic() + DEADLINE_S
    with connected(site) as stream:
        stream.sendall(at_once)
        stream.settimeout(every_s)
        for drop in drops:
            assert time.monotonic() < ends, "the server waits on"
            try:
                stream.sendall(bytes([drop]))
                piece = stream.recv(4096)
                if not piece:
                    return answer
                answer += piece
            except TimeoutError:
                continue
            except ConnectionError:
                return answer
    pytest.fail("the server took all of it")


def stored(site: Site) -> list[Path]:
    return [p for p in site.run_dir.glob("rollouts/**/*") if p.is_file()]


def received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1)
    except ConnectionError:
        return b""
