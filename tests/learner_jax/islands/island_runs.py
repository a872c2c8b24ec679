"""A run whose learner is islands, all of it real: coordinator, publisher, origin and the servers
of shares in threads, the islands as processes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bridge.publisher import Publisher, publish_versions
from broadcast.relay import run_origin
from broadcast.server import ServerOptions
from learner_jax.checkpoint import check_state, load_beside, state_steps
from learner_jax.warm_start import draw_initial_model
from runspec.core.process import Endpoints
from runspec.core.roles import sign_roles
from runspec.core.run_files import state_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved, load_resolved
from runspec.core.schema.role_names import island_names
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import Served
from tests.learner_jax.test_document_runs import document_spec
from tests.role_folder import write_folder
from tests.waiting import eventually
from verify.coordinator.run import serve

LOG = logging.getLogger("test")
DEADLINE_S = 1200.0


def spec_of(
    folder: Path,
    names: str = "ab",
    *,
    steps: int,
    updates: int,
    every: int,
    publish_every: int = 1,
    **islands: object,
) -> RunSpec:
    """A run over documents with an island of one device for each letter of `names`.

    Without an option of islands it has one learner, which does the work of all.

    Args:
        folder: has words.txt and tokenizer/ (`tests.learner_jax.test_document_runs.files`).
        names: of the islands; each has two rows of 64 positions an update.
        steps, updates: of the run, and of a step.
        every, publish_every: steps between full states, and between versions.
        islands: further fields of `learner.islands`.
    """
    spec = document_spec(
        folder,
        tokens_per_update=128 * len(names),
        updates_per_step=updates,
        publish_every=publish_every,
    )
    fields = spec.model_dump(mode="json")
    fields["steps"] = steps
    fields["checkpoints"] |= {"every": every}
    fields["learner"] |= {
        "hardware": {"kind": "cpu", "count": 1},
        "mesh": {},
        "packing": {"tokens": 64, "rows": 2},
        "islands": {"members": [{"name": name} for name in names], **islands} if islands else None,
    }
    return RunSpec.model_validate(fields)


class Service:
    """A server in a thread; started again, it has the same port.

    Args:
        make: serves at a port, 0 for a free one, and calls its second argument with it.
    """

    def __init__(self, make: Callable[[int, Callable[[int], None]], Any]) -> None:
        self._make, self._port = make, 0
        self.start()

    def start(self) -> None:
        self._served = Served(lambda started: self._make(self._port, started))
        self._port, self.url = self._served.port, self._served.url

    def stop(self) -> None:
        self._served.stop()


class IslandRun:
    """One run; within its block its servers answer.

    Args:
        folder: gets the run directory, and the folders of the other islands below it.
        spec: of the run; without `learner.islands` its learner is called `learner`.
        tokenizer: folder of the run's tokenizer.
        through: gives a link to the server of a URL. The islands reach the coordinator and each
            other's shares by such links.
    """

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        tokenizer: Path,
        through: Callable[[str], str] = lambda url: url,
    ) -> None:
        self._through = through
        self.path, self.spec = folder, spec
        self.names = island_names(spec) or ["learner"]
        self._stack = ExitStack()
        if (folder / "initial").exists():  # the same run once more
            self.root = SigningKey.load(folder / "keys" / "root.key")
            return
        self.root = SigningKey.generate()
        shutil.copytree(tokenizer, folder / "initial")
        self._make_keys()
        for name in self.names:
            self.folder(name).mkdir(parents=True, exist_ok=True)
            (self.folder(name) / "spec.json").write_bytes(dump_resolved(spec))
        draw_initial_model(folder, LOG)

    def folder(self, island: str) -> Path:
        first = island == self.names[0]
        return self.path if first else self.path / "work" / f"island-{island}"

    def __enter__(self) -> IslandRun:
        stack, store, through = self._stack, self.path / "store", self._through
        origin = self._origin(store / "origin").url
        self.coordinator = self._service(
            lambda port, started: serve(
                self.path,
                host="127.0.0.1",
                port=port,
                weights=origin,
                root_public_key=self.root.public_hex,
                started=started,
            )
        )
        self.links = {}
        for name in self.names:
            coordinator = through(self.coordinator.url)
            shares = {name: through(self._origin(store / f"shares-{name}").url)}
            self.links[name] = Endpoints(coordinator, origin, shares=shares)
        stop = threading.Event()
        versions = Publisher(self.path, load_resolved(self.path), LOG)
        publisher = threading.Thread(target=publish_versions, args=(versions, stop))
        publisher.start()
        stack.callback(publisher.join)
        stack.callback(stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Starts an island; its log goes on in its folder."""
        role, folder = "learner", self.path
        if name != self.names[0]:  # what its machine has for a run directory
            role, folder = f"island-{name}", self.path / "machines" / name
            folder.mkdir(parents=True, exist_ok=True)
            for shared in ("keys", "store", "work"):
                if not (folder / shared).exists():
                    (folder / shared).symlink_to(Path("../..") / shared)  # copies keep them
        write_folder(folder, self.spec, self.links[name])
        words = ["runspec.role", role, str(folder)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], stdout=log, stderr=log, env=env
            )
        self._stack.callback(_end, process)
        return process

    def train(self, names: Sequence[str] | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        """Trains islands, all by default, to the end of the run."""
        started = {name: self.start(name) for name in names or self.names}
        for name, process in started.items():
            assert process.wait(deadline_s) == 0, self.log(name).read_text()[-3000:]

    def log(self, island: str) -> Path:
        return self.folder(island) / "island.log"

    def trained(self, island: str, steps: int) -> None:
        """Waits until an island has trained so many steps."""

        def log() -> str:
            return self.log(island).read_text()[-3000:]

        what = f"{steps} steps of island {island}"
        eventually(lambda: len(self.lines(island)) >= steps, what, context=log)

    def arrays(self, island: str) -> dict[str, np.ndarray]:
        """What lies beside the newest full state of an island."""
        folder = state_folder(self.folder(island), self.spec)
        return load_beside(folder, check_state(folder, state_steps(folder)[-1]))

    def lines(self, island: str) -> list[dict[str, Any]]:
        path = self.folder(island) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _service(self, make: Callable[[int, Callable[[int], None]], Any]) -> Service:
        service = Service(make)
        self._stack.callback(service.stop)
        return service

    def _origin(self, store: Path) -> Service:
        def make(port: int, started: Callable[[int], None]) -> Any:
            options = ServerOptions(listen=("127.0.0.1", port))
            return run_origin(store, log=LOG, started=started, options=options)

        return self._service(make)

    def _make_keys(self) -> None:
        keys, roles = self.path / "keys", {}
        self.root.save(keys / "root.key")
        for role in ("publisher", "coordinator", "validator"):
            key = SigningKey.generate()
            key.save(keys / f"{role}.key")
            roles[role] = [key.public_hex]
        islands = {}
        for name in self.names:
            key = SigningKey.generate()
            key.save(keys / f"island-{name}.key")
            islands[name] = key.public_hex
        data = sign_roles(self.spec.name, roles, self.root, valid_s=3600.0, islands=islands)
        (keys / "roles.json").write_bytes(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
