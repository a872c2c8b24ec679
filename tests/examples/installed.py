"""Packages below `examples/`, as if they were installed: on sys.path, with their entry points."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def installed_paths(example: str, directory: Path) -> list[str]:
    """Writes what an installation leaves into `directory`; returns what goes to PYTHONPATH."""
    project = tomllib.loads((EXAMPLES / example / "pyproject.toml").read_text())["project"]
    lines = [f"[{group}]" for group in project["entry-points"]]
    lines += [
        f"{k} = {v}" for points in project["entry-points"].values() for k, v in points.items()
    ]
    add_package(directory, project["name"], "\n".join(lines))
    return [str(directory), str(EXAMPLES / example)]


def add_package(directory: Path, name: str, entry_points: str) -> None:
    """The metadata of an installed package with these entry points."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"{entry_points}\n")
