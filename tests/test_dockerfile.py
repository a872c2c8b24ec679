"""The Dockerfile, which nobody can build here: what it copies is there, and its commands parse."""

from __future__ import annotations

import re
import shlex
import subprocess

from runspec.core.entry_points import LISTS, WHEEL
from tests.harness import ROOT

MADE = {f"dist/{WHEEL}"}
"""By `make wheel`."""


def instructions() -> list[tuple[str, str]]:
    """Every instruction with what follows it, continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_what_is_copied_is_in_a_checkout_and_not_ignored() -> None:
    sources = [rest.split()[0] for word, rest in instructions() if word == "COPY"]
    seen = (ROOT / ".dockerignore").read_text().split()
    assert seen[0] == "*"
    for source in sources:
        assert source in MADE or (ROOT / source).is_file()
        assert f"!{source.partition('/')[0]}" in seen
    # and each image has one of the pinned lists, and the wheel
    lists = [source for source in sources if source.startswith("requirements/")]
    assert sorted(lists) == sorted(LISTS[kind].file for kind in ("cpu", "cuda", "tpu"))
    assert len(sources) == 2 * len(lists)


def test_the_images_are_those_that_the_page_names() -> None:
    stages = [rest.split(" AS ") for word, rest in instructions() if word == "FROM"]
    assert stages[0][0] == f"python:{LISTS['cpu'].python}-slim"
    assert {LISTS[kind].python for kind in ("cpu", "cuda", "tpu")} == {LISTS["cpu"].python}
    assert all(base == "base" for base, _ in stages[1:])
    page = (ROOT / "docs" / "backends.md").read_text()
    assert all(f"`{target}`" in page for _, target in stages[1:])


def test_the_commands_are_shell_and_install_without_resolving() -> None:
    for word, rest in instructions():
        assert word in {"FROM", "RUN", "COPY", "ENV"}
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
            if "pip install" in rest:
                assert "--no-deps" in shlex.split(rest)


def test_torch_is_the_build_that_make_installs() -> None:
    [torch] = re.findall(r"torch==\S+", (ROOT / "docker" / "Dockerfile").read_text())
    assert f"CPU_TORCH := {torch}\n" in (ROOT / "Makefile").read_text()
