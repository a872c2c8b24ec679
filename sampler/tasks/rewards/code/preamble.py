"""Names of the standard library that a program may use without an import.

LiveCodeBench's evaluator puts these imports before every program, as LeetCode does (its
`lcb_runner/evaluation/testing_util.py`, `import_string`); programs that rely on them count as right
there. Only the names that occur in a program are imported, for imports take time.
"""

from __future__ import annotations

import builtins
import re
from functools import lru_cache
from importlib import import_module

from sampler.tasks.rewards.code.sessions import RECURSION

_MODULES = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math"),
    *("random", "statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""In its order: of two modules that have a name, the later one gives it. Only `typing` is earlier
than there, for its Counter is no class."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def with_names(program: str) -> str:
    """Return imports of the names in a program that the standard library's modules have."""
    origins, used = _origins(), set(_NAME.findall(program))
    lines = [f"import {module}" for module in _MODULES if module in used]
    found = sorted(used & origins.keys())
    return "\n".join([f"from {origins[name]} import {name}" for name in found] + lines)


def started_by(program: str) -> str:
    """Return the script that runs `program.py` beside it as the main program."""
    return (
        f"{with_names(program)}\nimport sys\nsys.setrecursionlimit({RECURSION})\n"
        'exec(compile(open("program.py", "rb").read(), "program.py", "exec", dont_inherit=True))\n'
    )


@lru_cache
def _origins() -> dict[str, str]:
    """Return the module of each name that star imports of the modules give. Python's own names, and
    those of the modules themselves, keep their meaning."""
    found: dict[str, str] = {}
    for name in _MODULES:
        module = import_module(name)
        public = getattr(module, "__all__", [each for each in dir(module) if each[0] != "_"])
        found |= dict.fromkeys(public, name)
    kept = {*dir(builtins), *_MODULES}
    return {name: module for name, module in found.items() if name not in kept}
