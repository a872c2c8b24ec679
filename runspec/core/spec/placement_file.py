"""Files of `kind: Placement`: the site-specific part of a run, as a layer over a shared recipe.

A placement may set the fields that the schema marks as a site's (`SchemaField.site`): hardware,
mesh, relays, folders, secrets, budget, measured figures. It cannot change what is learned or how
workers are checked. It cannot add a pool, because a pool's lengths and types belong to the recipe.
"""

from __future__ import annotations

from dataclasses import replace

from runspec.core.spec.findings import Finding, Place
from runspec.core.spec.schema import VERSION
from runspec.core.spec.schema_fields import block_in, close_match, named_item, schema_fields
from runspec.core.spec.yaml_nodes import (
    ListNode,
    MapNode,
    Node,
    named_entries,
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
    if not layers:
        return []
    own, wrong = layers[-1], None
    if not is_placement(own):
        hint = "a spec goes first on the command line, and what it builds on under `extends`"
        wrong = ("kind", SCOPE, f"a file of kind {KIND} was expected", hint)
    elif text_at(own, "version") != VERSION:
        wrong = ("version", "bad-value", f"version {VERSION} was expected", "")
    if wrong is not None:
        key, code, message, hint = wrong
        place = (value_at(own, key) or own).place
        findings.append(Finding(place, code, message, path=key, suggestion=hint, blocking=True))
        return []
    return [
        _site_part(
            replace(layer, entries={k: e for k, e in layer.entries.items() if k not in HEADER}),
            "",
            "",
            recipe,
            findings,
        )
        for layer in layers
    ]


def _site_part(
    node: MapNode, schema: str, shown: str, below: Node | None, findings: list[Finding]
) -> MapNode:
    """Return a map without the keys that a site may not set.

    Args:
        node: the map.
        schema: path in the schema, `<name>` for names, with a final dot.
        shown: the same path as people write it.
        below: node of the recipe at this path.
        findings: receives a finding for each key.
    """
    entries = {}
    for key, entry in node.entries.items():
        field, path = schema_fields().get(f"{schema}{key}"), f"{shown}{key}"
        kept: Node | None = None
        if field is None or field.site or (key == "name" and schema.endswith("<name>.")):
            kept = entry.value  # unknown keys are found when layers merge
        elif block_in(field.annotation) and isinstance(entry.value, MapNode):
            there = value_at(below, key)
            kept = _site_part(entry.value, f"{field.path}.", f"{path}.", there, findings)
        elif named_item(field.annotation) and (
            isinstance(entry.value, MapNode)
            or (isinstance(entry.value, ListNode) and entry.value.items)
        ):
            there = value_at(below, key)
            kept = _site_items(entry.value, f"{field.path}.<name>.", path, there, findings)
        else:
            _refuse(entry.key_place, path, findings)
        if kept is not None:
            entries[key] = replace(entry, value=kept)
    return replace(node, entries=entries)


def _site_items(
    node: Node, schema: str, shown: str, below: Node | None, findings: list[Finding]
) -> Node | None:
    """Return a list of named maps, or a map by name, without what a site may not set.

    None for a list without items, which would delete the recipe's. Arguments as for `_site_part`.
    """
    known = None if not isinstance(below, ListNode) else {object_name(i): i for i in below.items}
    kept: dict[str, Node] = {}
    for name, place, item in named_entries(node):
        path = f"{shown}.{name}" if name else shown
        if name and known is not None and name not in known:
            match = close_match(name, known)
            hint = f"did you mean {match}?" if match else f"there are: {', '.join(known)}"
            message = f"the recipe has no {name!r} there, and a placement adds none"
            findings.append(
                Finding(place, SCOPE, message, path=path, suggestion=hint, blocking=True)
            )
        elif name and isinstance(item, MapNode):
            there = None if known is None else known[name]
            kept[name] = _site_part(item, schema, f"{path}.", there, findings)
        else:
            _refuse(place, path, findings)
    if isinstance(node, MapNode):
        return replace(
            node, entries={n: replace(node.entries[n], value=item) for n, item in kept.items()}
        )
    assert isinstance(node, ListNode)
    return replace(node, items=tuple(kept.values())) if kept else None


def _refuse(place: Place, path: str, findings: list[Finding]) -> None:
    message = "a placement says where and with what; this is the recipe's to say"
    hint = f"say it in the spec; `runspec explain {path}`"
    # The field is removed in any case, so a suppression would have no effect.
    findings.append(Finding(place, SCOPE, message, path=path, suggestion=hint, blocking=True))
