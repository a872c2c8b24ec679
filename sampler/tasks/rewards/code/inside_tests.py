"""Process in its own sandbox that runs the data set's tests; it calls the program by messages."""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any


class Broken(BaseException):
    """The tests cannot be run, which is not the program's fault."""


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    setup = json.loads(requests.readline())
    plain = types.ModuleType("plain")
    exec(compile(setup["plain"], "plain.py", "exec"), plain.__dict__)
    sys.setrecursionlimit(setup["recursion"])

    def send(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    def proxy(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                data = {"args": plain.encode(list(arguments)), "named": plain.encode(named)}
            except plain.NotPlain as error:
                raise Broken(f"an argument of {name}: {error}") from None
            send({"call": name, **data})
            answer = json.loads(requests.readline())
            if "value" in answer:
                return plain.decode(answer["value"])
            raise raised(answer["raised"], answer["text"])

        call.__name__ = name
        return call

    try:
        # A program that defines `abs` or `all` must not judge itself with them.
        names = [name for name in setup["functions"] if not hasattr(builtins, name)]
        names += [setup["entry_point"]] if setup["entry_point"] else []
        run(setup, {name: proxy(name) for name in names})
        send({"passed": True})
    except Broken as error:
        send({"fault": str(error)})
    except BaseException as error:
        send({"failed": f"{type(error).__name__}: {error}"[:400]})


def raised(kind: str, text: str) -> Exception:
    """Return the built-in exception that the program raised, by its name. Exceptions that would end
    a loop of the tests become a plain `Exception`."""
    made = getattr(builtins, kind, None)
    ends_loops = made in (StopIteration, StopAsyncIteration)
    if isinstance(made, type) and issubclass(made, Exception) and not ends_loops:
        try:
            return made(text)
        except TypeError:  # UnicodeDecodeError and others need more arguments
            pass
    return Exception(text)


def run(setup: dict[str, Any], functions: dict[str, Callable[..., Any]]) -> None:
    """Run the tests. Whatever they raise except `Broken` is a failure of the program."""
    names: dict[str, Any] = {"__name__": "tests", **functions}
    entry_point = setup["entry_point"]
    if is_code(setup["prompt"]):  # the tests may use its helpers and imports
        prepare(setup["prompt"], "prompt", names)
    for field, source in setup["before"]:
        prepare(source, field, names)
    if entry_point is not None:
        # The tests keep the data set's helpers, but test the program's function.
        names[entry_point] = functions[entry_point]
        if "check" not in names:
            raise Broken("verification_info.test defines no check")
        names["check"](names[entry_point])
    codes = [code_of(source, field) for field, source in setup["asserts"]]
    for (_, source), code in zip(setup["asserts"], codes, strict=True):
        try:
            exec(code, names)
        except AssertionError as error:
            raise AssertionError(f"{source.strip()[:200]} {error}") from None


def prepare(source: str, field: str, names: dict[str, Any]) -> None:
    code = code_of(source, field)
    try:
        exec(code, names)
    except Exception as error:
        raise Broken(f"verification_info.{field}: {type(error).__name__}: {error}") from None


def is_code(text: str) -> bool:
    try:
        compile(text, "prompt", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def code_of(source: str, field: str) -> types.CodeType:
    try:
        return compile(source, field, "exec")
    except (SyntaxError, ValueError) as error:
        raise Broken(f"verification_info.{field}: {error}") from None


main()
