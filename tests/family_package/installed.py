"""The package of this folder, as if it were installed: on sys.path, with its entry points."""

from __future__ import annotations

import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent


def family_paths(directory: Path) -> list[str]:
    """Writes what an installation leaves into `directory`; returns what goes to PYTHONPATH."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    lines = [f"[{group}]" for group in project["entry-points"]]
    lines += [
        f"{k} = {v}" for points in project["entry-points"].values() for k, v in points.items()
    ]
    add_package(directory, project["name"], "\n".join(lines))
    return [str(directory), str(FOLDER)]


def add_package(directory: Path, name: str, entry_points: str) -> None:
    """The metadata of an installed package with these entry points."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"{entry_points}\n")
