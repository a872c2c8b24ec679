"""How a spec that was valid is changed, as data or as text, to break a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import runspec.lint
from tests.runspec.lint.generated import Spec

MODELS = Path(runspec.lint.__file__).parent / "examples" / "models"
Kind = Literal["laptop", "fleet"]
LAPTOP: tuple[Kind, ...] = ("laptop",)
FLEET: tuple[Kind, ...] = ("fleet",)


@dataclass(frozen=True)
class Mutation:
    """How a rule is broken."""

    change: Callable[[Spec], None] = lambda spec: None
    """To the spec as data."""
    write: Callable[[str], str] = lambda text: text
    """To its text."""
    kinds: tuple[Kind, ...] = ("laptop", "fleet")
    """The generated specs that it can be made to."""
    also: frozenset[str] = frozenset()
    """Other rules that are right to speak of it too, as far as the spec goes."""


def put(**values: Any) -> Callable[[Spec], None]:
    """Sets values by path: `__` is a dot, `pool` the first pool, `length` its reward term."""

    def change(spec: Spec) -> None:
        for path, value in values.items():
            *above, last = path.split("__")
            at: Any = spec
            for step in above:
                at = _step(at, step)
            at[last] = value

    return change


def _step(at: Any, step: str) -> Any:
    if step in ("pool", "relay", "source"):
        key = {"pool": "samplers", "relay": "relays", "source": "sources"}[step]
        return at[key][0]
    if step in ("task", "length"):
        return at["reward"][("task", "length").index(step)]
    return at.setdefault(step, {})


def both(*changes: Callable[[Spec], None]) -> Callable[[Spec], None]:
    """One change after the other."""

    def change(spec: Spec) -> None:
        for each in changes:
            each(spec)

    return change


def lines(*added: str) -> Callable[[str], str]:
    """The text with lines at its end."""
    return lambda text: text + "".join(f"{line}\n" for line in added)


def all_pools(**values: Any) -> Callable[[Spec], None]:
    """The same change to every pool."""

    def change(spec: Spec) -> None:
        for pool in spec["samplers"]:
            put(**values)(pool)

    return change


def local_model(name: str, **values: Any) -> Callable[[Spec], None]:
    """A small model of the rules' own examples, in the place of the generated shape."""

    def change(spec: Spec) -> None:
        spec["model"] = {"hf": str(MODELS / name), "max_context": 128}
        spec.pop("warm_start")
        put(**values)(spec)

    return change
