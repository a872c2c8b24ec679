"""A run whose learner is islands, all of it real and in threads of this process: coordinator,
publisher, origin, the islands' servers of shares, and the islands themselves."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bridge.publisher import publish_versions
from broadcast.origin import run_origin
from learner_jax.checkpoint import check_state, load_beside, state_steps
from learner_jax.drawn import draw_initial_model
from learner_jax.island_link import IslandLink
from learner_jax.islands.folder import prepare_folder
from learner_jax.runner import train
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from runspec.core.run_files import state_folder
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from tests.broadcast.conftest import Served
from verify.coordinator.run import serve

LOG = logging.getLogger("test")
DEADLINE_S = 120.0


class IslandRun:
    """One run; within its block its servers answer.

    Args:
        folder: gets the run directory, and the folders of the other islands below it.
        spec: with `learner.islands`.
        tokenizer: folder of the run's tokenizer.
    """

    def __init__(self, folder: Path, spec: RunSpec, tokenizer: Path) -> None:
        assert spec.learner.islands is not None
        self.path, self.spec = folder, spec
        self.names = [member.name for member in spec.learner.islands.members]
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
        stack, store = self._stack, self.path / "store"
        origin = self._served(
            lambda started: run_origin(store / "origin", log=LOG, started=started)
        )
        coordinator = self._served(
            lambda started: serve(
                self.path,
                host="127.0.0.1",
                port=0,
                weights=origin,
                root_public_key=self.root.public_hex,
                started=started,
            )
        )
        self.links = {}
        for name in self.names:
            shares = store / f"shares-{name}"
            url = self._served(lambda started, at=shares: run_origin(at, log=LOG, started=started))
            self.links[name] = IslandLink(
                name,
                coordinator,
                self.path / "keys" / f"island-{name}.key",
                url,
                shares,
                () if name == self.names[0] else (origin,),
                self.root.public_hex,
            )
        stop = threading.Event()
        publisher = threading.Thread(target=publish_versions, args=(self.path, LOG, stop))
        publisher.start()
        stack.callback(publisher.join)
        stack.callback(stop.set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, stops: Mapping[str, threading.Event]) -> dict[str, Future[None]]:
        """Starts islands, each with the event that ends it."""
        threads = ThreadPoolExecutor(len(stops), thread_name_prefix="island")
        self._stack.callback(threads.shutdown)
        for stop in stops.values():
            self._stack.callback(stop.set)
        return {name: threads.submit(self._train, name, stop) for name, stop in stops.items()}

    def train(self, names: Sequence[str] | None = None) -> None:
        """Trains islands, all by default, to the end of the run."""
        started = self.start({name: threading.Event() for name in names or self.names})
        for future in started.values():
            future.result(DEADLINE_S)

    def arrays(self, island: str) -> dict[str, np.ndarray]:
        """What lies beside the newest full state of an island."""
        folder = state_folder(self.folder(island), self.spec)
        return load_beside(folder, check_state(folder, state_steps(folder)[-1]))

    def lines(self, island: str) -> list[dict[str, Any]]:
        path = self.folder(island) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _train(self, name: str, stop: threading.Event) -> None:
        link, folder = self.links[name], self.folder(name)
        prepare_folder(folder, link, LOG)
        train(folder, LOG, stop, link=link)

    def _served(self, make: Any) -> str:
        served = Served(make)
        self._stack.callback(served.stop)
        return served.url

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


class After(threading.Event):
    """Set once an island has so many lines of metrics."""

    def __init__(self, run: IslandRun, island: str, steps: int) -> None:
        super().__init__()
        self._run, self._island, self._steps = run, island, steps

    def is_set(self) -> bool:
        return super().is_set() or len(self._run.lines(self._island)) >= self._steps
