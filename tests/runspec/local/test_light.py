"""The command and the linter start quickly: nothing heavy is imported until it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"jax", "torch", "vllm", "matplotlib", "numpy", "pyarrow", "transformers", "httpx", "rich"}


@pytest.mark.parametrize(
    ("statement", "drawn"),
    [
        ("import runspec, runspec.lint.check, runspec.core.spec.load", set()),
        ("import runspec.local.apply", set()),
        ("import runspec.cli", {"rich"}),
    ],
)
def test_importing_runspec_pulls_in_nothing_heavy(statement: str, drawn: set[str]) -> None:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert (HEAVY - drawn).isdisjoint(modules)
