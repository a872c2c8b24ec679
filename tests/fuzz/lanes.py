"""The fuzz lanes: each parser of bytes from outside, or one kind of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random


@dataclass(frozen=True)
class Lane:
    """One parser's cases. Its module is imported only in a process that runs them."""

    name: str
    module: str
    make: str
    arguments: tuple[str, ...] = ()
    cheap: bool = False
    """A keyed hash may stand for signatures (`tests.fuzz.signatures`)."""

    def case(self) -> Callable[[Random], bool]:
        """Return one case: it draws, asserts, and returns whether the input is taken as sound."""
        module = import_module(f"tests.fuzz.{self.module}")
        made: Callable[[Random], bool] = getattr(module, self.make)(*self.arguments)
        return made


def _of(module: str, *names: str, cheap: bool = False) -> list[Lane]:
    return [
        Lane(name, module, name.replace(" ", "_").replace("-", "_"), (), cheap) for name in names
    ]


_DOCUMENTS = (
    *("submission", "lease", "verdict", "latest", "roles"),
    *("invite", "batch", "ranges", "site", "share", "commit"),
)
_EVERY = [
    *_of("text", "chunk range", "forwarded", "poll parameters", "bearer", "join link"),
    *_of("requests", "heartbeat", "request body", "request headers"),
    *_of("served", "requests"),
    *(Lane(name, "documents", "payloads", (name,), cheap=True) for name in _DOCUMENTS),
    *_of("documents", "envelope"),
    *_of("documents", "spec", cheap=True),
    *_of("manifests", "manifest", cheap=True),
    *_of("profiles", "profile", cheap=True),
    *_of("spec_texts", "commands on specs"),
    *_of("proofs", "proof", "proofs of a rollout", "activations", "proof lines"),
    *_of("deltas", "delta"),
    *_of("shares", "share"),
    Lane("submission table", "tables", "tables", ("submission",)),
    Lane("verdict table", "tables", "tables", ("verdict",)),
    *_of("tables", "fingerprints", "grades"),
]
LANES = {lane.name: lane for lane in _EVERY}
