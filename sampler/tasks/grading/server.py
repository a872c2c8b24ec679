"""Grader process: reads answers from standard input, writes scores to standard output.

It runs in the sandbox. Output of a term goes to standard error; an error of a term is a fault.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from operator import attrgetter
from typing import Any, BinaryIO

from runspec.core.errors import describe_error
from runspec.core.spec.schema import Reward
from sampler.tasks.grading.answers import MAX_REASON, reply_of
from sampler.tasks.interfaces import TaskTerm, completed
from verify.plugins import Problem


def main() -> None:
    """Serve until standard input ends."""
    requests, replies = _private_pipes()
    setup = json.loads(requests.readline())
    try:
        terms = {kind: _make(*made) for kind, made in setup["terms"].items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side reports it
        _write(replies, {"failed": describe_error(error)[:MAX_REASON]})
        return
    _write(replies, {"ready": True})
    while line := requests.readline():
        for item in json.loads(line):
            term, answer = terms[item.pop("kind")], item.pop("answer")
            _write(replies, reply_of(term, Problem(**item), answer))


def _make(module: str, attribute: str, reward: dict[str, Any]) -> TaskTerm:
    kind = completed(attrgetter(attribute)(importlib.import_module(module)))
    term = kind(Reward.model_validate(reward))
    if term.role == "length":
        raise TypeError(f"{module}:{attribute} grades lengths, not answers")
    term.prepare()
    return term


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to other descriptors, so that a `print` of a term is not read as a message."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def _write(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()
