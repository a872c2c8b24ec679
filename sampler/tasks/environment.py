"""What an environment of several turns is: pure functions over plain data, found by kind.

[project.entry-points."runspec.environments"]
calculator = "sampler.tasks.environments.calculator:Calculator"

A spec names a kind as the `kind` of a reward, and problems by that `task_type` are played in it. A
reward that grades an answer is the case of one turn without observations.

Worker and validator play the same episode: what an environment does may depend on its arguments
alone. Grader processes run it (`sampler.tasks.graders`), in the sandbox, under `purity.alone`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypedDict

from runspec.core.schema import Reward
from verify.plugins import Problem

MAX_STATE_BYTES = MAX_OBSERVATION_BYTES = 1 << 18
"""Largest state, and largest observations of a step, as JSON in ASCII."""
REPLAY_SHARE = 0.25
"""What a replay may use of a limit, so that what it finished did not meet the limit elsewhere."""


class Message(TypedDict):
    """One message of an episode."""

    role: str
    content: str


class Environment(Protocol):
    """Several turns of a policy and its surroundings, constructed as `kind(reward)`.

    Subclass it, and define `start` where the problem's own text is not the prompt, `step` and
    `grade`. All are pure: no clock, network, file, process or global random source.
    """

    role: ClassVar[Literal["environment"]] = "environment"
    determinism: ClassVar[Literal["exact", "none"]] = "exact"
    """`exact`: the same arguments give the same bytes on every machine, so that strangers may play
    it. `none`: for pools that are trusted."""
    max_turns: ClassVar[int] = 8
    """Turns of the policy, at most."""
    max_tokens_per_turn: ClassVar[int] = 1 << 20
    """Tokens of a turn, at most; a turn that reaches it is cut, and the episode goes on."""
    max_observation_tokens: ClassVar[int] = 256
    """Tokens of each observation, at most; it is cut there."""
    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """JSON schemas of the tools, for templates that list them in the prompt."""
    timeout_s: ClassVar[float] = 10.0
    """Seconds that one call may take if the spec has no `timeout`."""
    executes_answers: ClassVar[bool] = False
    """Whether it runs the policy's text as a program, which needs the sandbox."""
    isolated: ClassVar[bool] = True
    """Whether it runs in a grader process. Otherwise it runs in a thread of the caller, where
    nothing is refused; that is for environments that start a sandbox of their own."""
    share: float = 1.0
    """Of its limits, what a call may use: 1 at a worker, `REPLAY_SHARE` at a validator. An
    environment with limits of its own fails beyond it."""

    def __init__(self, reward: Reward) -> None:
        """Read the reward's settings, if the kind has any."""

    def prepare(self) -> None:
        """Do slow work, such as imports and tables, before any deadline starts."""

    def start(self, problem: Problem, seed: int) -> tuple[Any, list[Message]]:
        """Return the first state, and the messages that open the episode; the last is the user's.

        Args:
            problem: of the task set; its verification is hidden from the policy.
            seed: 0 <= seed < 2**63, of the group: all its samples begin alike.
        """
        return None, [Message(role="user", content=problem.prompt)]

    def step(
        self, problem: Problem, state: Any, message: str
    ) -> tuple[Any, Sequence[Message], bool]:
        """Return the next state, the observations, and whether the episode is over.

        Args:
            problem: of `start`.
            state: of `start` or the last step; plain JSON.
            message: the policy's text without its thinking; empty if the turn has no answer.
        """

    def grade(self, problem: Problem, state: Any, transcript: Sequence[Message]) -> Any:
        """Return the task reward, a float or a `Score`.

        Args:
            problem: of `start`.
            state: after the last turn.
            transcript: the policy's messages (`assistant`) and the observations, in order.
        """

    def example(self, problem: Problem) -> list[str] | None:
        """Return the policy's messages in a good episode, for a warm start; None if it has none."""
        return None


@dataclass(frozen=True)
class Call:
    """One call of an environment's function, as plain data."""

    problem: Problem
    """Its `task_type` names the environment."""
    function: Literal["start", "step", "grade"]
    arguments: list[Any]
    """Those after the problem."""


class BadReply(Exception):
    """An environment returned something else than it must."""


def canonical(state: Any) -> str:
    """Return a state as JSON.

    Raises:
        BadReply: it is no plain data, or too large.
    """
    try:
        text = json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReply(f"the state is no plain data: {error}") from error
    if len(text) > MAX_STATE_BYTES:
        raise BadReply(f"the state has over {MAX_STATE_BYTES} bytes")
    return text


def messages_in(given: Any) -> list[Message]:
    """Return messages that an environment returned.

    Raises:
        BadReply: they are none, or too long.
    """
    found = []
    for each in given:
        role, content = each["role"], each["content"]
        if not isinstance(role, str) or not isinstance(content, str) or role == "assistant":
            raise BadReply(f"a message of role {role!r:.40}")
        content.encode()  # half a pair of surrogates is no text
        found.append(Message(role=role, content=content))
    if len(json.dumps(found)) > MAX_OBSERVATION_BYTES:
        raise BadReply(f"observations of over {MAX_OBSERVATION_BYTES} bytes")
    return found


def played(environment: Environment, function: str, problem: Problem, arguments: list[Any]) -> Any:
    """Call `start` or `step`, and return plain data: state, messages, and whether it is over.

    Raises:
        BadReply: the environment returned something else.
    """
    try:
        if function == "start":
            state, first = environment.start(problem, *arguments)
            opened, over = messages_in(first), False
        else:
            state, seen, over = environment.step(problem, *arguments)
            opened = messages_in(seen)
    except (KeyError, UnicodeEncodeError) as error:
        raise BadReply(f"no messages: {error!r:.80}") from error
    if function == "start" and (not opened or opened[-1]["role"] != "user"):
        raise BadReply("the messages that open an episode end with the user's")
    return {"state": json.loads(canonical(state)), "messages": opened, "over": bool(over)}
