"""Conversations with a program and with tests, each in a sandbox of its own."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from sampler.sandbox import PYTHON, Limits, start
from sampler.tasks.grading.launch import Channel, ChannelClosed, NoMessage, Overdue
from sampler.tasks.rewards.code.plain import NotPlain, decode, encode

MAX_REPLY_BYTES = 2 * 1024 * 1024
"""Longest message from a program or from tests."""
RECURSION = 50_000
"""As LeetCode's and LiveCodeBench's evaluators have it."""


class ProgramFailed(Exception):
    """The program failed; the message says how."""


class Session:
    """A process in the sandbox that answers messages.

    Args:
        side: `inside_program` or `inside_tests`.
        setup: its first message.
        mechanisms: mechanisms that isolate it.
        limits: of the process.
        deadline: of all messages (`time.monotonic`).
    """

    def __init__(
        self,
        side: str,
        setup: dict[str, Any],
        mechanisms: Sequence[str],
        limits: Limits,
        deadline: float,
    ) -> None:
        self._deadline = deadline
        command = [*PYTHON, "-S", "-c", source_of(side)]
        self._process = start(command, limits=limits, mechanisms=mechanisms)
        self._channel = Channel(
            self._process.stdout.fileno(),
            self._process.stdin.fileno(),
            max_bytes=MAX_REPLY_BYTES,
        )
        self._setup = {"plain": source_of("plain"), "recursion": RECURSION, **setup}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()

    def set_up(self, **more: Any) -> None:
        """Send the first message, with fields that were not known at the start of the process."""
        self.send({**self._setup, **more})

    def send(self, message: dict[str, Any]) -> None:
        self._channel.send(message, self._deadline)

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ChannelClosed: the process ended, or sent something that is not a message.
            Overdue: none arrived in time.
        """
        message = self._channel.receive(self._deadline)
        if not isinstance(message, dict):
            raise NoMessage("a message that is no object")
        return message

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        return f"the program: {self._process.exit_reason()}"


class Program:
    """The model's program, whose functions can be called. Its replies are not trusted."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls = 0

    def load(self) -> list[str]:
        """Run the program; return the names of its public functions. Other names, such as
        `__builtins__`, may mean something to the interpreter.

        Raises:
            ProgramFailed: it raised, ended or broke the protocol.
        """
        with self._translated():
            self._session.set_up()
            reply = self._session.receive()
        if "failed" in reply:
            raise ProgramFailed(f"the program: {_text(reply['failed'])}")
        names = reply.get("functions")
        if not isinstance(names, list):
            raise ProgramFailed("the program broke the protocol")
        return [
            name
            for name in names
            if isinstance(name, str) and name.isidentifier() and not name.startswith("_")
        ]

    def call(self, name: str, arguments: Any, named: Any) -> dict[str, Any]:
        """Call a function with encoded arguments; return `{"value": encoded}` or `{"raised": kind,
        "text": text}`, whose depth is limited.

        Raises:
            ProgramFailed: the process ended or broke the protocol.
        """
        self._calls += 1
        call = {"id": self._calls, "name": name, "args": arguments, "named": named}
        with self._translated():
            self._session.send(call)
            reply = self._session.receive()
        if reply.get("id") != self._calls:
            raise ProgramFailed("the program broke the protocol")
        if "value" in reply:
            try:
                return {"value": encode(decode(reply["value"]))}
            except (NotPlain, RecursionError) as error:
                raise ProgramFailed(f"{name} returned what is no plain data: {error}") from error
        return {"raised": _text(reply.get("raised")), "text": _text(reply.get("text"))}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of a conversation into a failure of the program."""
        try:
            yield
        except NoMessage as error:
            raise ProgramFailed(f"the program sent {error}") from error
        except ChannelClosed as error:
            raise ProgramFailed(f"{self._session.exit_reason()} ({error})") from error
        except Overdue as error:
            raise ProgramFailed("the program took too long") from error


@lru_cache
def source_of(name: str) -> str:
    """Return the text of a file that runs in the sandbox."""
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def _text(value: object) -> str:
    return value[:400] if isinstance(value, str) else "Exception"


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
