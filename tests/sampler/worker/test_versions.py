"""The prefetch of a large version holds up neither the current one nor its sampling."""

from __future__ import annotations

import functools
import http.server
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bridge.delta import write_delta
from bridge.records import write_records
from bridge.safetensors_io import write_safetensors
from broadcast.keygen import make_keys
from broadcast.store import publish
from runspec.core.keys import SigningKey
from sampler.worker.versions import Versions
from tests.waiting import eventually

DEADLINE_S = 20.0
ELEMENTS = 1000


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


class Run:
    """A publisher's keys, and a follower of what it publishes in `tmp_path`."""

    def __init__(self, tmp_path: Path, server: Server) -> None:
        self._folder, root = tmp_path, make_keys(tmp_path / "keys", run="run")
        self.versions = Versions(
            [server.url],
            run="run",
            root_public_key=root,
            cache_dir=tmp_path / "cache",
            fetch_s=DEADLINE_S,
            log=logging.getLogger("test"),
        )

    def publish(self, version: int, base: int | None = None) -> str:
        return publish(
            self._folder / "store",
            self._folder / f"version-{version}",
            run="run",
            version=version,
            key=SigningKey.load(self._folder / "keys" / "publisher.key"),
            roles=(self._folder / "keys" / "roles.json").read_bytes(),
            base=base,
            whole=base is None,
        )


@pytest.fixture
def run(tmp_path: Path, server: Server) -> Iterator[Run]:
    run = Run(tmp_path, server)
    yield run
    run.versions.close()


def test_old_versions_go_but_never_while_another_is_fetched(
    tmp_path: Path, server: Server, run: Run
) -> None:
    def publish_version(version: int) -> str:
        folder = tmp_path / f"version-{version}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([version]) * 100)
        return run.publish(version)

    cache = tmp_path / "cache"

    def cached() -> set[str]:
        return {path.name for path in cache.iterdir() if path.name.startswith("v")}

    # Given versions 0 and 1, the second fetched ahead
    publish_version(0)
    versions = run.versions
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


def test_what_the_next_delta_starts_from_is_never_removed(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def publish_version(version: int) -> None:
        """Each has one number more that is not 0."""
        folder, shape = tmp_path / f"version-{version}", (ELEMENTS,)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        values = np.zeros(shape, np.float32)
        values[:version] = 1.0
        records = write_safetensors(
            folder / "model.safetensors", {"w": shape}, np.dtype(np.float32), iter([values])
        )
        write_records(folder, records)
        base = version - 1 if version else None
        if base is not None:
            write_delta(tmp_path / f"version-{base}", folder, folder / "delta")
        run.publish(version, base)

    # Given a worker that samples with version 0 and has 1 already
    publish_version(0)
    versions = run.versions
    versions.first()
    publish_version(1)
    eventually(lambda: "version 1 fetched" in caplog.text, "version 1 is prefetched")

    # When it tidies up, and versions go on coming, as deltas alone
    for number in (2, 3):
        versions.keep(0)
        publish_version(number)
        eventually(lambda n=number: f"version {n} fetched" in caplog.text, f"version {number}")

    # Then each is made of the one before, and has the numbers that were published
    assert "version 3 fetched from held version 2 and deltas 3" in caplog.text
    made, published = (tmp_path / part / "model.safetensors" for part in ("cache/v3", "version-3"))
    assert made.read_bytes() == published.read_bytes()
