"""A task of several turns, and a worker that plays it; `bench.py` judges what it hands in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.verify.bench import Bench
from tests.verify.small_model import EOS, VOCAB, ParityTask, Worker, token_noise
from verify.formats.lease import Assignment, Lease, episode_seed
from verify.formats.submission import Rollout
from verify.formats.turns import gaps, joined
from verify.noise import noise_key
from verify.plugins import Episode, GradeItem, GraderFault
from verify.toploc import build_proofs

OBSERVED = [3, 5]


@dataclass
class Count:
    """Answers with the seed's parity and how many even tokens it has seen; ends after `most` turns,
    or when a turn begins with 7."""

    seed: int
    most: int = 3
    per_turn: int = 6
    breaks_at: int | None = None
    fault: GraderFault | None = None
    seen: int = 0

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        if len(turns) == 1:
            self.seen, self.fault = 0, None
        if self.breaks_at == len(turns):
            self.fault = GraderFault("environment.py:7 hangs")
            return None
        self.seen += sum(token % 2 == 0 for token in turns[-1])
        over = len(turns) >= self.most or turns[-1][0] == 7
        return None if over else [*OBSERVED, 1 + self.seed % 9, 1 + self.seen % (VOCAB - 1)]


@dataclass
class CountTask(ParityTask):
    """Parity over several turns, with the seed in the prompt. The environment fails at turn
    `breaks_at`, or at its start if that is 0."""

    breaks_at: int | None = None

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        opening = [] if self.breaks_at == 0 else [1 + seed % (VOCAB - 1)]
        return [*super().prompt_tokens(index, target), *opening]

    def episode(self, index: int, seed: int) -> Episode | None:
        fault = GraderFault("environment.py:3 hangs") if self.breaks_at == 0 else None
        return Count(seed, breaks_at=self.breaks_at, fault=fault)

    def _grade(self, item: GradeItem):
        fault = None if item.episode is None else item.episode.fault
        return fault or super()._grade(item)


class TurnsWorker(Worker):
    """Plays episodes honestly."""

    def _rollout(self, lease: Lease, digest: str, task: Assignment, sample: int) -> Rollout:
        pool, row = self.spec.samplers[0], super()._rollout(lease, digest, task, sample)
        key, prompt = noise_key(lease.seed, task.group, sample), row.prompt_tokens.tolist()
        episode = self.task_set.episode(task.problem, episode_seed(lease, task.group))
        assert episode is not None
        turns: list[list[int]] = []
        between: list[list[int]] = []
        text, own = list(prompt), 0
        while True:
            room = min(episode.per_turn, pool.max_new_tokens - own, pool.max_model_len - len(text))
            if room <= 0:
                between.pop()
                break
            turns.append(self.turn(text, key, own, room))
            text, own = text + turns[-1], own + len(turns[-1])
            following = episode.follow(turns)
            if following is None:
                break
            between.append(following)
            text += following
        output = np.array([token for turn in turns for token in turn], np.int32)
        lengths = np.array([len(turn) for turn in turns], np.int32)
        return explained(self, replace(row, output_tokens=output, turns=lengths), between, episode)

    def turn(self, text: list[int], key: tuple[int, int], first: int, room: int) -> list[int]:
        state, tokens = self.model.read(text), []
        while len(tokens) < room and (not tokens or tokens[-1] != EOS):
            _, logits = self.model.output(state)
            scaled = logits / np.float32(self.spec.samplers[0].sampling.temperature)
            tokens.append(int(np.argmax(scaled + token_noise(key, first + len(tokens)))))
            state = self.model.step(state, tokens[-1])
        return tokens


def explained(worker: Worker, row: Rollout, between: list[list[int]], episode: Episode) -> Rollout:
    """The row with the claims that an honest computation of its tokens gives."""
    whole = joined(row.output_tokens, row.turns, *gaps(between))
    tokens = whole.tokens
    found = worker.explain(row.prompt_tokens.tolist(), tokens.tolist())
    own = np.ones(len(tokens), bool) if whole.own is None else whole.own
    graded = worker.task_set._grade(
        GradeItem(
            int(row.problem_id.split("-")[1]), row.target, row.output_tokens.tolist(), episode
        )
    )
    rewards = (0.0, 0.0)
    if not isinstance(graded, GraderFault):
        rewards = (graded.task_reward, graded.length_penalty)
    return replace(
        row,
        logprobs=found.logprobs[own],
        proofs=build_proofs(found.hidden[own]),
        finish_reason="stop" if row.output_tokens[-1] == EOS else "length",
        task_reward=rewards[0],
        length_penalty=rewards[1],
    )


class TurnsBench(Bench):
    def __init__(self, directory: Path, task: CountTask | None = None, **pool: object) -> None:
        super().__init__(directory, task or CountTask(), **pool)
        self.worker = TurnsWorker(self.worker_key, self.worker.model, self.spec, self.task_set)
