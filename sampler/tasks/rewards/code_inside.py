"""Processes in the sandbox that run the model's program and the data set's tests.

Each runs in a sandbox of its own and exchanges lines of JSON with the judge. The judge does not
trust the process of the program: the program can change everything in it, and gains by that only
the values that it returns. The process of the tests calls the program by messages.

Values cross as plain data. No object with code of one side reaches the other, so comparisons use
only built-in types. The text of this file is what both processes start with, so it imports only the
standard library.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, BinaryIO

MAX_DEPTH = 64
MAX_COLLISIONS = 64
"""Most keys of equal hash in a set or dictionary. An attacker can choose such numbers, and each is
then compared with all the others."""
_SMALL = 1 << 53
_SEQUENCES: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset}
Send = Callable[[dict[str, Any]], None]
"""Writes a message to the judge."""


class NotPlain(Exception):
    """A value that is no plain data, or nested too deep."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return Python data as JSON data; an instance of a subclass is stored as its built-in type."""
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return value if -_SMALL < value < _SMALL else {"i": hex(value)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in pairs]}
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {tag: [encode(item, depth + 1) for item in kind.__iter__(value)]}
    if isinstance(value, range):
        return {"r": [encode(part) for part in (value.start, value.stop, value.step)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    raise NotPlain(f"{type(value).__name__} is no plain data")


def decode(data: Any, depth: int = 0) -> Any:
    """Invert `encode`, for data from an untrusted process.

    Raises:
        NotPlain: `encode` does not write such data.
    """
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if data is None or isinstance(data, (bool, int, str, float)):
        return data
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlain("malformed data")
    ((tag, inner),) = data.items()
    try:
        return _DECODERS[tag](inner, depth + 1)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise NotPlain("malformed data") from error


def _items(inner: Any, depth: int) -> list[Any]:
    if not isinstance(inner, list):
        raise NotPlain("malformed data")
    return [decode(item, depth) for item in inner]


def _keys(keys: list[Any]) -> list[Any]:
    counts: dict[int, int] = {}
    for key in keys:
        counts[hash(key)] = seen = counts.get(hash(key), 0) + 1
        if seen > MAX_COLLISIONS:
            raise NotPlain("too many keys of one hash")
    return keys


def _dictionary(inner: Any, depth: int) -> dict[Any, Any]:
    pairs = [(decode(key, depth), decode(value, depth)) for key, value in inner]
    _keys([key for key, _ in pairs])
    return dict(pairs)


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "i": lambda inner, depth: int(inner, 16),
    "f": lambda inner, depth: float.fromhex(inner),
    "c": lambda inner, depth: complex(float.fromhex(inner[0]), float.fromhex(inner[1])),
    "b": lambda inner, depth: bytes.fromhex(inner),
    "t": lambda inner, depth: tuple(_items(inner, depth)),
    "s": lambda inner, depth: set(_keys(_items(inner, depth))),
    "z": lambda inner, depth: frozenset(_keys(_items(inner, depth))),
    "r": lambda inner, depth: range(*_items(inner, depth)),
    "d": _dictionary,
}


def main() -> None:
    """Read the setup and become the side that it names; the standard streams lead nowhere."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    setup = json.loads(requests.readline())
    sys.setrecursionlimit(setup["recursion"])

    def send(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    (program if setup["side"] == "program" else tests)(setup, requests, send)


def program(setup: dict[str, Any], requests: BinaryIO, reply: Send) -> None:
    """Load the model's program and call its functions on request."""
    sys.set_int_max_str_digits(0)
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
            arguments, named = decode(call["args"]), decode(call["named"])
            answer = {"value": encode(function(*arguments, **named))}
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
    last = False
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name == name:
                last = len(node.body) > (ast.get_docstring(node, clean=False) is not None)
        elif isinstance(node, ast.Assign):
            last |= any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            last |= any((alias.asname or alias.name) == name for alias in node.names)
    return last


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


class Broken(BaseException):
    """The tests cannot be run, which is not the program's fault."""


def tests(setup: dict[str, Any], requests: BinaryIO, send: Send) -> None:
    """Run the data set's tests, and send the result."""

    def proxy(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                data = {"args": encode(list(arguments)), "named": encode(named)}
            except NotPlain as error:
                raise Broken(f"an argument of {name}: {error}") from None
            send({"call": name, **data})
            answer = json.loads(requests.readline())
            if "value" in answer:
                return decode(answer["value"])
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
    entry_point, before = setup["entry_point"], setup["before"]
    try:  # the tests may use the helpers and imports of a prompt that is code
        compile(setup["prompt"], "prompt", "exec")
        before = [("prompt", setup["prompt"]), *before]
    except (SyntaxError, ValueError):
        pass
    for field, source in before:
        code = code_of(source, field)
        try:
            exec(code, names)
        except Exception as error:
            kind = type(error).__name__
            raise Broken(f"verification_info.{field}: {kind}: {error}") from None
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


def code_of(source: str, field: str) -> types.CodeType:
    try:
        return compile(source, field, "exec")
    except (SyntaxError, ValueError) as error:
        raise Broken(f"verification_info.{field}: {error}") from None


if __name__ == "__main__":
    main()
