"""Pages on kinds of rewards and sources, which plug-ins bring: the docstrings of their classes.

They are read from the packages' files; nothing of a plug-in is imported.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from runspec.core.spec.plugins import REWARD_GROUP, SOURCE_GROUP

_GROUPS = {
    REWARD_GROUP: ("reward", "reward: [{{name: ..., kind: {}}}]"),
    SOURCE_GROUP: ("source", "data: {{sources: [{{name: ..., kind: {}, ...}}]}}"),
}


def kinds() -> dict[tuple[str, str], EntryPoint]:
    """The installed kinds by what they are kinds of and their name."""
    found = {(title, p.name): p for g, (title, _) in _GROUPS.items() for p in entry_points(group=g)}
    return dict(sorted(found.items()))


def kind_paragraphs(point: EntryPoint) -> Iterator[str]:
    """Yields the docstring of a kind's class, how a spec names it, and which package brings it."""
    said = inspect.cleandoc(_docstring(point) or "Its package does not say what it is.")
    yield from said.partition("\n\nRaises:")[0].partition("\n\nArgs:")[0].split("\n\n")
    example = _GROUPS[point.group][1].format(point.name)
    source = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    yield f"In a spec: `{example}`. Comes with {source}."


def _docstring(point: EntryPoint) -> str | None:
    top, *inner = point.module.split(".")
    found = find_spec(top)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder, *inner)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return _class_docstring(file, point.attr)
    return _class_docstring(Path(found.origin), point.attr) if found and found.origin else None


def _class_docstring(file: Path, name: str) -> str | None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
    return None
