"""The wheel works where there is no checkout, and no text installs a package by its bare name."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from runspec.core import entry_points
from tests.volunteer import ROOT, environment_with_wheel

BARE = re.compile(
    r"""(?:pip|uv|pipx)\s+(?:tool\s+)?install\b[^\n]*?['" ](runspec[\w-]*)(?![\w./*-])"""
)
TEXTS = ("*.py", "*.md", "*.yaml", "*.toml", "Makefile", "requirements/*.txt")


def test_the_wheel_is_called_what_messages_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert entry_points.NAME == project["name"] != "runspec"
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    assert f"{stem}-py3-none-any.whl" == entry_points.WHEEL
    for extra in project["optional-dependencies"]:
        assert (
            entry_points.install_command(extra) == f'pip install "./{entry_points.WHEEL}[{extra}]"'
        )


def test_no_text_installs_by_a_bare_name() -> None:
    for unsafe in (
        "pip install runspec",
        'pip install "runspec-rl[x]"',
        "uv pip install 'runspec'",
    ):
        assert BARE.search(unsafe), unsafe
    listed = subprocess.run(
        ["git", "ls-files", "-z", *TEXTS], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    names = [
        name for name in listed.split("\0") if name and Path(name) != Path("tests/test_wheel.py")
    ]
    assert len(names) > 500
    bare = [
        f"{name}: {found[0]}"
        for name in names
        for found in BARE.finditer((ROOT / name).read_text())
        if " @ " not in found.string[found.end() : found.end() + 3]  # from an address
    ]
    assert bare == []


def test_the_wheel_has_every_data_file_of_the_packages() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [name.rstrip("*") for name in tools["packages"]["find"]["include"]]
    listed = subprocess.run(
        ["git", "ls-files", "-z", *packages], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    tracked = {ROOT / name for name in listed.split("\0") if name}
    data = {path for path in tracked if path.suffix != ".py" and path.name != "py.typed"}
    packed = {
        path
        for package, patterns in tools["package-data"].items()
        if package != "*"
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    assert ROOT / "runspec" / "local" / "dashboard" / "page" / "page.html" in data
    assert data - packed == set()


@pytest.mark.nightly
def test_a_spec_is_linted_from_the_wheel(tmp_path: Path) -> None:
    # given an environment that has our wheel instead of this checkout
    there = environment_with_wheel(tmp_path / "env")
    spec = ROOT / "specs" / "target_short.yaml"
    # when a good spec is linted, and one with an error
    good = subprocess.run(
        [there / "runspec", "lint", spec, "--profile", "laptop"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert good.returncode == 0, good.stdout + good.stderr
    wrong = [there / "runspec", "lint", spec, "--profile", "laptop", "--set", "steps=-1"]
    bad = subprocess.run(wrong, cwd=tmp_path, capture_output=True, text=True)
    # then the wheel's own code says so
    assert bad.returncode == 1 and "steps" in bad.stdout + bad.stderr
    where = subprocess.run(
        [
            there / "python",
            "-c",
            "import runspec, verify; print(runspec.__file__, verify.__file__)",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.count(str(tmp_path)) == 2
