"""The coordinator's client against servers that do not play by the rules."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from verify.client import CoordinatorClient

DRIP_EVERY_S = 0.05


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server that answers a byte at a time and never ends; each read alone is quick."""
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "60000")
            self.end_headers()
            with suppress(OSError):  # the client has hung up
                while not over.wait(DRIP_EVERY_S):
                    self.wfile.write(b" ")

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()
        thread.join()


def test_an_answer_that_drips_ends_at_the_deadline(dripping: str) -> None:
    root, key = SigningKey.generate(), SigningKey.generate()
    client = CoordinatorClient(
        dripping, key, run="demo", root_public_key=root.public_hex, deadline_s=0.3
    )
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"no whole answer within 0\.3 s") as failure:
        client.roles()
    assert failure.value.place == f"coordinator {dripping}"
    assert time.monotonic() - begun < 5.0  # 60,000 drops would take most of an hour
