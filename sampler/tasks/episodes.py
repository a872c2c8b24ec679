"""Episodes: the turns of one rollout, played by the worker's engine and replayed by validators.

Both give an episode the model's tokens, and it gives back what stands after them. It is the same
code on both sides, so a validator makes the observations itself and believes nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runspec.core.tokenizer_files import ASSISTANT
from sampler.tasks.bridge import Bridge
from sampler.tasks.environment import Call, Environment, Message
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Reply, Result, fault
from verify.plugins import GraderFault, Problem


@dataclass(frozen=True)
class Played:
    """A kind of environment that a run plays, and what makes its tokens between turns."""

    kind: type[Environment]
    bridge: Bridge


def as_result(problem: Problem, reply: Reply) -> Result:
    """Return a reply to `grade`, which is a grade or a fault."""
    return fault(problem, "no grade") if isinstance(reply, dict) else reply


class Episode:
    """Implements `verify.plugins.Episode` for an environment.

    Args:
        problem: that is played.
        opened: the environment's reply to `start`, or its fault.
        played: the environment's kind.
        graders: call its functions.
        said: returns the model's message in a turn's tokens; empty if it has none.
        end_token: ends a turn.
    """

    def __init__(
        self,
        problem: Problem,
        opened: Reply,
        played: Played,
        graders: Graders,
        *,
        said: Callable[[Sequence[int]], str],
        end_token: int,
    ) -> None:
        self._problem, self._played, self._graders = problem, played, graders
        self._start = opened["state"] if isinstance(opened, dict) else None
        self._failed = None if isinstance(opened, dict) else GraderFault(str(opened))
        self._said, self._end = said, end_token
        self.per_turn = played.kind.max_tokens_per_turn
        self.fault = self._failed
        self._attempt = 0
        self.state: Any = self._start
        self.transcript: list[Message] = []

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        """Play the newest turn, and return what stands after it; None if the episode is over.

        Args:
            turns: the model's tokens of all turns so far. A first turn begins the episode anew.
        """
        if len(turns) == 1:
            self._attempt += 1
            self.state, self.transcript, self.fault = self._start, [], self._failed
        attempt = self._attempt
        if self.fault is not None:
            return None
        said = self._said(turns[-1])
        call = Call(self._problem, "step", [self.state, said])
        reply = self._graders.play([call])[0]
        if not isinstance(reply, dict):  # a single failure may have a local cause
            reply = self._graders.play([call])[0]
        if attempt != self._attempt:  # sampled again meanwhile: the engine had died
            return None
        if not isinstance(reply, dict):
            self.fault = reply if isinstance(reply, GraderFault) else GraderFault("no state")
            return None
        self.state = reply["state"]
        observations: list[Message] = reply["messages"]
        self.transcript += [Message(role=ASSISTANT, content=said), *observations]
        kind, ended = self._played.kind, turns[-1][-1] == self._end
        if reply["over"] or not observations or len(turns) >= kind.max_turns:
            return None
        return self._played.bridge.tokens(
            observations, ended=ended, most=kind.max_observation_tokens
        )

    @property
    def last_words(self) -> str | None:
        """The policy's last message; None if it said nothing."""
        said = [each["content"] for each in self.transcript if each["role"] == ASSISTANT]
        return said[-1] or None if said else None

    def call(self) -> Call:
        """Return the call that grades the episode as it stands."""
        return Call(self._problem, "grade", [self.state, self.transcript])
