"""A server with a certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import pytest

from broadcast.credentials import server_context
from broadcast.origin import run_origin
from broadcast.server import DEFAULT_OPTIONS, Limits, ServerOptions
from broadcast.transport import Access
from runspec.core.errors import UserError
from tests.waiting import eventually

from .certificates import Authority
from .conftest import LOG, Run, Served, contents, large_chunk, weights


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def options(authority: Authority, limits: Limits = DEFAULT_OPTIONS.limits) -> ServerOptions:
    cert, key = authority.issue()
    return ServerOptions(tls_cert=cert, tls_key=key, limits=limits)


def https(served: Served) -> str:
    return f"https://127.0.0.1:{served.port}"


def presented(served: Served, authority: Authority) -> bytes:
    """The certificate that a server shows, checked."""
    context = ssl.create_default_context(cafile=authority.ca_file)
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        certificate = secure.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate


def test_publisher_to_client_over_tls_with_tokens(
    run: Run, authority: Authority, tmp_path: Path
) -> None:
    # given an origin and a relay that both want a token, with certificates of our own authority
    run.publish(0, weights())
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"relay {'r' * 32}\nsampler {'s' * 32}\n")
    cert, key = authority.issue()
    secured = ServerOptions(tokens_file=tokens, tls_cert=cert, tls_key=key)
    origin = run.origin(options=secured)
    relay = run.relay(https(origin), options=secured, access=Access("r" * 32, authority.ca_file))
    # when a client with a token of its own fetches from the relay
    client = run.client(https(relay), access=Access("s" * 32, authority.ca_file))
    path = client.fetch(0, manifest_digest=None, deadline_s=30)
    # then it has the version
    assert contents(path) == weights()


def test_only_tls_from_1_2_on_is_spoken(run: Run, authority: Authority) -> None:
    run.publish(0, weights())
    served = run.origin(options=options(authority))
    old = ssl.create_default_context(cafile=authority.ca_file)
    with pytest.warns(DeprecationWarning):
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (old, None):
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain:
            if context is not None:
                with pytest.raises(ssl.SSLError):
                    context.wrap_socket(plain, server_hostname="127.0.0.1")
            else:
                plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" not in plain.recv(1000)
    assert presented(served, authority)


def test_a_handshake_that_does_not_come_is_not_waited_for(run: Run, authority: Authority) -> None:
    run.publish(0, weights())
    served = run.origin(options=options(authority, Limits(head_s=0.2)))
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as silent:
        assert silent.recv(1) == b""
    assert presented(served, authority)


def test_a_server_does_not_wait_for_a_peers_good_bye(run: Run, authority: Authority) -> None:
    # given peers over TLS: idle ones, one that was answered and does not close, and one that does
    # not read what it asked for
    run.publish(0, weights())
    large = large_chunk(run)
    served = run.origin(options=options(authority))
    context = ssl.create_default_context(cafile=authority.ca_file)
    with ExitStack() as stack:
        peers = []
        for _ in range(5):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            peers.append(
                stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
            )
        request = f"GET /demo/chunks/{large.name} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        peers[0].sendall(request)
        assert peers[0].recv(12) == b"HTTP/1.1 200"
        peers[1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while peers[1].recv(1000):
            pass
        # when the server stops, then nothing of it is left (a warning would be an error here)
        served.stop()


def test_a_new_certificate_is_taken_up_without_a_restart(run: Run, authority: Authority) -> None:
    run.publish(0, weights())
    served = run.origin(options=options(authority))
    first = presented(served, authority)

    authority.issue()

    assert presented(served, authority) != first


def test_a_certificate_that_cannot_be_used_leaves_the_old_one_in_use(
    run: Run, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(0, weights())
    configured = options(authority)
    assert configured.tls_cert is not None
    served = run.origin(options=configured)
    first = presented(served, authority)

    configured.tls_cert.write_text("nothing of the kind")

    assert presented(served, authority) == first
    eventually(
        lambda: any("stays in use" in record.getMessage() for record in caplog.records),
        "the log says so",
    )


def test_files_that_are_no_pair_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("one")
    _, other = authority.issue("two")
    secret_cert, secret_key = authority.issue("secret", passphrase=b"unknown")
    empty = tmp_path / "empty"
    empty.touch()

    with pytest.raises(UserError, match=r"two\.key: is not the key of .*one\.pem"):
        server_context(cert, other, LOG)
    with pytest.raises(UserError, match=r"gone: cannot read: No such file"):
        server_context(cert, tmp_path / "gone", LOG)
    with pytest.raises(UserError, match=r"gone: cannot read: No such file"):
        server_context(tmp_path / "gone", key, LOG)
    with pytest.raises(UserError, match=r"empty, .*one\.key: no certificate chain and key"):
        server_context(empty, key, LOG)
    with pytest.raises(UserError, match="without a passphrase"):  # and nobody is asked for it
        server_context(secret_cert, secret_key, LOG)


def test_a_certificate_without_its_key_is_refused(run: Run, authority: Authority) -> None:
    cert, _ = authority.issue()
    half = ServerOptions(tls_cert=cert)

    with pytest.raises(UserError, match="--tls-cert and --tls-key belong together"):
        asyncio.run(run_origin(run.store, log=LOG, options=half))
