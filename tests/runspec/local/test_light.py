"""The command and the linter start quickly: nothing heavy is imported until it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {"jax", "torch", "vllm", "matplotlib", "numpy", "pyarrow", "transformers", "httpx", "rich"}


def imported_by(statement: str) -> set[str]:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_importing_runspec_pulls_in_nothing_heavy() -> None:
    assert HEAVY.isdisjoint(
        imported_by("import runspec, runspec.lint.check, runspec.core.spec.load")
    )


def test_supervising_pulls_in_no_engine_and_no_arrays() -> None:
    assert HEAVY.isdisjoint(imported_by("import runspec.local.apply"))


def test_the_command_line_itself_is_light() -> None:
    assert (HEAVY - {"rich"}).isdisjoint(imported_by("import runspec.cli"))
