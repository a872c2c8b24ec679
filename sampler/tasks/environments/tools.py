"""Tool calls in a policy's message, and the environments whose turns call tools.

Three forms are read: `<tool_call>{...}</tool_call>` (Hermes, Qwen), a message that is one JSON
object (Llama, with `parameters` in place of `arguments`), and `name(text)` in a line of its own,
for small vocabularies. The thinking has been cut off before, so a call inside it is no call.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sampler.tasks.environment import Environment, Message
from sampler.tasks.interfaces import Score
from verify.plugins import Problem

MAX_CALL_CHARS = 1 << 14
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHORT = re.compile(r"\s*([a-z_]+)\(([^\n]*)\)\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]


class Malformed(Exception):
    """A message holds something that begins as a call and is none."""


def call_in(message: str, first_argument: Mapping[str, str]) -> ToolCall | None:
    """Return the call in a message; None if it is an answer.

    Args:
        message: the policy's text, without its thinking.
        first_argument: for each tool the argument that `name(text)` gives.

    Raises:
        Malformed: a call that cannot be read, more than one, or a name that is no tool's.
    """
    if len(message) > MAX_CALL_CHARS and _OPEN in message:
        raise Malformed(f"a call of over {MAX_CALL_CHARS} characters")
    if _OPEN in message or _CLOSE in message:
        before, _, rest = message.partition(_OPEN)
        body, closed, after = rest.partition(_CLOSE)
        if not closed or _CLOSE in before or _OPEN in body or _OPEN in after or _CLOSE in after:
            raise Malformed("one call at a time, between <tool_call> and </tool_call>")
        return _from_json(body, first_argument)
    if message.lstrip().startswith("{"):
        return _from_json(message, first_argument)
    short = _SHORT.fullmatch(message)
    if short and short[1] in first_argument:
        return ToolCall(short[1], {first_argument[short[1]]: short[2]})
    return None


def _from_json(text: str, tools: Mapping[str, str]) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed("the call is no JSON") from error
    if not isinstance(found, dict):
        raise Malformed("the call is no object")
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        raise Malformed(f"a call has a name ({', '.join(tools)}) and an object of arguments")
    return ToolCall(name, arguments)


class ToolEnvironment(Environment):
    """Turns that call tools, up to one without a call, which is the answer.

    A malformed call comes back as an observation. Subclasses define `tools`, `use` and `judge`.
    """

    max_turns = 4

    @abstractmethod
    def use(self, problem: Problem, call: ToolCall) -> str:
        """Return what a tool answers; whatever the arguments hold, it answers something."""

    @abstractmethod
    def judge(self, problem: Problem, answer: str) -> Score | float:
        """Return the task reward of the answer."""

    def step(
        self, problem: Problem, state: Any, message: str
    ) -> tuple[Any, Sequence[Message], bool]:
        """See `Environment`; the state has the calls, and the answer once there is one."""
        state = state or {"calls": 0, "answer": None}
        try:
            call = call_in(message, self.first_arguments())
            if call is None:
                return {**state, "answer": message}, [], True
            found = self.use(problem, call)
        except Malformed as error:
            found = f"error: {error}"
        calls = state["calls"] + 1
        return {**state, "calls": calls}, [Message(role="tool", content=found)], False

    def grade(self, problem: Problem, state: Any, transcript: Sequence[Message]) -> Score | float:
        answer = None if state is None else state["answer"]
        return Score(0.0, "no answer") if answer is None else self.judge(problem, answer)

    @classmethod
    def first_arguments(cls) -> dict[str, str]:
        """Return the first argument of each tool's schema, by the tool's name."""
        functions = [tool["function"] for tool in cls.tools]
        return {f["name"]: next(iter(f["parameters"]["properties"])) for f in functions}


def schema(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """Return the JSON schema of a tool whose arguments are texts, described by name."""
    properties = {name: {"type": "string", "description": d} for name, d in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
