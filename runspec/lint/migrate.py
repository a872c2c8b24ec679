"""Raises spec files to the newest version of the schema, comments and all.

A migration says which edits turn a file of one version into one of the next; files go from version
to version until no migration starts from theirs. Edits are parts of lines, as those of `--fix`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runspec.core.errors import UserError
from runspec.core.spec.findings import Edit
from runspec.core.spec.schema import VERSION
from runspec.core.spec.yaml_nodes import MapNode, ScalarNode, parse_yaml
from runspec.lint.fix import apply_edits


@dataclass(frozen=True)
class Migration:
    """The way from one version to the next."""

    to: str
    """The next version."""
    says: str
    """What changes, for people."""
    edits: Callable[[MapNode], Sequence[Edit]]
    """From a file's root to what must change in it, `version` aside."""


MIGRATIONS: Mapping[str, Migration] = {}
"""By the version that they start from. Empty, for `runspec/v1` is the first version."""


@dataclass(frozen=True)
class Migrated:
    """A file's text in the newest version."""

    text: str
    said: tuple[str, ...]
    """What was changed, a sentence a migration; empty where nothing had to be."""


def migrate_text(
    text: str, file: str, migrations: Mapping[str, Migration] = MIGRATIONS
) -> Migrated:
    """The text of a spec, profile or placement in the newest version.

    Args:
        text: of the file.
        file: its name, for what goes wrong.
        migrations: by the version that they start from; no chain of them may be a circle.

    Raises:
        UserError: broken YAML, no version, or one that nobody knows.
    """
    said: list[str] = []
    while True:
        root = _root(text, file)
        version = _version(root, file)
        step = migrations.get(str(version.value))
        if step is None:
            _require_known(version, file, migrations)
            return Migrated(text, tuple(said))
        place = version.place
        new_version = Edit(place.line, place.column, place.column + place.width, step.to)
        text = apply_edits(text, [*step.edits(root), new_version])
        said.append(f"{version.value} to {step.to}: {step.says}")


def _root(text: str, file: str) -> MapNode:
    document = parse_yaml(text, file)
    if not isinstance(document.root, MapNode):
        what = document.findings[0].message if document.findings else "no map"
        raise UserError(f"cannot be migrated: {what}", place=file, remedy="mend its YAML first")
    return document.root


def _version(root: MapNode, file: str) -> ScalarNode:
    node = root.entries["version"].value if "version" in root.entries else None
    if not isinstance(node, ScalarNode) or not node.place.width:
        raise UserError(
            "says no version",
            place=file,
            remedy="write `version:` with the one that it was made for, then migrate it",
        )
    return node


def _require_known(version: ScalarNode, file: str, migrations: Mapping[str, Migration]) -> None:
    known = sorted({VERSION, *migrations, *(migration.to for migration in migrations.values())})
    if version.value not in known:
        raise UserError(
            f"version {str(version.value)[:80]!r} is not known; there are: {', '.join(known)}",
            place=f"{file}:{version.place.line}:{version.place.column}",
            remedy="correct it, or use the runspec that it was made for",
        )
