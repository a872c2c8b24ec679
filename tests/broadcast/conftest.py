"""A run with keys and a store, real servers on 127.0.0.1 port 0, and questions to them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bridge.delta import write_delta
from bridge.safetensors_io import write_safetensors
from bridge.tensors import model_digest, record, tensor_bytes
from broadcast.client import WeightsClient
from broadcast.layout import make_keys
from broadcast.manifest import Chunk, WeightsManifest, read_manifest
from broadcast.relay import run_origin, run_relay
from broadcast.server import DEFAULT_OPTIONS, ServerOptions
from broadcast.store import publish
from runspec.core.canonical import canonical_json, digest_bytes, is_digest
from runspec.core.errors import UserError
from runspec.core.roles import Latest, sign_roles
from runspec.core.signed import SigningKey
from tests.broadcast.fake_relay import FakeRelay, Request, Scripted, Serve, held_until
from tests.waiting import eventually

CHUNK_BYTES = 1000
LOG = logging.getLogger("test")
PATIENCE_S = 600.0
"""A deadline that no test meets."""


class Served:
    """An origin or relay in a thread of its own, stopped like a cancelled process."""

    def __init__(self, make: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]]) -> None:
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, args=(make,))
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the server did not start"
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self, make: Callable[[Callable[[int], None]], Coroutine[Any, Any, None]]) -> None:
        async def body() -> None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
            await make(self._started)

        with suppress(asyncio.CancelledError):
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

    def sign_roles(self, *publishers: SigningKey, ago_s: float = 0.0, valid_s: float = 9e3) -> None:
        """A new roles.json of the run that names these publishers."""
        named = {"publisher": [k.public_hex for k in publishers], "coordinator": []}
        root = SigningKey.load(self.keys / "root.key")
        roles = sign_roles(
            self.name, named | {"validator": []}, root, valid_s=valid_s, now=time.time() - ago_s
        )
        (self.keys / "roles.json").write_bytes(roles)

    def publish(
        self,
        version: int,
        files: dict[str, bytes],
        base: int | None = None,
        *,
        delta: dict[str, bytes] | None = None,
        whole: bool = True,
    ) -> str:
        """Publishes a version.

        Args:
            version: its number.
            files: of its directory; where there is a delta, tensors.json is added and says that
                those called *.safetensors hold the tensors.
            base: what the delta is from.
            delta: the files of the directory's `delta` folder: any bytes, for store and relay.
            whole: False leaves the files of the tensors out.
        """
        directory = self.folder / "versions" / f"{version}-{time.monotonic_ns()}"
        if delta is not None:
            named = [name for name in files if name.endswith(".safetensors")]
            said = {"model_digest": None, "tensors": {}, "files": named}
            files = {"tensors.json": json.dumps(said).encode(), **files}
            write_files(directory / "delta", delta)
        write_files(directory, files)
        return self.publish_folder(version, directory, base=base, whole=whole)

    def publish_folder(self, version: int, directory: Path, **options: Any) -> str:
        """Publishes a directory; `options` are those of `publish`."""
        said = {"store": self.store, "run": self.name, "key": self.key, "roles": self.roles}
        said |= {"version": version, "directory": directory, "chunk_bytes": CHUNK_BYTES}
        return publish(**said | options)

    def manifest(self, version: int) -> WeightsManifest:
        return read_manifest(self.path("versions", version))

    def path(self, *parts: object) -> Path:
        """Of a file of this run in its store."""
        return self.store.joinpath(self.name, *map(str, parts))

    def weights_chunks(self, version: int = 0) -> tuple[Chunk, ...]:
        return self.manifest(version).objects["model.safetensors"].chunks

    def origin(self, options: ServerOptions = DEFAULT_OPTIONS, **limits: float) -> Served:
        options = waiting(options, **limits)
        served = Served(
            lambda started: run_origin(self.store, log=LOG, started=started, options=options)
        )
        self._stack.callback(served.stop)
        return served

    def relay(self, *upstreams: str, name: str = "relay", **more: Any) -> Served:
        """A relay; `more` are other arguments of `run_relay`."""
        options = {"keep_versions": 5, "root_public_key": self.root, "upstreams": upstreams} | more
        options["options"] = waiting(more.get("options", DEFAULT_OPTIONS))
        served = Served(
            lambda started: run_relay(
                self.folder / name, run=self.name, log=LOG, started=started, **options
            )
        )
        self._stack.callback(served.stop)
        return served

    def server(self, kind: str, **options: Any) -> Served:
        """An origin, or a relay of one."""
        made, is_relay = ServerOptions(**options), kind == "relay"
        return self.relay(self.origin().url, options=made) if is_relay else self.origin(made)

    def static(self, folder: Path | None = None) -> FakeRelay:
        """A plain file server of the run's store, or of another folder."""
        server = FakeRelay(folder or self.store)
        self._stack.callback(server.stop)
        return server

    def client(self, *urls: str, cache: str = "cache", **options: Any) -> WeightsClient:
        """A client; `options` are those of `WeightsClient`."""
        said = {"run": self.name, "root_public_key": self.root, "cache_dir": self.folder / cache}
        client = WeightsClient(urls, **said | options)
        self._stack.callback(client.close)
        return client

    def chunks(self, folder: str = "store") -> list[Path]:
        """Finished ones; what is still coming has another name."""
        found = (self.folder / folder / self.name / "chunks").glob("*")
        return sorted(path for path in found if is_digest(path.name))


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(Scripted(script))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and relays give up no request while the machine is busy."""
    for module in ("fetcher", "relay"):
        monkeypatch.setattr(f"broadcast.{module}.chunk_timeout_s", lambda size: PATIENCE_S)
    names = ["client.DETOUR_S", "fetcher.GRACE_S", "fetcher._LAST_GRACE_S", "relay.STALL_S"]
    names += ["fetcher._SMALL_TIMEOUT_S", "transport.CONNECT_S"]
    for limit in ("runspec.core.http_client.CONNECT_S", *(f"broadcast.{name}" for name in names)):
        monkeypatch.setattr(limit, PATIENCE_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(tmp_path / "run", stack)


def waiting(options: ServerOptions, **limits: float) -> ServerOptions:
    """Options with other limits, and with enough time for a request's head on a busy machine."""
    return replace(options, limits=replace(options.limits, **{"head_s": PATIENCE_S} | limits))


def weights(size: int = 5500, seed: int = 0) -> dict[str, bytes]:
    """Files of a small version: six chunks of weights, no two the same, and a config."""
    body = b"".join((seed * 10**6 + i).to_bytes(8, "little") for i in range(size // 8 + 1))
    return {"model.safetensors": body[:size], "config.json": b"{}"}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def large_chunk(run: Run, size: int = 64 * 1024 * 1024) -> Path:
    """Puts a chunk of zeros into a run's store that is larger than any socket's buffers."""
    data = bytes(size)
    path = run.path("chunks", digest_bytes(data))
    path.write_bytes(data)
    return path


def flip_a_bit(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a fetched version, without its manifest."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "manifest.json"}


def intact(run: Run, file: Path) -> dict[str, int]:
    """Chunks of version 0's weights that a file holds, and their sizes."""
    data, chunks = file.read_bytes() if file.exists() else b"", run.weights_chunks()
    found = {digest_bytes(data[n * CHUNK_BYTES :][: c.size]) for n, c in enumerate(chunks)}
    return {chunk.blake3: chunk.size for chunk in chunks if chunk.blake3 in found}


def fetch(client: WeightsClient, version: int = 0, digest: str | None = None) -> Path:
    return client.fetch(version, manifest_digest=digest, deadline_s=PATIENCE_S)


def fetched(client: WeightsClient, version: int = 0, digest: str | None = None) -> dict[str, bytes]:
    """The files of a version."""
    return contents(fetch(client, version, digest))


def newest(client: WeightsClient, after: int | None = None) -> Latest:
    latest = client.latest(after, PATIENCE_S)
    assert latest is not None
    return latest


def refused(ask: Callable[[float], object], *words: str) -> str:
    """The error of a request that has no answer before its deadline; it names all of these.

    A busy machine may have come to no answer by then: it has more time in the next attempt.
    """
    said = ""
    for deadline_s in (0.2, 2.0, 20.0, 200.0):
        with pytest.raises(UserError) as failure:
            ask(deadline_s)
        said = str(failure.value)
        if all(word in said for word in words):
            break
    assert [word for word in words if word not in said] == [], said
    return said


def not_fetched(
    client: WeightsClient, *words: str, version: int = 0, digest: str | None = None
) -> str:
    """Why a version cannot be fetched (`refused`)."""
    return refused(lambda s: client.fetch(version, manifest_digest=digest, deadline_s=s), *words)


def no_latest(client: WeightsClient, *words: str) -> str:
    """Why no latest.json is believed (`refused`)."""
    return refused(lambda s: client.latest(None, s), *words)


def hold_chunks(server: FakeRelay) -> tuple[threading.Event, threading.Event]:
    """Holds every chunk back: (set when one is asked for, to be set to let them go)."""
    asked, go_on = threading.Event(), threading.Event()

    def answer(request: Request) -> None:
        asked.set()
        held_until(go_on)(request)

    server.answer("/chunks/", answer)
    return asked, go_on


def answer(url: str, token: str | None = None, **more: str) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.get(url, headers=headers | more, timeout=PATIENCE_S)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def metric(url: str, name: str) -> float:
    """The value of one line of a server's metrics; 0 where there is none."""
    below = answer(f"{url}/metrics").text.partition(f"\nrunspec_broadcast_{name} ")[2]
    return float(below.partition("\n")[0] or 0)


class Processes:
    """`python -m broadcast` as background processes of a test; none outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[subprocess.Popen[bytes]]()

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "broadcast", *map(str, arguments)]
        with (self._folder / f"process-{len(self._started)}.log").open("wb") as log:
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self._started[-1]

    def url(self, process: subprocess.Popen[bytes]) -> str:
        """Where a started server listens."""
        log = self._folder / f"process-{self._started.index(process)}.log"
        form = re.compile(r"listening on (http\S+)")
        eventually(
            lambda: form.search(log.read_text()) is not None,
            "the server listens",
            hopeless=lambda: "" if process.poll() is None else "it ended",
            context=log.read_text,
        )
        return form.findall(log.read_text())[0]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


TENSOR_ELEMENTS = 2500
"""Of each of the two tensors: float32, 20 chunks together."""


class ModelVersions:
    """Trains, writes and publishes.

    Args:
        run: to publish in.
        files: the weights files, one tensor in each, or one file with both.
    """

    def __init__(self, run: Run, *, files: tuple[str, ...] = ("model.safetensors",)) -> None:
        self._run = run
        self._files = files
        self._random = np.random.default_rng(0)
        self._tensors = {
            name: self._random.standard_normal(TENSOR_ELEMENTS, np.float32) for name in ("a", "b")
        }

    def directory(self, version: int) -> Path:
        return self._run.folder / "weights" / f"v{version}"

    def files(self, version: int) -> dict[str, bytes]:
        """What a fetched version must consist of, byte for byte."""
        return {
            path.name: path.read_bytes()
            for path in self.directory(version).iterdir()
            if path.is_file() and path.name != "tensors.json"
        }

    def weights_bytes(self, version: int) -> int:
        return sum(len(self.files(version)[name]) for name in self._files)

    def delta_bytes(self, version: int) -> int:
        folder = self.directory(version) / "delta"
        return sum(path.stat().st_size for path in folder.iterdir())

    def publish(
        self,
        version: int,
        *,
        base: int | None = None,
        anchor: bool = False,
        delta_from: int | None = None,
    ) -> str:
        """Writes a version and publishes it, as an anchor too where there is no base.

        Args:
            version: its number.
            base: the version that it has a delta from.
            anchor: whether its files are published beside the delta.
            delta_from: the version that the delta is really from, where that is not `base`.
        """
        directory = self.write(version)
        if base is not None:
            origin = self.directory(base if delta_from is None else delta_from)
            write_delta(origin, directory, directory / "delta")
        return publish(
            self._run.store,
            directory,
            run=self._run.name,
            version=version,
            key=self._run.key,
            roles=self._run.roles,
            chunk_bytes=CHUNK_BYTES,
            base=base,
            whole=anchor or base is None,
        )

    def write(self, version: int) -> Path:
        """Changes 1 % of the elements and writes what there is then."""
        for tensor in self._tensors.values():
            changed = self._random.choice(TENSOR_ELEMENTS, TENSOR_ELEMENTS // 100, replace=False)
            tensor[changed] += np.float32(0.5)
        directory = self.directory(version)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"model_type": "qwen2"}')
        (directory / "probe.json").write_text(f'{{"version": {version}}}')
        shares = [list(self._tensors)] if len(self._files) == 1 else [["a"], ["b"]]
        for name, tensors in zip(self._files, shares, strict=True):
            shapes = dict.fromkeys(tensors, (TENSOR_ELEMENTS,))
            arrays = [self._tensors[tensor] for tensor in tensors]
            write_safetensors(directory / name, shapes, np.dtype(np.float32), arrays)
        if len(self._files) > 1:
            weight_map = dict(zip(self._tensors, self._files, strict=True))
            index = directory / "model.safetensors.index.json"
            index.write_bytes(canonical_json({"metadata": {}, "weight_map": weight_map}))
        records = {
            name: record(array.dtype, array.shape, digest_bytes(tensor_bytes(array)))
            for name, array in self._tensors.items()
        }
        said = {
            "model_digest": model_digest(records),
            "tensors": records,
            "files": sorted(self._files),
        }
        (directory / "tensors.json").write_bytes(canonical_json(said))
        return directory
