"""Files of `kind: Placement`: the site-specific part of a run, as a layer over a shared recipe.

A placement may set the fields that the schema marks as a site's (`SchemaField.site`): hardware,
mesh, relays, folders, secrets, budget, measured figures. It cannot change what is learned or how
workers are checked. It cannot add a pool, because a pool's lengths and types belong to the recipe.
"""

from __future__ import annotations

from dataclasses import replace

from runspec.core.spec.findings import Finding, Place
from runspec.core.spec.schema import VERSION
from runspec.core.spec.schema_fields import (
    SchemaField,
    block_in,
    close_match,
    named_item,
    schema_fields,
)
from runspec.core.spec.yaml_nodes import (
    Entry,
    ListNode,
    MapNode,
    Node,
    object_name,
    text_at,
    value_at,
)

KIND = "Placement"
SCOPE = "placement-scope"
HEADER = ("version", "kind", "name")
"""Keys that describe the placement itself; `name` names the site."""


def is_placement(layer: MapNode) -> bool:
    """Return whether a file declares the kind Placement."""
    return text_at(layer, "kind") == KIND


def site_layers(
    layers: list[MapNode], recipe: MapNode | None, findings: list[Finding]
) -> list[MapNode]:
    """Return the layers of a placement's file, without its header and without forbidden fields.

    Args:
        layers: layers of the file and of those that it extends, its own last.
        recipe: the merged layers below it; None if a placement is checked by itself.
        findings: receives a finding for each forbidden field.
    """
    if not layers or not _header_is_right(layers[-1], findings):
        return []
    scope = _Scope(findings)
    return [scope.map(_without_header(layer), "", "", recipe) for layer in layers]


def _header_is_right(own: MapNode, findings: list[Finding]) -> bool:
    key, message, hint = "", "", ""
    if not is_placement(own):
        key, message = "kind", f"a file of kind {KIND} was expected"
        hint = "a spec goes first on the command line, and what it builds on under `extends`"
    elif text_at(own, "version") != VERSION:
        key, message = "version", f"version {VERSION} was expected"
    if message:
        place = (value_at(own, key) or own).place
        code = SCOPE if key == "kind" else "bad-value"
        findings.append(Finding(place, code, message, path=key, suggestion=hint, blocking=True))
    return not message


def _without_header(layer: MapNode) -> MapNode:
    entries = {key: entry for key, entry in layer.entries.items() if key not in HEADER}
    return replace(layer, entries=entries)


class _Scope:
    """Removes from a layer the fields that a site may not set."""

    def __init__(self, findings: list[Finding]) -> None:
        self._findings = findings

    def map(self, node: MapNode, schema: str, shown: str, below: Node | None) -> MapNode:
        """Return `node` without the forbidden keys.

        Args:
            schema: path in the schema, `<name>` for names, with a final dot.
            shown: the same path as people write it.
            below: node of the recipe at this path.
        """
        entries = {}
        for key, entry in node.entries.items():
            kept = self._entry(key, entry, schema, shown, below)
            if kept is not None:
                entries[key] = kept
        return replace(node, entries=entries)

    def _entry(
        self, key: str, entry: Entry, schema: str, shown: str, below: Node | None
    ) -> Entry | None:
        field, path = schema_fields().get(f"{schema}{key}"), f"{shown}{key}"
        if field is None or field.site or (key == "name" and schema.endswith("<name>.")):
            return entry  # unknown keys are found when layers merge
        value, is_named = entry.value, named_item(field.annotation) is not None
        there = value_at(below, key)
        if block_in(field.annotation) and isinstance(value, MapNode):
            kept: Node = self.map(value, f"{field.path}.", f"{path}.", there)
        elif is_named and isinstance(value, MapNode):
            kept = self._named_map(value, field, path, there)
        elif is_named and isinstance(value, ListNode) and value.items:
            kept = self._named_list(value, field, path, there)
        else:
            self._refuse(entry.key_place, field, path)
            return None
        if isinstance(kept, ListNode) and not kept.items:
            return None  # an empty list would delete the recipe's items
        return replace(entry, value=kept)

    def _named_map(
        self, node: MapNode, field: SchemaField, path: str, there: Node | None
    ) -> MapNode:
        entries = {}
        for name, entry in node.entries.items():
            if not self._is_known(name, entry.key_place, path, there):
                continue
            if isinstance(entry.value, MapNode):
                kept = self._item(entry.value, field, f"{path}.{name}", there, name)
                entries[name] = replace(entry, value=kept)
            else:
                self._refuse(entry.key_place, field, f"{path}.{name}")
        return replace(node, entries=entries)

    def _named_list(
        self, node: ListNode, field: SchemaField, path: str, there: Node | None
    ) -> ListNode:
        items = []
        for item in node.items:
            name = object_name(item)
            if not isinstance(item, MapNode) or not name:
                self._refuse(item.place, field, path)
            elif self._is_known(name, item.place, path, there):
                items.append(self._item(item, field, f"{path}.{name}", there, name))
        return replace(node, items=tuple(items))

    def _item(
        self, item: MapNode, field: SchemaField, path: str, there: Node | None, name: str
    ) -> MapNode:
        items = there.items if isinstance(there, ListNode) else ()
        below = next((one for one in items if object_name(one) == name), None)
        return self.map(item, f"{field.path}.<name>.", f"{path}.", below)

    def _is_known(self, name: str, place: Place, path: str, there: Node | None) -> bool:
        if not isinstance(there, ListNode):
            return True  # checked without its recipe
        names = [object_name(item) for item in there.items]
        if name in names:
            return True
        message = f"the recipe has no {name!r} there, and a placement adds none"
        match = close_match(name, names)
        hint = f"did you mean {match}?" if match else f"there are: {', '.join(names)}"
        self._report(place, message, f"{path}.{name}", hint)
        return False

    def _refuse(self, place: Place, field: SchemaField, path: str) -> None:
        message = "a placement says where and with what; this is the recipe's to say"
        hint = f"say it in the spec; `runspec explain {path}`"
        self._report(place, message, path, hint)

    def _report(self, place: Place, message: str, path: str, suggestion: str) -> None:
        # The field is removed in any case, so a suppression would have no effect.
        finding = Finding(place, SCOPE, message, path=path, suggestion=suggestion, blocking=True)
        self._findings.append(finding)
