"""Workers of an unseeded pool that choose: each is caught by a named check, honest ones by none.

Every claim is as consistent as its worker can make it: log-probs and proofs are those of a prefill
of the tokens handed in by the leased version, rewards are graded honestly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.attacks.setting import rejection, take_lease
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import EOS, SmallModel, Worker, log_softmax
from verify.plugins import PrefillOutput

TEMPERATURE, LONGEST, GROUP_SIZE = 0.8, 100, 16
GREEDY = 1e-3
"""A temperature at which the likeliest token is taken."""


class Sampler(Worker):
    """An honest worker of an unseeded pool; attacks change how it chooses, not what it claims."""

    temperature = TEMPERATURE

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        return self.sampled(prompt, np.random.default_rng(key[0] % 2**32))

    def sampled(self, prompt: list[int], rng: np.random.Generator) -> list[int]:
        state, tokens = self.model.read(prompt), []
        while len(tokens) < LONGEST and (not tokens or tokens[-1] != EOS):
            logprobs = self.seen(log_softmax(self.model.output(state)[1] / self.temperature))
            tokens.append(int(np.argmax(logprobs + rng.gumbel(size=logprobs.shape))))
            state = self.model.step(state, tokens[-1])
        return tokens

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        """The log-probs that are sampled from."""
        return logprobs

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        return Worker(self.key, MODEL, self.spec, self.task_set).explain(prompt, tokens)


class TopK(Sampler):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(logprobs >= np.sort(logprobs)[-6], logprobs, -np.inf)


class BestOf16(Sampler):
    """Hands in the most probable of sixteen samples, a token."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        rng = np.random.default_rng(key[0] % 2**32)
        tries = [self.sampled(prompt, rng) for _ in range(16)]
        return max(tries, key=lambda tokens: self.explain(prompt, tokens).logprobs.mean())


class Truncates(Sampler):
    """Saves tokens: ends every output at once."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        return [*tokens[: min(1, len(tokens) - 1)], EOS]


class Pads(Sampler):
    """Goes on to the longest output: the end token is never taken."""

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(logprobs)) == EOS, -np.inf, logprobs)


class AnotherModel(Sampler):
    """Text of a model of its own, which it serves for less."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        other = SmallModel.random(seed=9)
        return Sampler(self.key, other, self.spec, self.task_set).sample(prompt, key)


def bench_of(directory: Path, **sampling: object) -> Bench:
    """Two groups of sixteen, sampled without a seed."""
    chosen = {"temperature": TEMPERATURE, "seeded": False, **sampling}
    bench = Bench(directory, trust="trusted", max_new_tokens=LONGEST, sampling=chosen)
    take_lease(bench, 2)
    algorithm = bench.spec.algorithm.model_copy(update={"group_size": GROUP_SIZE})
    bench.spec = bench.spec.model_copy(update={"algorithm": algorithm})
    return bench


def worker_of(bench: Bench, kind: type[Sampler], temperature: float = TEMPERATURE) -> Worker:
    worker = kind(bench.worker_key, MODEL, bench.spec, bench.task_set)
    worker.temperature = temperature
    return worker


class TestUnseededChoices:
    """Greedy, other temperatures, top-k, best of n, another model, ends too soon or too late."""

    def test_honest_workers_pass(self, tmp_path: Path) -> None:
        bench = bench_of(tmp_path)
        for index in range(3):
            take_lease(bench, index)
            verdict = bench.verdict(bench.rollouts_of(worker_of(bench, Sampler)))
            assert verdict.accepted, verdict.reason
            assert [check.name for check in verdict.rows[0].checks][-7:] == [
                "kept_tokens",
                "ends_submission",
                "ends",
                "chosen_tokens_submission",
                "chosen_tokens",
                "toploc",
                "duplicates",
            ]

    @pytest.mark.parametrize(
        ("attack", "check", "words"),
        [
            (GREEDY, "chosen_tokens_submission", "nothing below 1 of the largest probability"),
            (TEMPERATURE / 2, "chosen_tokens_submission", "temperature / 1.5"),
            (TEMPERATURE * 2, "chosen_tokens_submission", "temperature / 0.5"),
            (TopK, "chosen_tokens_submission", "temperature / 1.25"),
            (BestOf16, "chosen_tokens_submission", "temperature / 1."),
            (AnotherModel, "ends_submission", "ends anywhere"),
            (Truncates, "ends_submission", "ends anywhere, 0.01 a token"),
            (Pads, "ends_submission", "odds of the end token times 0.0"),
        ],
    )
    def test_a_choice_that_is_not_the_policys(
        self, tmp_path: Path, attack: type[Sampler] | float, check: str, words: str
    ) -> None:
        bench = bench_of(tmp_path)
        how = (Sampler, attack) if isinstance(attack, float) else (attack,)
        found = rejection(bench, bench.rollouts_of(worker_of(bench, *how)))
        assert (found.check, found.row, words in found.words) == (check, 0, True)
        assert found.value > found.limit

    def test_a_single_row_is_looked_at_alone(self, tmp_path: Path) -> None:
        bench = bench_of(tmp_path)
        honest = bench.rollouts_of(worker_of(bench, Sampler))
        greedy = bench.rollouts_of(worker_of(bench, Sampler, GREEDY))
        row = max(range(len(greedy)), key=lambda n: len(greedy[n].output_tokens))
        reason = bench.verdict([*honest[:row], greedy[row], *honest[row + 1 :]]).reason
        assert reason.startswith(f"chosen_tokens: row {row}: ")

    def test_tokens_that_the_pool_cuts_off(self, tmp_path: Path) -> None:
        bench = bench_of(tmp_path, top_k=5)
        reason = bench.verdict(bench.rollouts_of(worker_of(bench, Sampler))).reason
        assert reason.startswith("kept_tokens: row ") and "lies below those that top-k" in reason


class Repeats(Sampler):
    """Hands in one sample of a prompt again and again, with one other token at the end."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        once = super().sample(prompt, (sum(prompt), 0))
        return [*once[:-2], 1 + key[0] % 40, once[-1]]


class TestDuplicateRows:
    """One sample handed in as many, or another worker's as one's own."""

    def test_one_sample_handed_in_twice(self, tmp_path: Path) -> None:
        bench = bench_of(tmp_path)
        bench.prefill = False  # else the edited tokens are seen too
        rows = bench.rollouts_of(worker_of(bench, Repeats))
        reason = bench.verdict(rows).reason
        assert reason.startswith("duplicates: row ") and "a run of tokens of row " in reason
