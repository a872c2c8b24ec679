"""The lanes of `make fuzz`: each parser of bytes from outside, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random


@dataclass(frozen=True)
class Lane:
    """One parser's cases; imported only in the process that runs them."""

    name: str
    module: str
    make: str
    cheap: bool = False
    """Signatures are a keyed hash (`signatures`)."""
    may_die: bool = False
    """A case may end the process: in use, the parser has one of its own (`verify.decoder`)."""

    def case(self) -> Callable[[Random], bool]:
        """What one case is: draws, asserts, and says whether the input was taken for sound."""
        made: Callable[[Random], bool] = getattr(import_module(self.module), self.make)()
        return made


def _of(module: str, *names: str, cheap: bool = False, may_die: bool = False) -> list[Lane]:
    path = f"tests.fuzz.fast.{module}"
    return [
        Lane(name, path, name.replace(" ", "_").replace("-", "_"), cheap, may_die) for name in names
    ]


LANES = [
    *_of(
        "text",
        "proof",
        "proofs together",
        "chunk range",
        "forwarded",
        "poll parameters",
        "bearer",
        "join link",
    ),
    *_of("text", "heartbeat", "request body", "json object"),
    *_of("documents", "submission", "lease", "verdict", "latest", "roles", "invite", cheap=True),
    *_of("documents", "batch", "site", "manifest", "profile", cheap=True),
    *_of("text", "request headers"),
    *_of("documents", "envelope"),
    *_of("documents", "spec", cheap=True),
    *_of("text", "proofs of a rollout", "activations", "proof lines"),
    *_of("deltas", "delta"),
    *_of("parquet", "parquet footer", "decoder answer", "verdict file", "fingerprints"),
    *_of("parquet", "grades", "made-up tables"),
    *_of("parquet", "parquet file", "parquet pages", may_die=True),
]
