"""A package of somebody else's with a reward, installed for one test."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from runspec.core.schema import Reward
from sampler.tasks.interfaces import Answer
from verify.plugins import Problem

TERM = """\
import os, signal, socket, sys, time

class Term:
    role = "task"
    limits_blame_answer = {blames}

    def __init__(self, reward):
        pass

    def prepare(self):
        if {broken}:
            raise OSError("no opening book")

    def score(self, problem, answer):
        while answer == "hang":
            time.sleep(1)
        if answer == "raise":
            raise RuntimeError("no idea")
        if answer == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if answer == "leave":
            os._exit(0)
        if answer == "memory":
            return float(len(bytearray(1 << 36)))
        if answer == "text":
            return "one"
        if answer == "print":
            print('{{"value": 1.0, "reason": ""}}', flush=True)
            return 0.25
        if answer == "environment":
            return float("SECRET" in os.environ)
        if answer == "file":
            return float(os.path.exists({secret!r}))
        if answer == "network":
            try:
                socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
                return 1.0
            except OSError:
                return 0.0
        if answer == "modules":
            return float("mpmath" in sys.modules or "reasoning_gym" in sys.modules)
        return float(answer)
"""


def install_term(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    blames: bool = False,
    secret: str = "",
    port: int = 1,
    broken: bool = False,
) -> tuple[str, str]:
    """Puts a distribution with one reward, by two names, on sys.path; a kind and its module."""
    module = f"chess_{uuid.uuid4().hex[:8]}"
    source = TERM.format(blames=blames, secret=secret, port=port, broken=broken)
    entry_points = f"[runspec.rewards]\nchess = {module}:Term\nblitz = {module}:Term\n"
    install(directory, monkeypatch, module, entry_points, source, name="chess-rewards")
    return "chess", module


def install(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    entry_points: str,
    source: str,
    *,
    name: str = "others",
) -> None:
    """Puts a distribution, version 1.5, with one module on sys.path."""
    package = directory / f"{module}-1.5.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Name: {name}\nVersion: 1.5\n")
    (package / "entry_points.txt").write_text(entry_points)
    (directory / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(directory)


def reward(kind: str, **fields: object) -> Reward:
    return Reward.model_validate({"name": "term", "kind": kind, **fields})


def answers(kind: str, texts: list[str]) -> list[Answer]:
    return [Answer(Problem(f"p{i}", kind, "", {}), text) for i, text in enumerate(texts)]
