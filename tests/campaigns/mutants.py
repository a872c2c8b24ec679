"""The gate's tests find faults that are planted at random into the code that matters most.

A mutant is one small change of one line, drawn by a seed. Only the files of tests whose recorded
coverage touches the line run, the quickest first, until one fails. A mutant that no test finds
survives. Environment variables: MUTANTS (their number), MUTANTS_SEED, MUTANTS_TREE (the checkout
whose tests are tried, by default this one), MUTANTS_FOLDER (where coverage and results are kept, so
that a campaign that was interrupted goes on).
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "runspec/core/canonical.py",
    "runspec/core/signed.py",
    "runspec/local/processes.py",
    "verify/checks/*.py",
    "verify/coordinator/machine/*.py",
    "verify/audit/*.py",
    "verify/examiner.py",
    "verify/formats/lease.py",
    "verify/formats/submission.py",
    "learner_jax/loss.py",
    "learner_jax/full_states.py",
    "learner_jax/loss.py",
    "learner_jax/packing.py",
    "learner_jax/train.py",
    "learner_jax/training.py",
    "bridge/delta.py",
    "bridge/publisher.py",
    "bridge/weight_map.py",
    "broadcast/fetcher.py",
    "broadcast/manifest.py",
    "sampler/engine/sampling.py",
    "sampler/sandbox/*.py",
    "sampler/worker/worker.py",
)
"""The nucleus of docs/architecture.md, and what decides who is paid, trained and believed."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*"}
LOGGING = {"debug", "info", "warning", "error", "exception", "log"}
SLOW = ("tests/e2e/", "tests/sampler/engine/", "tests/sampler/worker/")
"""Tests of real engines and whole runs, which run only if no other finds a mutant."""
HANG_S = (180.0, 180.0, 900.0)
"""Seconds after which a test that has not ended counts as failed, by stage; see `_stage`."""
CONFIG = """
[run]
branch = false
parallel = true
context = ${{COVERAGE_CONTEXT-}}
data_file = {data}
source = runspec, learner_jax, bridge, broadcast, sampler, verify
concurrency = multiprocessing, thread
patch = subprocess, _exit
sigterm = true
"""


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement: bytes of a file's text, and what replaces them."""

    file: str
    line: int
    start: int
    end: int
    new: str


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """As a plugin: coverage knows which file of tests runs, in this process and its children."""
    file = item.nodeid.split("::", 1)[0]
    if os.environ.get("COVERAGE_CONTEXT") != file:
        os.environ["COVERAGE_CONTEXT"] = file  # children read it when they start
        if (running := coverage.Coverage.current()) is not None:
            running.switch_context(file)


def sites(file: str, text: str) -> Iterator[Mutant]:
    """Every change that could be made to a file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(node: ast.expr | ast.stmt, new: str, end: ast.expr | None = None) -> Mutant:
        last = end or node
        assert last.end_lineno is not None and last.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[last.end_lineno - 1] + last.end_col_offset
        return Mutant(file, node.lineno, start, stop, new)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                new = f"{ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)}"
                yield change(node, f"({new})")
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield change(node, f"({word.join(f'({ast.unparse(each)})' for each in values)})")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                if not any(isinstance(each, ast.JoinedStr) for each in (left, right)):
                    new = f"({ast.unparse(left)}) {OPERATORS[type(op)]} ({ast.unparse(right)})"
                    yield change(node, f"({new})")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield change(test, f"(not ({ast.unparse(test)}))")
            case ast.Constant(value=bool(value)):
                yield change(node, str(not value))
            case ast.Constant(value=int(value)):
                yield change(node, str(value + 1))
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield change(value, "None")
            case ast.Expr(value=ast.Call() as call) if not _logs(call):
                yield change(node, "pass")
            case ast.Raise() | ast.AugAssign():
                yield change(node, "pass")
            case _:
                pass


def _logs(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def drawn(tree: Path, number: int, seed: int) -> list[Mutant]:
    """Mutants of a checkout, each place as likely as any other."""
    files = sorted(path for pattern in CODE for path in tree.glob(pattern))
    every = [
        mutant
        for path in files
        for mutant in sites(str(path.relative_to(tree)), path.read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(every, number)


def run_tests(tree: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The tests of a checkout, whose packages come before those that are installed."""
    here = str(Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": f"{tree}:{here}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    with (folder / "pytest.log").open("a") as log:
        return subprocess.run(
            command, cwd=tree, env=env, stdout=log, stderr=log, text=True, timeout=None, check=False
        )


def recorded(tree: Path, folder: Path) -> coverage.CoverageData:
    """Coverage of the gate by file of tests, measured once."""
    data = folder / "coverage"
    if not data.exists():
        config = folder / "config.ini"
        config.write_text(CONFIG.format(data=data))
        os.environ["COVERAGE_PROCESS_START"] = str(config)
        cores = str(len(os.sched_getaffinity(0)))
        options = ("-n", cores, "--dist", "loadfile", "-m", "not nightly", "-p", "mutants")
        done = run_tests(tree, folder, *options)
        del os.environ["COVERAGE_PROCESS_START"]
        if done.returncode:
            raise RuntimeError(f"the tests fail without a mutant: {folder}/pytest.log")
        combined = coverage.Coverage(data_file=str(data), config_file=str(config))
        combined.combine([str(folder)])
        combined.save()
    found = coverage.CoverageData(str(data))
    found.read()
    return found


def touching(data: coverage.CoverageData, tree: Path, mutant: Mutant) -> list[str]:
    """Files of tests that execute the line of a mutant; where it also runs outside of tests, at
    import, those that execute any line of its file."""
    lines = data.contexts_by_lineno(str(tree / mutant.file))
    here = set(lines.get(mutant.line, ()))
    if not here or "" in here:
        here = set().union(*lines.values())
    return sorted(here - {""})


def found(tree: Path, folder: Path, mutant: Mutant, files: list[str]) -> bool:
    """Whether one of the tests fails, or does not end, with the mutant in its file."""
    path = tree / mutant.file
    text = path.read_bytes()
    path.write_bytes(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])
    try:
        for stage, hang_s in enumerate(HANG_S):
            some = [file for file in files if _stage(file, mutant) == stage]
            cores = str(min(len(some), len(os.sched_getaffinity(0))))
            words = ("-x", "-m", "not nightly", f"--timeout={hang_s}", "-n", cores, *some)
            if some and run_tests(tree, folder, "--dist", "loadfile", *words).returncode != 0:
                return True
        return False
    finally:
        path.write_bytes(text)


def _stage(file: str, mutant: Mutant) -> int:
    """0 for tests beside the mutant's package, 2 for slow ones, 1 for the others."""
    if file.startswith(SLOW):
        return 2
    package = mutant.file.rpartition("/")[0]
    return 0 if file.startswith((f"tests/{package}/", f"tests/{package}.py")) else 1


def run() -> dict[str, dict[str, object]]:
    """Tries every mutant, and returns by file how many were found, of how many."""
    tree = Path(os.environ.get("MUTANTS_TREE", ROOT)).resolve()
    folder = Path(os.environ.get("MUTANTS_FOLDER", tree / ".cache" / "mutants")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seed = int(os.environ.get("MUTANTS_SEED", "20261127"))
    mutants = drawn(tree, int(os.environ.get("MUTANTS", "100")), seed)
    data, results = recorded(tree, folder), folder / "results.jsonl"
    known = results.read_text().splitlines() if results.exists() else []
    with results.open("a") as out:
        for number, mutant in enumerate(mutants[len(known) :], len(known)):
            files = touching(data, tree, mutant)
            row = asdict(mutant) | {
                "tests": len(files),
                "found": found(tree, folder, mutant, files),
            }
            print(f"{number}: {row}", file=sys.stderr, flush=True)
            known.append(json.dumps(row))
            out.write(known[-1] + "\n")
            out.flush()
    rows = [json.loads(line) for line in known]
    killed = Counter(row["file"] for row in rows if row["found"])
    figures: dict[str, dict[str, object]] = {
        file: {"mutants": number, "found": killed[file]}
        for file, number in sorted(Counter(row["file"] for row in rows).items())
    }
    return {"all": {"mutants": len(rows), "found": killed.total()}, **figures}
