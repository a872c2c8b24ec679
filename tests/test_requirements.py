"""Each list of requirements pins all that its extras want, and the install page names it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from runspec.core.entry_points import LISTS, NAME, PinnedList
from tests.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BY_HAND = {"torch"}
"""Of the CPU, whose build has an index of its own: `make install` pins it."""


def wanted(extras: Sequence[str]) -> Iterator[Requirement]:
    """What the project and its extras require, those that they name included."""
    todo, seen = list(extras), set()
    yield from map(Requirement, PROJECT["dependencies"])
    while todo:
        extra = todo.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == NAME:
                todo += requirement.extras
            else:
                yield requirement


def pins(file: str) -> dict[str, Version]:
    """Version by name; every line is a comment or one exact pin without a condition."""
    found = {}
    for line in (ROOT / file).read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        [exact] = requirement.specifier
        assert (exact.operator, requirement.marker, requirement.url) == ("==", None, None), line
        name = canonicalize_name(requirement.name)
        assert name not in found and not exact.version.endswith("*"), line
        found[name] = Version(exact.version)
    return found


@pytest.mark.parametrize("pinned", LISTS.values(), ids=LISTS)
def test_a_list_pins_what_its_extras_want(pinned: PinnedList) -> None:
    listed = pins(pinned.file)
    assert canonicalize_name(NAME) not in listed
    for requirement in wanted(pinned.extras):
        name = canonicalize_name(requirement.name)
        assert name in listed or name in BY_HAND, requirement
        if name in listed:
            assert requirement.specifier.contains(listed[name]), requirement
        if name.startswith("vllm"):  # of which the newest is never the one that was tried
            assert str(requirement.specifier) == f"=={listed[name]}"
    # and the page says how it is installed, and with which Python
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"-r {pinned.file}" in page or pinned.file == LISTS["cpu"].file
    assert f"| `{pinned.file}` | {pinned.python} |" in page


def test_torch_and_jax_share_one_set_of_cuda_libraries() -> None:
    # given that wheels of two CUDA versions put libraries of the same name into one folder
    listed = pins(LISTS["cuda"].file)
    for name in ("cudnn", "nccl", "nvshmem"):
        assert f"nvidia-{name}-cu13" in listed
        assert f"nvidia-{name}-cu12" not in listed


def test_the_lists_for_accelerators_are_tested_versions_of_the_learner() -> None:
    ours = pins(LISTS["cpu"].file)
    for kind in ("cuda", "tpu"):
        listed = pins(LISTS[kind].file)
        for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore"):
            assert listed[name] == ours[name]
