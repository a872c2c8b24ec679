"""Each extra of the package installs all that its processes import, and the bounds are met here."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TASKS = ("sampler.tasks.task_set", "sampler.tasks.grading.launch", "sampler.tasks.grading.launch")
VALIDATOR = ("verify.__main__", "verify.validator", "bridge.delta", *TASKS)
CLI = sorted(f"runspec.cli.{path.stem}" for path in (ROOT / "runspec" / "cli").glob("[a-z]*.py"))
PROCESSES = {
    "": CLI,
    "learner": (*VALIDATOR, "learner_jax.train", "learner_jax.prefill", "bridge.publisher"),
    "validator-torch": (
        *VALIDATOR,
        "sampler.prefill.engine",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")),
    ),
}
OURS = {"bridge", "broadcast", "learner_jax", "runspec", "sampler", "verify"}
HIDING = """
import importlib, sys

class Hiding:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in self.names:
            return self.finder.find_spec(name, path, target)

hidden, modules = (set(words.split()) for words in sys.argv[1:])
sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]
for module in sorted(modules):
    importlib.import_module(module)
"""


def own(extra: str) -> Iterator[Requirement]:
    """What pyproject.toml asks for, extras of our own followed; "" has the base alone."""
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *(extras[extra] if extra else ())):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from own(other)
        else:
            yield requirement


def installed_by(extra: str) -> set[str]:
    """Names of distributions, of requirements of requirements too, as they are installed here."""
    found: set[str] = set()
    left = [(each.name, extra) for each in own(extra) for extra in (*each.extras, "")]
    seen = set()
    while left:
        name, chosen = left.pop()
        if (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        try:
            wanted = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # of another platform, or one that we do without
            continue
        found.add(canonicalize_name(name))
        for each in wanted:
            if each.marker is None or each.marker.evaluate({"extra": chosen}):
                left += [(each.name, other) for other in (*each.extras, "")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", PROCESSES)
def test_a_process_imports_nothing_that_its_extra_does_not_install(extra: str) -> None:
    # given a Python that has nothing but what the extra installs
    there = installed_by(extra)
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not there & {canonicalize_name(owner) for owner in owners}
    } - OURS
    assert "vllm" in hidden and ("jax" in hidden) == (extra != "learner")
    # when its processes are imported, then nothing is missing
    done = subprocess.run(
        [sys.executable, "-c", HIDING, " ".join(hidden), " ".join(PROCESSES[extra])],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", PROCESSES)
def test_what_is_pinned_here_is_within_the_bounds(extra: str) -> None:
    for requirement in own(extra):
        assert requirement.specifier.contains(version(requirement.name), prereleases=True)
