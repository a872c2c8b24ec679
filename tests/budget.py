"""Lines of code and files of each folder, held below what `budget.toml` allows.

    python -m tests.budget            prints each folder above its budget; exit code 1: there is one
    python -m tests.budget --write    writes what stands as the new budget

A line of code is one that is no blank, no comment and no docstring. Of `.js`, `.css`, `.html` and
`.sql` files every line counts that is not blank; minified files of others (`.min.`) count nothing.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = "budget.toml"
PRODUCT = ("runspec", "learner_jax", "bridge", "broadcast", "sampler", "verify")
OTHERS = (".js", ".css", ".html", ".sql")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_HEAD = """\
# Lines of code and files that each folder may have; `make lint` holds it (tests/budget.py counts).
# A change that needs more says here, beside the number, which issue allows it.
"""


def code_lines(source: str) -> int:
    """Return the lines of a Python file that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            match each:
                case ast.Expr(value=ast.Constant(value=str())):
                    docs.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def folder_of(path: str) -> str | None:
    """Return the folder of a file that has a budget; None if the file has none."""
    top, *below = path.split("/")
    if top in PRODUCT:
        return f"{top}/{below[0]}" if len(below) > 1 else top
    return top if top in ("tests", "benchmarks") else None


def measured(root: Path) -> dict[str, tuple[int, int]]:
    """Return lines and files of each folder, of the files that git knows."""
    done = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    lines, files = Counter[str](), Counter[str]()
    for name in done.stdout.splitlines():
        path, folder = root / name, folder_of(name)
        counts = path.suffix == ".py" or (path.suffix in OTHERS and ".min." not in path.name)
        if folder is None or not counts or not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        is_python = path.suffix == ".py"
        lines[folder] += code_lines(text) if is_python else sum(map(bool, text.split("\n")))
        files[folder] += 1
    return {folder: (lines[folder], files[folder]) for folder in sorted(files)}


def excesses(found: Mapping[str, tuple[int, int]], budget: Mapping[str, object]) -> list[str]:
    """Return a sentence for each folder above its budget, and for each without one."""
    said = []
    for folder, (lines, files) in found.items():
        match budget.get(folder):
            case {"lines": int(most), "files": int(most_files)}:
                if lines > most:
                    said.append(f"{folder}: {lines} lines of code, {lines - most} above its budget")
                if files > most_files:
                    said.append(f"{folder}: {files} files, {files - most_files} above its budget")
            case _:
                said.append(f"{folder}: no budget (lines, files)")
    return said


def main() -> int:
    found = measured(ROOT)
    if "--write" in sys.argv:
        rows = [f'"{each}" = {{ lines = {n}, files = {m} }}\n' for each, (n, m) in found.items()]
        (ROOT / BUDGET).write_text(_HEAD + "".join(rows))
        return 0
    said = excesses(found, tomllib.loads((ROOT / BUDGET).read_text()))
    for each in said:
        print(f"{BUDGET}: {each}; delete code, or raise the number and name the issue beside it")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
