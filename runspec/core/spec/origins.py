"""Where each value of a resolved spec is from: a file, the command line, or the schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec.core.spec.findings import SET_FILE
from runspec.core.spec.load import Layered, SpecFiles
from runspec.core.spec.validate import locate

DEFAULT = "default"

Location = tuple[str | int, ...]


def origin(layered: Layered, files: SpecFiles, location: Location) -> str:
    """`file:line` of the layer that wrote a value, `--set`, or `default`.

    Args:
        layered: the merged layers.
        files: what they were read from.
        location: keys and indices from the root, of a scalar or of a list of scalars.
    """
    place, _, _, found = locate(layered.tree, location)
    if not found:
        return DEFAULT
    if place.file == SET_FILE:
        return f"{SET_FILE} {files.overrides[place.line - 1]}"
    return f"{place.file}:{place.line}{_layer(files, Path(place.file))}"


def origins(layered: Layered, files: SpecFiles, resolved: Mapping[str, Any]) -> dict[str, str]:
    """The origin of every value by its path, names for the items of named lists."""
    return {path: origin(layered, files, at) for path, at in _leaves(resolved, (), "")}


def _layer(files: SpecFiles, file: Path) -> str:
    if files.placement is not None and file == files.placement:
        return " (placement)"
    profile = files.path.parent / "profiles" / f"{files.profile}.yaml"
    return f" (profile {files.profile})" if files.profile and file == profile else ""


def _leaves(value: Any, at: Location, path: str) -> list[tuple[str, Location]]:
    if isinstance(value, Mapping) and value:
        items = [(str(key), key, item) for key, item in value.items()]
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = [(str(item.get("name", i)), i, item) for i, item in enumerate(value)]
    else:
        return [(path, at)]
    return [
        leaf
        for shown, key, item in items
        for leaf in _leaves(item, (*at, key), f"{path}.{shown}".removeprefix("."))
    ]
