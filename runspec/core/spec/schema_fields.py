"""Fields of the schema by path: keys, blocks, named lists, units and change classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from runspec.core.spec.fields import Change, ChangeClass, Site, Unit
from runspec.core.spec.schema import Block, RunSpec


@cache
def keys_of(block: type[Block]) -> dict[str, Any]:
    """Return the annotations of a block's fields by key, as YAML writes it."""
    return {field.alias or name: field.annotation for name, field in block.model_fields.items()}


def block_in(annotation: Any) -> type[Block] | None:
    """Return the block of the annotation `Block` or `Block | None`; None for any other."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate if get_origin(annotation) is not list else None
    return None


def named_item(annotation: Any) -> type[Block] | None:
    """Return the block of a list of named blocks, which layers merge by name; else None."""
    if get_origin(annotation) is not list:
        return None
    block = block_in(get_args(annotation)[0])
    return block if block is not None and "name" in keys_of(block) else None


def is_nullable(annotation: Any) -> bool:
    """Return whether an annotation allows null."""
    return type(None) in get_args(annotation)


def close_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to `word`; None if none is similar.

    Args:
        word: the word as it was written.
        known: the words to choose from.
        cutoff: least similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    matches = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def suggest_key(key: str, block: type[Block]) -> str:
    """Return a hint for an unknown key: a similar key, its path elsewhere, or all known keys."""
    if match := close_match(key, keys_of(block)):
        return f"did you mean {match}?"
    if homes := [path for path in schema_fields() if path.rpartition(".")[2] == key]:
        return f"did you mean {homes[0]}?"
    return f"known here: {', '.join(keys_of(block))}"


@dataclass(frozen=True)
class SchemaField:
    """One key of the spec."""

    path: str
    """`<name>` stands for the names in named lists."""
    block: type[Block]
    """Class that it is a field of."""
    attribute: str
    """Name of the Python attribute; `path` may end in an alias."""
    annotation: Any
    unit: str
    """Unit of a number; empty if the schema names none."""
    change: ChangeClass
    """Effect of a change on a run; for a block, of adding or removing it."""
    site: bool
    """Whether a placement file may set it."""

    @property
    def key(self) -> str:
        """Last step of its path."""
        return self.path.rpartition(".")[2]

    @property
    def required(self) -> bool:
        return self.block.model_fields[self.attribute].is_required()

    @property
    def default(self) -> Any:
        """Default; None if it has none."""
        default = self.block.model_fields[self.attribute].default
        return None if default is PydanticUndefined else default


@cache
def schema_fields() -> dict[str, SchemaField]:
    """Return every field by its path, in the order of the schema."""
    return {field.path: field for field in _fields(RunSpec, "", site=False)}


def fields_in(path: str) -> list[SchemaField]:
    """Return the fields of a block by its path: `x.<name>` for an item, empty for the spec."""
    return [each for below, each in schema_fields().items() if below.rpartition(".")[0] == path]


def field_at(path: str) -> SchemaField | None:
    """Return the field of a path as people write it: `samplers.volunteers.dtype`.

    A path into a free map (`data.sources.gym.params.min`) is the map's field; a path that names an
    item of a named list is the list's.
    """
    known, steps = schema_fields(), path.split(".")
    for end in range(len(steps), 0, -1):
        if found := _match(known, steps[:end]):
            return found if end == len(steps) or _holds_more(found) else None
    return None


def _match(known: dict[str, SchemaField], steps: Sequence[str]) -> SchemaField | None:
    at, shown = None, ""
    for step in steps:
        if at is not None and named_item(at.annotation) and not shown.endswith("<name>"):
            shown += ".<name>"
            continue
        shown = f"{shown}.{step}" if shown else step
        at = known.get(shown)
        if at is None:
            return None
    return at


def _holds_more(field: SchemaField) -> bool:
    """Return whether the field is a free map, whose keys are not fields."""
    return get_origin(field.annotation) is dict


def _fields(block: type[Block], prefix: str, *, site: bool) -> Iterator[SchemaField]:
    for attribute, info in block.model_fields.items():
        path = f"{prefix}{info.alias or attribute}"
        marks = [*_marks(info.annotation), *info.metadata]
        inner = block_in(info.annotation) or named_item(info.annotation)
        own = (inner or block).CHANGE
        change = next((m.kind for m in reversed(marks) if isinstance(m, Change)), own)
        own_site = site or any(isinstance(m, Site) for m in marks)
        unit = next((m.name for m in reversed(marks) if isinstance(m, Unit)), "")
        yield SchemaField(path, block, attribute, info.annotation, unit, change, own_site)
        if inner is not None:
            below = f"{path}." if block_in(info.annotation) else f"{path}.<name>."
            yield from _fields(inner, below, site=own_site)


def _marks(annotation: Any) -> list[Any]:
    """Return the metadata inside an annotation; for `Tokens | None`, that of Tokens."""
    found: list[Any] = list(getattr(annotation, "__metadata__", ()))
    for part in get_args(annotation):
        if hasattr(part, "__metadata__") or get_args(part):
            found = [*_marks(part), *found]
    return found
