"""Process in the sandbox that loads the model's program and calls its functions on request.

The judge does not trust this process: the program can change everything in it, and gains by that
only the values that it returns.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import types
from typing import Any


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    plain = types.ModuleType("plain")
    setup = json.loads(requests.readline())
    exec(compile(setup["plain"], "plain.py", "exec"), plain.__dict__)
    sys.setrecursionlimit(setup["recursion"])
    sys.set_int_max_str_digits(0)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(setup["names"], module.__dict__)
        given = dict(module.__dict__)
        exec(chosen(setup["candidates"], setup["entry_point"]), module.__dict__)
    except BaseException as error:
        reply({"failed": say(error)})
        return
    reply({"functions": public(module)})
    while line := requests.readline():
        call = json.loads(line)
        try:
            function = found(module, call["name"], given)
            arguments, named = plain.decode(call["args"]), plain.decode(call["named"])
            answer = {"value": plain.encode(function(*arguments, **named))}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": say(error)}
        reply({"id": call["id"], **answer})


def chosen(candidates: list[str], entry_point: str | None) -> types.CodeType:
    """Return the code of the first candidate that compiles and defines the entry point with a
    body."""
    failure: Exception | None = None
    for source in candidates:
        try:
            tree = ast.parse(source)
            code = compile(source, "solution.py", "exec")
        except (SyntaxError, ValueError) as error:
            failure = failure or error
            continue
        if entry_point is None or defines(tree, entry_point):
            return code
    raise failure or NameError(f"the program does not define {entry_point}")


def defines(tree: ast.Module, name: str) -> bool:
    """Whether the last top-level definition of a name is more than a docstring."""
    last: bool | None = None
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                last = len(node.body) > (ast.get_docstring(node, clean=False) is not None)
        elif isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                last = True
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            last = True
    return bool(last)


def public(module: types.ModuleType) -> list[str]:
    """Return the names of the functions that the program defines."""
    return [
        name
        for name, value in list(vars(module).items())
        if not name.startswith("_")
        and callable(value)
        and not isinstance(value, type)
        and getattr(value, "__module__", None) == "solution"
    ][:1000]


def found(module: types.ModuleType, name: str, given: dict[str, Any]) -> Any:
    """Return a top-level function that the program was not `given`, or a method of the class
    Solution."""
    if hasattr(module, name) and getattr(module, name) is not given.get(name):
        return getattr(module, name)
    if hasattr(module, "Solution") and hasattr(module.Solution, name):
        return getattr(module.Solution(), name)
    raise NameError(f"the program does not define {name}")


def say(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:400]
    except BaseException:
        return "an error that cannot be shown"


main()
