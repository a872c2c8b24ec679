"""Task of a run: problems of the spec's sources, prompts by its tokenizer, rewards by its terms."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import get_args

from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.schema import Evaluation, RunSpec
from runspec.core.schema.source_files import data_digest, redirected
from sampler.tasks.environment import REPLAY_SHARE, Call, Message
from sampler.tasks.episodes import Episode, Played, as_result
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import (
    Answer,
    Keep,
    Part,
    ProblemSource,
    Reply,
    Result,
    Score,
    find_kind,
    make_source,
    make_term,
)
from sampler.tasks.launch import require_graders
from sampler.tasks.prompts import PromptCodec
from verify.plugins import Graded, GradeItem, GraderFault, Problem, Split

_HELD_OUT_ONE_IN = 10
_CACHED_PROBLEMS = 256


def split_of(problem: str) -> Split:
    """Return the split of a problem: a tenth, by a hash of the text, is held out from training.

    Case is ignored, because a tokenizer may map `Lent` and `lent` to the same tokens.
    """
    word = int.from_bytes(hash_parts("split", problem.lower())[:8], "big")
    return "held_out" if word % _HELD_OUT_ONE_IN == 0 else "train"


def target_lengths(spec: RunSpec) -> list[int]:
    """Return the lengths that prompts of the run ask for, in tokens."""
    return [target for reward in spec.reward for target in reward.targets or []]


class InSplit(Keep):
    """Accepts the problems of a split, of any length."""

    known = ("train", "held_out")

    def __init__(self, split: Split) -> None:
        self.wanted = split
        self.digest = hash_parts("keep", split).hex()

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """Return the split of each problem."""
        return [split_of(problem) for problem in problems]


class Fitting(Keep):
    """Accepts the problems of a split whose prompts fit with every target length.

    Args:
        codec: renders and encodes prompts.
        targets: lengths that prompts may ask for; empty if they ask for none.
        limit: longest prompt, in tokens.
        split: None accepts both splits.
    """

    known = get_args(Part)

    def __init__(
        self, codec: PromptCodec, targets: Sequence[int], limit: int, split: Split | None
    ) -> None:
        self._codec = codec
        self._targets: list[int | None] = [*targets] or [None]
        self._limit = limit
        self._split = split
        self.wanted = split or "train"
        parts = ("keep", split or "", limit, codec.digest, *targets)
        self.digest = hash_parts(*parts).hex()
        """Digest of everything that the answers depend on."""

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """Return the part of each problem; encodes one batch for each target."""
        found: list[Part] = [split_of(text) if self._split else "train" for text in problems]
        for target in self._targets:
            left = [i for i, part in enumerate(found) if part != "over_long"]
            lengths = self._codec.prompt_lengths([problems[i] for i in left], target)
            for i, length in zip(left, lengths, strict=True):
                if length > self._limit:
                    found[i] = "over_long"
        return found


def problem_filter(spec: RunSpec, codec: PromptCodec, split: Split | None) -> Fitting:
    """Return the filter for problems of a split (None: of both) whose prompts fit.

    In a run that holds none out, both splits are all problems.
    """
    of_split = split if spec.holds_out else None
    return Fitting(codec, target_lengths(spec), spec.data.max_prompt_tokens, of_split)


class Problems:
    """The problems of some sources under one index, those of the first source first.

    Args:
        spec: names the sources.
        keep: decides which problems belong to the run.
        data_dir: holds the files of all sources; None if they are at their `uri`.
        only: name of the one source to take; None: all that the run trains on.
        task_type: that of all problems; None: as their sources say.
    """

    def __init__(
        self,
        spec: RunSpec,
        keep: Keep,
        data_dir: Path | None = None,
        *,
        only: str | None = None,
        task_type: str | None = None,
    ) -> None:
        self._sources: list[ProblemSource] = [
            make_source(redirected(source, data_dir), spec.seed, keep)
            for source in spec.data.sources
            if (source.train if only is None else source.name == only)
        ]
        self._ends = list(accumulate(len(source) for source in self._sources))
        types = [source.task_types for source in self._sources]
        self.task_types = frozenset().union(*types if task_type is None else [{task_type}])
        self._task_type = task_type
        self.problem = lru_cache(_CACHED_PROBLEMS)(self._problem)

    def __len__(self) -> int:
        return self._ends[-1]

    def _problem(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        found = self._sources[which].problem(index - start)
        return found if self._task_type is None else replace(found, task_type=self._task_type)


_UNANSWERED = {
    "required": "no </think> with an answer and the end token after it",
    "optional": "no end token",
    "none": "no end token",
}


class RunTask:
    """Implements `verify.plugins.TaskSet`."""

    def __init__(
        self,
        spec: RunSpec,
        codec: PromptCodec,
        problems: Problems,
        digest: str = "",
        *,
        replays: bool = False,
    ) -> None:
        self.data_digest = digest
        self.eos_token_id = codec.eos_token_id
        self.targets = target_lengths(spec)
        self._codec = codec
        self._problems = problems
        terms = map(make_term, spec.reward)
        self._length_term = next((term for term in terms if term.role == "length"), None)
        self._graders = Graders(spec.reward, share=REPLAY_SHARE if replays else 1.0)
        self._played = {
            reward.kind: Played(kind, codec.bridge(kind.tools))
            for reward in spec.reward
            if (kind := find_kind(reward.kind)).role == "environment"
        }
        self._opened = lru_cache(_CACHED_PROBLEMS)(self._open)
        if ungraded := problems.task_types - self._graders.rules.keys():
            raise UserError(
                f"problems of type {', '.join(sorted(ungraded))} have no reward term of that kind",
                place="reward",
                remedy="add the term, or leave their source out",
            )

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        return self._problems.problem(index)

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        problem = self.problem(index)
        if (played := self._played.get(problem.task_type)) is None:
            return self._codec.prompt_tokens(problem.prompt, target)
        opened, tools = self._opened(index, seed), played.kind.tools
        # A start that fails is reported by the episode; both sides put the problem as it is.
        asked = [Message(role="user", content=problem.prompt)]
        *before, last = opened["messages"] if isinstance(opened, dict) else asked
        return self._codec.prompt_tokens(last["content"], target, before=before, tools=tools)

    def episode(self, index: int, seed: int) -> Episode | None:
        problem = self.problem(index)
        if (played := self._played.get(problem.task_type)) is None:
            return None
        opened, codec = self._opened(index, seed), self._codec
        return Episode(
            *(problem, opened, played, self._graders), said=codec.said, end_token=self.eos_token_id
        )

    def _open(self, index: int, seed: int) -> Reply:
        calls = [Call(self.problem(index), "start", [seed])]
        reply = self._graders.play(calls)[0]
        # A single failure may have a local cause.
        return reply if isinstance(reply, dict) else self._graders.play(calls)[0]

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        """Grade outputs: R = T + P, with T of the answer, or of the episode, and P of the length of
        all output tokens, the ends included."""
        problems = [self.problem(item.problem) for item in items]
        texts = [
            item.episode.last_words
            if isinstance(item.episode, Episode)
            else self._codec.answer(item.output_tokens)
            for item in items
        ]
        results: list[Result] = [Score(0.0, _UNANSWERED[self._codec.thinking])] * len(items)
        answered = [i for i, t in enumerate(texts) if t is not None and items[i].episode is None]
        scored = self._graders.score([Answer(problems[i], str(texts[i])) for i in answered])
        for index, result in zip(answered, scored, strict=True):
            results[index] = result
        episodes = {i: e for i, item in enumerate(items) if isinstance(e := item.episode, Episode)}
        results_of = self._graders.play([episode.call() for episode in episodes.values()])
        for (index, episode), reply in zip(episodes.items(), results_of, strict=True):
            results[index] = episode.fault or as_result(problems[index], reply)
        return [
            result if isinstance(result, GraderFault) else self._graded(item, problem, result, text)
            for item, problem, result, text in zip(items, problems, results, texts, strict=True)
        ]

    def answer(self, output_tokens: Sequence[int]) -> str | None:
        """Return the text of an output's answer; None if it gives none."""
        return self._codec.answer(output_tokens)

    def text(self, output_tokens: Sequence[int]) -> str:
        """Return the whole text of an output, special tokens included."""
        return self._codec.decode(output_tokens)

    def close(self) -> None:
        """End the grader processes."""
        self._graders.close()

    def _graded(
        self, item: GradeItem, problem: Problem, score: Score, answer: str | None
    ) -> Graded | GraderFault:
        """Return the reward of an output with its length penalty."""
        penalty = 0.0
        if self._length_term is not None and item.target is not None:
            penalty = self._length_term.penalty(score.value, item.target, len(item.output_tokens))
        if not math.isfinite(penalty):
            return GraderFault(f"{problem.problem_id}: length penalty {penalty}")
        wrong = score.value <= 0 and not score.reason
        return Graded(
            score.value,
            penalty,
            score.value + penalty,
            reason=f"answered {(answer or '')[:80]!r}" if wrong else score.reason,
            answered=answer is not None,
            repeatable=self._graders.rules[problem.task_type].repeatable,
        )


def build_task_set(
    spec: RunSpec, tokenizer_dir: Path, data_dir: Path | None = None, *, replays: bool = False
) -> RunTask:
    """Return the run's task; see `verify.plugins.load_task_set`.

    Raises:
        UserError: no installed package offers a kind, a source cannot be read, the directory has no
            tokenizer, or a reward needs a sandbox and none works.
    """
    require_graders(spec)
    codec = PromptCodec.read(tokenizer_dir, spec.data)
    problems = Problems(spec, problem_filter(spec, codec, "train"), data_dir)
    return RunTask(spec, codec, problems, data_digest(spec, data_dir), replays=replays)


def build_evaluation_set(
    spec: RunSpec, evaluation: Evaluation, tokenizer_dir: Path, data_dir: Path | None = None
) -> RunTask:
    """Return the problems of an evaluation: none of them is trained on.

    Raises:
        UserError: as `build_task_set`.
        RunStopped: there is no problem.
    """
    require_graders(spec)
    codec = PromptCodec.read(tokenizer_dir, spec.data)
    asked_only = {source.name for source in spec.data.sources if not source.train}
    split: Split | None = None if evaluation.source in asked_only else "held_out"
    keep = problem_filter(spec, codec, split)
    kinds = {term.name: term.kind for term in spec.reward}
    grader = None if evaluation.grader is None else kinds[evaluation.grader]
    problems = Problems(spec, keep, data_dir, only=evaluation.source, task_type=grader)
    if not len(problems):
        raise RunStopped(
            f"{evaluation.source or 'no source'} has no problem for it",
            place=f"evaluations.{evaluation.name}",
            remedy="name a larger source, or one with `train: false`",
        )
    return RunTask(spec, codec, problems, data_digest(spec, data_dir))
