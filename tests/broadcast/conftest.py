"""A run with keys and a store, and real servers on 127.0.0.1 port 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from broadcast.client import WeightsClient
from broadcast.keygen import make_keys
from broadcast.origin import run_origin
from broadcast.relay import run_relay
from broadcast.server import DEFAULT_OPTIONS, ServerOptions
from broadcast.store import publish
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from tests.broadcast.fake_relay import FakeRelay
from tests.broadcast.processes import Processes
from tests.broadcast.scripted import Peer, Scripted, Serve

CHUNK_BYTES = 1000
LOG = logging.getLogger("test")


class Served:
    """An origin or relay in a thread of its own, stopped like a cancelled process."""

    def __init__(self, make: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]]) -> None:
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, args=(make,))
        self._thread.start()
        assert self._ready.wait(10), "the server did not start"
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self, make: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]]) -> None:
        async def body() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            await make(self._started)

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(body())

    def _started(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def stop(self) -> None:
        if self._thread.is_alive():
            assert self._task is not None
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()


class Run:
    """A run's keys, its origin store, and whatever serves or fetches it in a test."""

    def __init__(self, folder: Path, stack: ExitStack, name: str = "demo") -> None:
        self.name = name
        self.folder = folder
        self.keys = folder / "keys"
        self.root = make_keys(self.keys, run=name)
        self.key = SigningKey.load(self.keys / "publisher.key")
        self.store = folder / "store"
        self._stack = stack

    @property
    def roles(self) -> bytes:
        return (self.keys / "roles.json").read_bytes()

    def publish(
        self,
        version: int,
        files: dict[str, bytes],
        base: int | None = None,
        *,
        delta: dict[str, bytes] | None = None,
        whole: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> str:
        """Publishes a version.

        Args:
            version: its number.
            files: of its directory; where there is a delta, tensors.json is added and says that
                those called *.safetensors hold the tensors.
            base: what the delta is from.
            delta: the files of the directory's `delta` folder: any bytes, for store and relay.
            whole: False leaves the files of the tensors out.
            chunk_bytes: size of the pieces.
        """
        directory = self.folder / "versions" / f"{version}-{time.monotonic_ns()}"
        directory.mkdir(parents=True)
        if delta is not None:
            named = [name for name in files if name.endswith(".safetensors")]
            said = {"model_digest": None, "tensors": {}, "files": named}
            files = {"tensors.json": json.dumps(said).encode(), **files}
            (directory / "delta").mkdir()
            for name, data in delta.items():
                (directory / "delta" / name).write_bytes(data)
        for name, data in files.items():
            (directory / name).write_bytes(data)
        return publish(
            self.store,
            directory,
            run=self.name,
            version=version,
            key=self.key,
            roles=self.roles,
            chunk_bytes=chunk_bytes,
            base=base,
            whole=whole,
        )

    def origin(self, options: ServerOptions = DEFAULT_OPTIONS) -> Served:
        served = Served(
            lambda started: run_origin(self.store, log=LOG, started=started, options=options)
        )
        self._stack.callback(served.stop)
        return served

    def relay(
        self,
        *upstreams: str,
        name: str = "relay",
        keep_versions: int = 5,
        **more: Any,
    ) -> Served:
        """A relay; `more` are other arguments of `run_relay`."""
        served = Served(
            lambda started: run_relay(
                self.folder / name,
                run=self.name,
                upstreams=upstreams,
                root_public_key=self.root,
                keep_versions=keep_versions,
                log=LOG,
                started=started,
                **more,
            )
        )
        self._stack.callback(served.stop)
        return served

    def static(self, folder: Path | None = None) -> FakeRelay:
        """A plain file server of the run's store, or of another folder."""
        server = FakeRelay(folder or self.store)
        self._stack.callback(server.stop)
        return server

    def client(self, *urls: str, cache: str = "cache", **options: Any) -> WeightsClient:
        """A client; `options` are those of `WeightsClient`."""
        client = WeightsClient(
            urls,
            run=self.name,
            root_public_key=self.root,
            cache_dir=self.folder / cache,
            **options,
        )
        self._stack.callback(client.close)
        return client

    def chunks(self, folder: str = "store") -> list[Path]:
        """Finished ones; what is still coming has another name."""
        found = (self.folder / folder / self.name / "chunks").iterdir()
        return sorted(path for path in found if not path.name.startswith("."))


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Scripted] = []

    def start(script: Callable[[Peer], None]) -> Scripted:
        started.append(Scripted(script))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path / "run", stack)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path / "other", stack, name="other")


def weights(size: int = 5500, seed: int = 0) -> dict[str, bytes]:
    """Files of a small version: six chunks of weights, no two the same, and a config."""
    body = b"".join((seed * 10**6 + i).to_bytes(8, "little") for i in range(size // 8 + 1))
    return {"model.safetensors": body[:size], "config.json": b"{}"}


def large_chunk(run: Run, size: int = 64 * 1024 * 1024) -> Path:
    """Puts a chunk of zeros into a run's store that is larger than any socket's buffers."""
    data = bytes(size)
    path = run.store / run.name / "chunks" / digest_bytes(data)
    path.write_bytes(data)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a fetched version, without its manifest."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "manifest.json"}
