"""Every field of the schema by its path, with what it says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from runspec.core.spec.fields import Change, ChangeClass, Site, Unit
from runspec.core.spec.schema import Block, RunSpec
from runspec.core.spec.schema_keys import block_in, named_item


@dataclass(frozen=True)
class SchemaField:
    """One key of the spec."""

    path: str
    """`<name>` stands for the names in named lists."""
    block: type[Block]
    """The class that it is a field of."""
    attribute: str
    """Its name there, where `path` may end in an alias."""
    annotation: Any
    unit: str
    """What a number counts; empty where nothing is said."""
    change: ChangeClass
    """What changing it does to a run; of a block, what adding or removing all of it does."""
    site: bool
    """Whether a placement file may set it."""

    @property
    def key(self) -> str:
        """The last step of its path."""
        return self.path.rpartition(".")[2]

    @property
    def required(self) -> bool:
        return self.block.model_fields[self.attribute].is_required()

    @property
    def default(self) -> Any:
        """Its default; None where there is none."""
        default = self.block.model_fields[self.attribute].default
        return None if default is PydanticUndefined else default


@cache
def schema_fields() -> dict[str, SchemaField]:
    """Every field by its path, in the order of the schema."""
    return {field.path: field for field in _fields(RunSpec, "", site=False)}


def fields_in(path: str) -> list[SchemaField]:
    """The fields right inside a block, by its path; `x.<name>` for an item, empty for the spec."""
    return [each for below, each in schema_fields().items() if below.rpartition(".")[0] == path]


def field_at(path: str) -> SchemaField | None:
    """The field of a path as people write it: `samplers.volunteers.dtype`, `reward.length`.

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
    """Whether paths go on below it that are no fields: the keys of a free map."""
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
    """Metadata inside an annotation: of `Tokens | None`, that of Tokens."""
    found: list[Any] = list(getattr(annotation, "__metadata__", ()))
    for part in get_args(annotation):
        if hasattr(part, "__metadata__") or get_args(part):
            found = [*_marks(part), *found]
    return found
