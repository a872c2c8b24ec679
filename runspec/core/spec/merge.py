"""Merges layers: maps merge, lists of named objects merge by name, null deletes.

The schema says which lists are named. It also says which keys can be null: there null is a value
(`clip.delta: null` is no bound). Values keep the place of the layer that wrote them. Unknown keys
are found in each layer, so a misspelt key is an error even if a later layer, or a null, hides it.
Names that a layer adds to a named list may be misspelt names of a lower layer: `judge_new_names`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from runspec.core.spec import yaml_nodes
from runspec.core.spec.fields import Block
from runspec.core.spec.findings import Finding, Place, replacing
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.schema_fields import (
    blocks_in,
    close_match,
    keys_of,
    named_item,
    suggest_key,
)

EMPTY = yaml_nodes.MapNode({}, Place("", 1, 1))
_OBJECTS = {
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
