"""Fields of the schema by path: keys, blocks, named lists, units and change classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from runspec.core.spec.fields import Block, Change, ChangeClass, Site, Unit
from runspec.core.spec.schema import RunSpec


@cache
def keys_of(*blocks: type[Block]) -> dict[str, Any]:
    """Return the annotations of the fields of blocks by key, as YAML writes it.

    Of blocks that are alternatives, a field that several have may be of any of their types.
    """
    found: dict[str, Any] = {}
    for block in blocks:
        for name, field in block.model_fields.items():
            key, annotation = field.alias or name, field.annotation
            found[key] = annotation if key not in found else found[key] | annotation
    return found


def blocks_in(annotation: Any) -> tuple[type[Block], ...]:
    """Return the blocks of the annotation `Block` or `Block | None`, and all of a union of blocks;
    empty for any other."""
    if get_origin(annotation) is list:
        return ()
    bare = (getattr(part, "__origin__", part) for part in (annotation, *get_args(annotation)))
    return tuple(part for part in bare if isinstance(part, type) and issubclass(part, Block))


def block_in(annotation: Any) -> type[Block] | None:
    """Return the first of `blocks_in`; None if there is none."""
    return next(iter(blocks_in(annotation)), None)


def named_item(annotation: Any) -> type[Block] | None:
    """Return the block of a list of named blocks, which layers merge by name; else None."""
    if get_origin(annotation) is not list:
        return None
    block = block_in(get_args(annotation)[0])
    return block if block is not None and "name" in keys_of(block) else None


def close_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to `word`; None if none is similar.

    Args:
        word: the word as it was written.
        known: the words to choose from.
        cutoff: least similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    matches = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def suggest_key(key: str, *blocks: type[Block]) -> str:
    """Return a hint for an unknown key: a similar key, its path elsewhere, or all known keys."""
    if match := close_match(key, keys_of(*blocks)):
        return f"did you mean {match}?"
    if homes := [path for path in schema_fields() if path.rpartition(".")[2] == key]:
        return f"did you mean {homes[0]}?"
    return f"known here: {', '.join(keys_of(*blocks))}"


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
    kinds: tuple[str, ...] = ()
    """Of alternative blocks the `kind` of those that have it; empty if all have it."""

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
    return {field.path: field for field in _fields((RunSpec,), "", site=False)}


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
            return found if end == len(steps) or get_origin(found.annotation) is dict else None
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


def _fields(blocks: tuple[type[Block], ...], prefix: str, *, site: bool) -> Iterator[SchemaField]:
    """Yield the fields of a block, or of alternatives; the first that has a field describes it."""
    annotations, owners = keys_of(*blocks), dict[str, list[tuple[type[Block], str]]]()
    for block in blocks:
        for attribute, info in block.model_fields.items():
            owners.setdefault(info.alias or attribute, []).append((block, attribute))
    for key, annotation in annotations.items():
        block, attribute = owners[key][0]
        some = () if len(owners[key]) == len(blocks) else owners[key]
        kinds = tuple(owner.model_fields["kind"].default for owner, _ in some)
        path, info = f"{prefix}{key}", block.model_fields[attribute]
        marks = [*_marks(annotation), *info.metadata]
        named = named_item(annotation)
        inner = blocks_in(annotation) or ((named,) if named else ())
        own = (*inner, block)[0].CHANGE
        change = next((m.kind for m in reversed(marks) if isinstance(m, Change)), own)
        own_site = site or any(isinstance(m, Site) for m in marks)
        unit = next((m.name for m in reversed(marks) if isinstance(m, Unit)), "")
        yield SchemaField(path, block, attribute, annotation, unit, change, own_site, kinds)
        if inner:
            below = f"{path}.<name>." if named else f"{path}."
            yield from _fields(inner, below, site=own_site)


def _marks(annotation: Any) -> list[Any]:
    """Return the metadata inside an annotation; for `Tokens | None`, that of Tokens."""
    found: list[Any] = list(getattr(annotation, "__metadata__", ()))
    for part in get_args(annotation):
        if hasattr(part, "__metadata__") or get_args(part):
            found = [*_marks(part), *found]
    return found
