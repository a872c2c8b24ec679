"""Fields of the schema by path, and layers merged by the schema.

Keys, blocks, named lists, units and change classes are those of the schema. When layers merge, maps
merge, lists of named objects merge by name, and null deletes.

The schema says which lists are named. It also says which keys can be null: there null is a value
(`clip.delta: null` is no bound). Values keep the place of the layer that wrote them. Unknown keys
are found in each layer, so a misspelt key is an error even if a later layer, or a null, hides it.
Names that a layer adds to a named list may be misspelt names of a lower layer: `judge_new_names`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from runspec.core.schema import RunSpec, yaml_nodes
from runspec.core.schema.fields import Block, Change, ChangeClass, Site, Unit
from runspec.core.schema.findings import Finding, Place, replacing


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


EMPTY = yaml_nodes.MapNode({}, Place("", 1, 1))
_OBJECTS = {
    "changes": "change",
    "data.sources": "source",
    "reward": "reward term",
    "samplers": "pool",
    "evaluations": "evaluation",
    "monitors": "monitor",
    "broadcast.relays": "relay",
    "learner.islands.members": "island",
    "secrets": "secret",
    "verify.profiles": "profile",
}


def merge_layers(
    layers: list[yaml_nodes.MapNode],
    findings: list[Finding],
    new_names: list[NewName] | None = None,
) -> yaml_nodes.MapNode:
    """Return all layers, the first lowest, as one tree with known keys only.

    Args:
        layers: the layers to merge.
        findings: receives the errors of the layers.
        new_names: receives the names that a layer adds to a named list of lower layers.
    """
    merger = _Merger(findings, [] if new_names is None else new_names)
    merged = EMPTY
    for layer in layers:
        merged = merger.maps(merged, layer, (RunSpec,), "")
    return merged


class _Merger:
    def __init__(self, findings: list[Finding], new_names: list[NewName]) -> None:
        self._findings = findings
        self._new_names = new_names

    def value(
        self, base: yaml_nodes.Node | None, overlay: yaml_nodes.Node, annotation: Any, path: str
    ) -> yaml_nodes.Node | None:
        """Return `overlay` merged over `base`; None if it deletes."""
        if isinstance(overlay, yaml_nodes.ScalarNode) and overlay.value is None:
            return overlay if type(None) in get_args(annotation) else None
        if item := named_item(annotation):
            return self._named_list(base, overlay, item, path)
        if isinstance(overlay, yaml_nodes.MapNode):
            below = base if isinstance(base, yaml_nodes.MapNode) else EMPTY
            return self.maps(below, overlay, blocks_in(annotation), path)
        return overlay

    def maps(
        self,
        base: yaml_nodes.MapNode,
        overlay: yaml_nodes.MapNode,
        blocks: tuple[type[Block], ...],
        path: str,
    ) -> yaml_nodes.MapNode:
        """Merge two maps; `blocks` are alternatives, none for maps whose keys are free."""
        entries, deleted = dict(base.entries), dict(base.deleted)
        known = keys_of(*blocks)
        for key, entry in overlay.entries.items():
            inner = _join(path, key)
            if blocks and key not in known:
                self._unknown(key, entry.key_place, overlay, blocks, inner)
                continue
            below = entries[key].value if key in entries else None
            merged = self.value(below, entry.value, known.get(key), inner)
            if merged is None:
                entries.pop(key, None)
                deleted[key] = entry.value.place
            else:
                entries[key] = yaml_nodes.Entry(entry.key_place, merged)
        return yaml_nodes.MapNode(entries, overlay.place, deleted=deleted)

    def _unknown(
        self,
        key: str,
        place: Place,
        overlay: yaml_nodes.MapNode,
        blocks: tuple[type[Block], ...],
        path: str,
    ) -> None:
        match, fix = close_match(key, keys_of(*blocks)), None
        if match is not None and match not in overlay.entries:
            quote = place.written[:1] if place.written[:1] in ("'", '"') else ""
            fix = replacing(place, f"{quote}{match}{quote}")
        hint = suggest_key(key, *blocks)
        self._findings.append(
            Finding(place, "unknown-key", "unknown key", path=path, suggestion=hint, fix=fix)
        )

    def _named_list(
        self, base: yaml_nodes.Node | None, overlay: yaml_nodes.Node, block: type[Block], path: str
    ) -> yaml_nodes.Node | None:
        if not isinstance(overlay, yaml_nodes.MapNode) and not (
            isinstance(overlay, yaml_nodes.ListNode) and overlay.items
        ):
            return overlay  # the empty list, or a value that validation refuses
        below = base.items if isinstance(base, yaml_nodes.ListNode) else ()
        items: dict[str | Place, yaml_nodes.Node] = {
            yaml_nodes.object_name(old) or old.place: old for old in below
        }
        known = [name for name in items if isinstance(name, str)]
        seen: dict[str, Place] = {}
        for name, place, item in yaml_nodes.named_entries(overlay):
            key, inner = name or place, _join(path, name or "?")
            if name and name in seen:
                message = f"the name {name!r} twice, first in line {seen[name].line}"
                self._report(place, "duplicate-name", path, message)
                continue
            seen[name] = place
            if isinstance(overlay, yaml_nodes.MapNode):
                if isinstance(item, yaml_nodes.ScalarNode) and item.value is None:
                    if items.pop(name, None) is None:
                        match = close_match(
                            name, [yaml_nodes.object_name(each) for each in items.values()]
                        )
                        hint = f"did you mean {match}?" if match else ""
                        self._report(place, "unknown-name", path, f"no {name!r} to delete", hint)
                    continue
                if not isinstance(item, yaml_nodes.MapNode):
                    self._report(item.place, "wrong-type", inner, "a map or null was expected")
                    continue
                if yaml_nodes.object_name(item) not in ("", name):
                    message = f"is called {yaml_nodes.object_name(item)!r} inside"
                    self._report(item.place, "bad-value", inner, message)
                named = yaml_nodes.Entry(place, yaml_nodes.ScalarNode(name, place, plain=False))
                item = yaml_nodes.MapNode({**item.entries, "name": named}, item.place)
            if isinstance(item, yaml_nodes.MapNode):
                old = items.get(key)
                if known and name and old is None:
                    self._new_names.append(NewName(place, path, name, known))
                below_it = old if isinstance(old, yaml_nodes.MapNode) else EMPTY
                items[key] = self.maps(below_it, item, (block,), inner)
            else:
                items[key] = item  # not an object: validation reports it
        return yaml_nodes.ListNode(tuple(items.values()), overlay.place)

    def _report(
        self, place: Place, code: str, path: str, message: str, suggestion: str = ""
    ) -> None:
        self._findings.append(Finding(place, code, message, path=path, suggestion=suggestion))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@dataclass(frozen=True)
class NewName:
    """Object that a layer adds to a named list of lower layers."""

    place: Place
    """Place of the name in the layer."""
    parent: str
    """The list's path, like `samplers`."""
    name: str
    known: Sequence[str]
    """Names in the layers below; at least one."""


def judge_new_names(findings: list[Finding], new_names: Sequence[NewName]) -> list[Finding]:
    """Return the findings of a spec, with one error for each new object that lacks required keys.

    A new object that lacks nothing gives a warning if one typing error separates its name from a
    name of a lower layer.
    """
    for new in new_names:
        path = f"{new.parent}.{new.name}"
        lacking = [f for f in findings if f.code == "missing-key" and f.path.startswith(f"{path}.")]
        if not lacking and not any(_one_slip(new.name, known) for known in new.known):
            continue
        keys = ", ".join(finding.path.removeprefix(f"{path}.") for finding in lacking)
        needs = f", and a new one needs {keys}" if lacking else ""
        match = close_match(new.name, new.known)
        meant = f"did you mean {match}?" if match else f"there are: {', '.join(new.known)}."
        finding = Finding(
            new.place,
            "unknown-name",
            f"no {new.name!r} in the layers below{needs}",
            path=path,
            suggestion=f"{meant} A new name makes a new {_OBJECTS.get(new.parent, 'object')}",
            severity="error" if lacking else "warning",
            blocking=bool(lacking),
        )
        findings = [*(f for f in findings if f not in lacking), finding]
    return findings


def _one_slip(name: str, known: str) -> bool:
    """Return whether one letter was dropped, doubled or added, or letters were swapped."""
    short, long = sorted((name, known), key=len)
    if len(short) == len(long):
        return sorted(short) == sorted(long)
    return any(
        letter.isalpha() and long[:at] + long[at + 1 :] == short for at, letter in enumerate(long)
    )
