"""`python -m sampler check`: reads a run's problems and tries its graders, before a role starts.

It imports the plug-ins, so `runspec` runs it in a separate process. The rows it selects are cached
for the roles (`sampler.tasks.file_source`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from runspec.core.errors import UserError, describe_error
from runspec.core.process import run_role
from runspec.core.schema import Reward, RunSpec, Source
from runspec.core.schema.load import load_resolved
from runspec.core.schema.schema_fields import close_match
from runspec.core.tokenizer_files import ASSISTANT
from sampler.tasks.environment import Call
from sampler.tasks.environments.calculator import evaluate
from sampler.tasks.file_source import FileSource
from sampler.tasks.graders import Graders
from sampler.tasks.gym import origin_of
from sampler.tasks.interfaces import (
    Answer,
    Keep,
    ProblemSource,
    Reply,
    find_kind,
    make_source,
    make_term,
)
from sampler.tasks.launch import require_graders
from sampler.tasks.prompts import PromptCodec
from sampler.tasks.rewards.code_tests import read_tests
from sampler.tasks.rewards.math import truths_of
from sampler.tasks.task_set import problem_filter
from verify.plugins import GraderFault, Problem, load_warm_start_data

NAME = "check"
TRIED = ("", "0")
"""Trial answers to the first problem of each task type."""
VERIFICATIONS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "calculator": lambda known: evaluate(str(known["ground_truth"])),
    "code": read_tests,
    "math": truths_of,
    "reasoning_gym": origin_of,
}
"""Reads the verification of a problem, or raises, by the kind of the reward; cheap."""
NAMED = 8
"""Problems that cannot be graded and are named, of each source."""
MAX_FAULTS = 20
MAX_CHARS = 1000
_TRACES = 8
_SPEC_PATHS = ("data.", "model", "reward", "samplers", "warm_start")
_log = logging.getLogger(__name__)
"""`runspec.local.planning` shows the lines of this log as progress."""


@dataclass
class Checked:
    """The result of a check."""

    max_prompt_tokens: int
    faults: list[UserError] = field(default_factory=list)
    """Faults that end the run or leave it without rewards; `place` is a path of the spec."""
    notes: list[str] = field(default_factory=list)
    """One line for each source: numbers of problems selected and left out."""

    @contextmanager
    def catching(self, place: str, kind: str = "") -> Iterator[None]:
        """Add whatever the block raises as a fault. `kind` names the plug-in that runs in the
        block."""
        try:
            yield
        except UserError as error:
            thing = error.thing
            if "data.max_prompt_tokens" in error.remedy:
                thing += f" (data.max_prompt_tokens is {self.max_prompt_tokens})"
            if error.place.startswith(_SPEC_PATHS):
                place = error.place
            elif error.place:
                thing = f"{error.place}: {thing}"
            self.add(place, thing, error.remedy)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise whatever it likes
            plugin = f"the plug-in of kind {kind}: " if kind else ""
            self.add(
                place,
                plugin + describe_error(error),
                "mend the plug-in, or install what it imports",
            )

    def add(self, place: str, thing: str, remedy: str) -> None:
        """Add a fault; faults beyond `MAX_FAULTS` are left out."""
        if len(self.faults) < MAX_FAULTS:
            fault = UserError(thing[:MAX_CHARS], place=place, remedy=remedy[:MAX_CHARS])
            self.faults.append(fault)


def add_command(commands: Any) -> None:
    """Add `check` to what `add_subparsers` returned."""
    parser = commands.add_parser(
        NAME,
        help="read a run's problems and try its graders",
        description="Imports the plug-ins of the spec in DIR/spec.json, reads every row of its "
        "sources with what grades it, grades two answers to a problem of each task type, and "
        "prints what it found as a JSON object. `runspec lint --data` and `apply` call it.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of a run, or with a spec.json")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="has the tokenizer; else no prompt is measured",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command, and print the result alone to standard output; return the exit code."""

    def report(log: logging.Logger) -> None:
        with os.fdopen(os.dup(1), "w") as out:
            os.dup2(2, 1)  # what plug-ins print goes to standard error
            checked = check(load_resolved(options.folder), options.model)
            keys = ("place", "thing", "remedy")
            faults = [{key: getattr(fault, key) for key in keys} for fault in checked.faults]
            print(json.dumps({"faults": faults, "notes": checked.notes}), file=out)

    return run_role(NAME, report)


def check(spec: RunSpec, model: Path | None) -> Checked:
    """Read every row of a run's sources and try its graders.

    Args:
        spec: the resolved spec.
        model: a directory with the tokenizer of `model.hf`; None if it is not on this machine.
    """
    checked = Checked(spec.data.max_prompt_tokens)
    rewards = []  # those that grade tasks and whose plug-ins can be imported and created
    for reward in spec.reward:
        _log.info("importing the kind %s of reward", reward.kind)
        with checked.catching(f"reward.{reward.name}", reward.kind):
            if make_term(reward).role != "length":
                rewards.append(reward)
    sources = _read(spec, lambda source: Keep(), checked)
    if len(sources) == len(spec.data.sources):
        _measure(spec, model, checked)
    _read_verifications(rewards, sources, checked)
    _try_graders(spec, rewards, sources, checked)
    return checked


def _measure(spec: RunSpec, model: Path | None, checked: Checked) -> None:
    """Encode every prompt, as the roles will, and note how many problems are left."""
    codec, trained = None, {source.name for source in spec.data.sources if source.train}
    if spec.warm_start is not None and spec.model.shape is not None:
        with checked.catching("warm_start"), TemporaryDirectory(prefix="runspec-") as folder:
            data = load_warm_start_data(spec)
            # Some traces are drawn as a test.
            data.traces(np.random.default_rng(spec.seed), _TRACES, "train")
            data.write_tokenizer(Path(folder))
            codec = PromptCodec.read(Path(folder), spec.data)
    elif model is None:
        checked.notes.append("the tokenizer is not on this machine: no prompt was measured")
    else:
        with checked.catching("model"):
            codec = PromptCodec.read(model, spec.data)
    if codec is not None:
        kept = {train: problem_filter(spec, codec, "train" if train else None) for train in (1, 0)}
        fitting = _read(spec, lambda source: kept[source.train], checked)
        for name, source in fitting.items():
            use = "to train on" if name in trained else "to ask"
            rows = source.summary if isinstance(source, FileSource) else f"{len(source)} {use}"
            checked.notes.append(f"source {name}: {rows}")


def _read(
    spec: RunSpec, keep: Callable[[Source], Keep], checked: Checked
) -> dict[str, ProblemSource]:
    """Return the sources that can be created and have a problem, by name."""
    found = {}
    for source in spec.data.sources:
        _log.info("source %s", source.name)
        place = f"data.sources.{source.name}"
        with checked.catching(place, source.kind):
            made = make_source(source, spec.seed, keep(source))
            if len(made):
                made.problem(0)
                found[source.name] = made
            else:
                checked.add(place, "no problem is left", "raise data.max_prompt_tokens")
    return found


def _read_verifications(
    rewards: Sequence[Reward], sources: Mapping[str, ProblemSource], checked: Checked
) -> None:
    """Report rows whose verification the reward of their type cannot read.

    Problems that a source generates are left out: their number may be very large.
    """
    kinds = {reward.kind for reward in rewards} & VERIFICATIONS.keys()
    for name, source in sources.items():
        if not isinstance(source, FileSource) or not source.task_types & kinds:
            continue
        _log.info("reading what grades the problems of %s", name)
        with checked.catching(f"data.sources.{name}"):
            found = ((row, _unreadable(p)) for row, p in source.placed() if p.task_type in kinds)
            if bad := [f"{row}: {reason[:80]}" for row, reason in found if reason]:
                more = [f"and {len(bad) - NAMED} more"] if len(bad) > NAMED else []
                named = "; ".join(bad[:NAMED] + more)
                raise UserError(
                    f"{len(bad)} of {len(source)} problems cannot be graded: {named}",
                    remedy="mend or remove these rows: they are sampled, but never trained on",
                )


def _unreadable(problem: Problem) -> str:
    """Return why a verification cannot be read; empty if it can, or the kind is no shipped one."""
    try:
        VERIFICATIONS.get(problem.task_type, dict)(problem.verification)
    except Exception as error:  # noqa: BLE001 - rows may hold anything
        return str(error) or type(error).__name__
    return ""


def _try_graders(
    spec: RunSpec, rewards: Sequence[Reward], sources: dict[str, ProblemSource], checked: Checked
) -> None:
    """Report task types without a reward, and grade trial answers to a problem of each other
    type."""
    names = {reward.kind: reward.name for reward in rewards}
    known = {reward.kind for reward in spec.reward}
    firsts: dict[str, Problem] = {}
    for name, source in sources.items():
        place = f"data.sources.{name}"
        with checked.catching(place):
            for kind in sorted(source.task_types - known):
                checked.add(place, *_ungraded(source, kind, names))
            wanted = (source.task_types & names.keys()) - firsts.keys()
            for problem in map(source.problem, range(len(source)) if wanted else ()):
                if problem.task_type in wanted and not _unreadable(problem):
                    firsts[problem.task_type] = problem
                    wanted -= {problem.task_type}
                if not wanted:
                    break
    if not firsts:
        return
    _log.info("grading trial answers of %s", ", ".join(sorted(firsts)))
    with checked.catching("reward"):
        require_graders(spec)
        played = {reward.kind for reward in rewards if find_kind(reward.kind).role != "task"}
        with closing(Graders(rewards, processes=1)) as graders:
            for kind, problem in firsts.items():
                results = (
                    [_played(graders, problem, text) for text in TRIED]
                    if kind in played
                    else graders.score([Answer(problem, text) for text in TRIED])
                )
                for answer, result in zip(TRIED, results, strict=True):
                    if isinstance(result, GraderFault):
                        checked.add(
                            f"reward.{names[kind]}",
                            f"the grader of kind {kind} fails on the answer {answer!r}: {result}",
                            "mend the reward, or the problem: such rollouts are never trained on",
                        )
                        break


def _played(graders: Graders, problem: Problem, said: str) -> Reply:
    """Return the grade of an episode of one turn, or the fault of the call that failed."""
    (reply,) = graders.play([Call(problem, "start", [0])])
    if isinstance(reply, dict):
        (reply,) = graders.play([Call(problem, "step", [reply["state"], said])])
    if isinstance(reply, dict):
        transcript = [{"role": ASSISTANT, "content": said}, *reply["messages"]]
        (reply,) = graders.play([Call(problem, "grade", [reply["state"], transcript])])
    return reply


def _ungraded(source: ProblemSource, kind: str, names: Collection[str]) -> tuple[str, str]:
    """Return message and remedy for a task type without a reward."""
    count = len(source)
    if len(source.task_types) > 1:
        count = sum(source.problem(i).task_type == kind for i in range(len(source)))
    match = close_match(kind, names)
    mapped = f"map it to one that has: task_types: {{{kind}: {match or 'KIND'}}}"
    return (
        f"task_type {kind!r} has no reward: {count} of {len(source)} problems; rewards grade "
        f"{', '.join(sorted(names)) or 'none'}",
        f"did you mean {match}? {mapped}" if match else f"add a reward, or {mapped}",
    )
