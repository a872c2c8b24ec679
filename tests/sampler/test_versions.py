"""The prefetch of a large version holds up neither the current one nor its sampling."""

from __future__ import annotations

import functools
import http.server
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broadcast.keygen import make_keys
from broadcast.store import publish
from runspec.common.keys import SigningKey
from sampler.versions import Versions
from tests.waiting import eventually

DEADLINE_S = 20.0


class Server:
    """A plain file server that can be told to hold back a version's manifest."""

    def __init__(self, folder: Path) -> None:
        self.held, self.asked, self.go_on = -1, threading.Event(), threading.Event()
        outer = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if f"/versions/{outer.held}/" in self.path:
                    outer.asked.set()
                    outer.go_on.wait(DEADLINE_S)
                super().do_GET()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        handler = functools.partial(Handler, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "store").mkdir()
    server = Server(tmp_path / "store")
    yield server
    server.stop()


def test_old_versions_go_but_never_while_another_is_fetched(tmp_path: Path, server: Server) -> None:
    root = make_keys(tmp_path / "keys", run="run")
    key = SigningKey.load(tmp_path / "keys" / "publisher.key")
    roles = (tmp_path / "keys" / "roles.json").read_bytes()

    def publish_version(version: int) -> str:
        folder = tmp_path / f"version-{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([version]) * 100)
        return publish(tmp_path / "store", folder, run="run", version=version, key=key, roles=roles)

    cache = tmp_path / "cache"

    def cached() -> set[str]:
        return {path.name for path in cache.iterdir() if path.name.startswith("v")}

    # Given versions 0 and 1, the second fetched ahead
    publish_version(0)
    versions = Versions(
        [server.url],
        run="run",
        root_public_key=root,
        cache_dir=cache,
        fetch_s=DEADLINE_S,
        log=logging.getLogger("test"),
    )
    assert versions.first() == (0, cache / "v0")
    digest = publish_version(1)
    eventually(lambda: cached() == {"v0", "v1"}, "version 1 is prefetched")

    # When the worker switches to 1 while version 2 is on its way
    server.held = 2
    publish_version(2)
    assert server.asked.wait(DEADLINE_S)
    began = time.monotonic()
    assert versions.get(1, digest) == cache / "v1"
    versions.keep(1)

    # Then it does not wait for it, and the old version goes with a later switch
    assert time.monotonic() - began < DEADLINE_S / 4
    assert cached() == {"v0", "v1"}
    server.go_on.set()
    eventually(lambda: "v2" in cached(), "version 2 is fetched")
    eventually(lambda: versions.keep(2) is None and cached() == {"v2"}, "old versions are removed")
    versions.close()
