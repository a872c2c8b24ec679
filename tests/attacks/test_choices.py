"""Who samples otherwise than the spec says, or picks what it likes best, in a seeded pool.

Log-probs and proofs are those of a prefill by the leased version, rewards are graded honestly.
Pools that are not seeded: `test_unseeded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.attacks.setting import PRECISIONS, Decision, like, rejection, take_lease
from tests.verify.bench import Bench
from tests.verify.small_model import EOS, Worker, log_softmax, token_noise
from verify.formats.lease import assignments
from verify.formats.submission import Rollout
from verify.plugins import GradeItem
from verify.truncation import Truncation, thresholds


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, run_of: Callable[..., Bench]) -> Bench:
    return run_of(request.param)


class Samples(Worker):
    """Adds the leased noise to what it makes of the log-probs."""

    temperature = 0.8

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        state, tokens = self.model.read(prompt), []
        while len(tokens) < 40 and (not tokens or tokens[-1] != EOS):
            logprobs = log_softmax(self.model.output(state)[1] / np.float32(self.temperature))
            tokens.append(int(np.argmax(self.seen(logprobs) + token_noise(key, len(tokens)))))
            state = self.model.step(state, tokens[-1])
        return tokens

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        """The log-probs that are sampled from."""
        return logprobs


def rejected(bench: Bench, attack: type[Worker], **changes: float) -> Decision:
    worker = like(bench, attack)
    vars(worker).update(changes)
    found = rejection(bench, bench.rollouts_of(worker))
    assert found.check == "seeded_sampling"
    assert found.value > found.limit
    return found


class TestHonestNoise:
    """The sampler that the attacks below are made from passes as it is."""

    def test_passes(self, bench: Bench) -> None:
        verdict = bench.verdict(bench.rollouts_of(like(bench, Samples)))
        assert verdict.accepted, verdict.reason


class TestGreedy:
    """Takes the likeliest token, which raises rewards and takes no noise."""

    def test_it_is_rejected(self, bench: Bench) -> None:
        assert rejected(bench, Samples, temperature=1e-6).value >= 0.5


class TestOtherTemperature:
    """Half and twice the temperature of the spec, with the leased noise."""

    @pytest.mark.parametrize("temperature", [0.4, 1.6])
    def test_it_is_rejected(self, bench: Bench, temperature: float) -> None:
        assert rejected(bench, Samples, temperature=temperature).value >= 0.2


class TopFive(Samples):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(logprobs >= np.sort(logprobs)[-5], logprobs, -np.inf)


class TestTopK:
    """Samples from the five likeliest tokens where the spec keeps all."""

    def test_it_is_rejected(self, bench: Bench) -> None:
        assert rejected(bench, TopFive).value >= 0.2


class HalfTheMass(Samples):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        order = np.argsort(-logprobs)
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        kept = np.zeros(len(logprobs), bool)
        kept[order[before < 0.5]] = True
        return np.where(kept, logprobs, -np.inf)


class TestTopP:
    """Samples from the likeliest half of the mass where the spec keeps all."""

    def test_it_is_rejected(self, bench: Bench) -> None:
        assert rejected(bench, HalfTheMass).value >= 0.2


class BestOfEight(Worker):
    """Draws eight outputs, the leased one among them, and hands in the one with most reward."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tries = [super(BestOfEight, self).sample(prompt, (key[0] ^ n, key[1])) for n in range(8)]
        items = [GradeItem(0, prompt[-1], tokens) for tokens in tries]
        rewards = [graded.task_reward for graded in self.task_set.grade_all(items)]
        return tries[int(np.argmax(rewards))]


class SwapsSamples(Worker):
    """Of the four leased samples of a group, hands in the best one as every one of them."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        return super().sample(prompt, (sum(prompt), 0))


class TestBestOfN:
    """Cherry-picking among honest samples: every sample has noise of its own."""

    def test_the_best_of_eight(self, bench: Bench) -> None:
        # given a worker that gains by it
        attack = like(bench, BestOfEight)
        rows, honest = bench.rollouts_of(attack), bench.honest()
        gain = np.mean([r.task_reward for r in rows]) - np.mean([r.task_reward for r in honest])
        assert gain >= 0.1
        found = rejection(bench, rows)
        assert found.check == "seeded_sampling" and found.value >= 0.5

    def test_a_sample_in_the_place_of_another(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, SwapsSamples)))
        assert found.check == "seeded_sampling" and found.value >= 0.5


class Branches(Worker):
    """Where the two best tokens are near each other also goes on from the second, once a rollout,
    and hands in what has most reward."""

    near = 0.05
    """Nats."""
    found: list[int]
    """Of each rollout, how many others there were."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        leased, ties = self._follow(prompt, key, [])
        tries = [leased, *(self._follow(prompt, key, begun)[0] for begun in ties)]
        self.found = [*getattr(self, "found", []), len(ties)]
        items = [GradeItem(0, prompt[-1], tokens) for tokens in tries]
        rewards = [graded.task_reward for graded in self.task_set.grade_all(items)]
        return tries[int(np.argmax(rewards))]

    def _follow(
        self, prompt: list[int], key: tuple[int, int], begun: list[int]
    ) -> tuple[list[int], list[list[int]]]:
        """The leased sample after some tokens, and where it might have gone another way."""
        tokens, ties = list(begun), []
        state = self.model.read([*prompt, *tokens])
        while len(tokens) < 40 and (not tokens or tokens[-1] != EOS):
            scaled = self.model.output(state)[1] / np.float32(0.8)
            noisy = scaled + token_noise(key, len(tokens))
            second, first = np.argsort(noisy)[-2:].tolist()
            if noisy[first] - noisy[second] < self.near:
                ties.append([*tokens, second])
            tokens.append(first)
            state = self.model.step(state, first)
        return tokens, ties


class TestBranching:
    """Chooses where rounding might have chosen: not closed (docs/attacks.md), bounded by how often
    the two best tokens are so near."""

    LEASES = 4

    def all_of(self, bench: Bench, near: float) -> tuple[list[str], float, float, float]:
        """Why submissions are rejected, others to choose from for each token, gain in task reward
        and the share of rollouts that are not the leased ones."""
        attack = like(bench, Branches)
        attack.near, reasons, gain, others, tokens = near, [], [], [], 0
        for index in range(self.LEASES):
            take_lease(bench, index)
            honest, rows = bench.honest(), bench.rollouts_of(attack)
            reasons.append(bench.verdict(rows).reason)
            for one, other in zip(honest, rows, strict=True):
                gain.append(other.task_reward - one.task_reward)
                others.append(not np.array_equal(one.output_tokens, other.output_tokens))
                tokens += len(one.output_tokens)
        share = sum(attack.found) / tokens
        return [r for r in reasons if r], share, float(np.mean(gain)), float(np.mean(others))

    def test_within_rounding_it_is_not_seen(self, run_of: Callable[..., Bench]) -> None:
        rejections, share, gain, others = self.all_of(run_of("bfloat16"), 0.05)
        assert rejections == []
        assert share > 0.02 and gain > 0.005 and others > 0.1

    def test_beyond_rounding_it_is_rejected(self, bench: Bench) -> None:
        rejections, _, _, _ = self.all_of(bench, 0.5)
        assert len(rejections) == self.LEASES
        assert all(reason.startswith("seeded_sampling") for reason in rejections)


def choosing(bench: Bench, *, problem: int | None = None, target: int | None = None) -> list:
    """Rows of group 0 sampled of another problem or target than assigned, and graded for it."""
    lease, worker = bench.lease, bench.worker
    given = assignments(lease, n_problems=len(bench.task_set), targets=bench.task_set.targets)
    first = replace(
        given[0],
        problem=given[0].problem if problem is None else problem,
        target=given[0].target if target is None else target,
    )
    digest = bench.honest()[0].lease
    return [
        worker._rollout(lease, digest, task, n) for task in [first, *given[1:]] for n in range(4)
    ]


class TestChosenProblems:
    """Samples the problems that it answers best."""

    def test_another_problem_than_assigned(self, bench: Bench) -> None:
        other = (int(bench.honest()[0].problem_id.split("-")[1]) + 1) % len(bench.task_set)
        found = rejection(bench, choosing(bench, problem=other))
        assert (found.check, found.row) == ("assignment", 0)
        assert "problem_id is 'parity-" in found.words and found.value == 2  # and its prompt

    def test_under_the_assigned_problems_name(self, bench: Bench) -> None:
        rows = choosing(bench, problem=3)
        name = bench.honest()[0].problem_id
        found = rejection(bench, [replace(r, problem_id=name) for r in rows[:4]] + rows[4:])
        assert "the prompt is not the assigned problem's" in found.words

    def test_groups_that_were_hard_are_left_out(self, bench: Bench) -> None:
        found = rejection(bench, bench.honest()[:4])
        assert found.check == "assignment" and "4 rows, the lease asks for 8" in found.words


class TestChosenTargets:
    """Asks itself for the length that it likes."""

    @staticmethod
    def other(rows: list[Rollout]) -> int:
        return 24 if rows[0].target == 8 else 8

    def test_another_length_than_assigned(self, bench: Bench) -> None:
        found = rejection(bench, choosing(bench, target=self.other(bench.honest())))
        assert (found.check, found.row) == ("assignment", 0)
        assert "target is " in found.words and found.value == 2  # and the prompt that names it


# --- Pools that cut -------------------------------------------------------------------------------

TRUNCATED = [
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 10},
]


def sampling_like(worker: Worker, **changes: object) -> Worker:
    """An honest worker of a pool whose sampling differs."""
    pool = worker.spec.samplers[0]
    other = pool.model_copy(update={"sampling": pool.sampling.model_copy(update=changes)})
    spec = worker.spec.model_copy(update={"samplers": [other]})
    return Worker(worker.key, worker.model, spec, worker.task_set)


class IgnoresTheCut(Worker):
    """Samples from the whole distribution, where the spec keeps a part."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        return sampling_like(self, top_p=1.0, top_k=-1).sample(prompt, key)


class OneTokenOutside(Worker):
    """Replaces one token by the least likely one, which nobody keeps."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            _, logits = self.model.output(self.model.read([*prompt, *tokens[:2]]))
            tokens[2] = int(np.argmin(logits[1:])) + 1
        return tokens


class LeavesOutTheLast(Worker):
    """Samples from all that the spec keeps but the least likely of it: top-k 3 for top-k 4."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        sampling = self.spec.samplers[0].sampling
        state, tokens = self.model.read(prompt), []
        while len(tokens) < 40 and (not tokens or tokens[-1] != EOS):
            scaled = self.model.output(state)[1] / np.float32(sampling.temperature)
            rule = Truncation(sampling.top_p, sampling.top_k)
            kept = scaled[scaled >= thresholds(np, scaled, rule).kept]
            kept = scaled >= np.sort(kept)[:2][-1]
            noisy = np.where(kept, scaled + token_noise(key, len(tokens)), -np.inf)
            tokens.append(int(np.argmax(noisy)))
            state = self.model.step(state, tokens[-1])
        return tokens


@pytest.mark.parametrize("precision", PRECISIONS)
class TestAnotherCut:
    """Other tokens than the spec's top-k and top-p keep."""

    @pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
    def test_honest_rounding_at_the_edge_passes(
        self, run_of: Callable[..., Bench], precision: str, sampling: dict[str, float]
    ) -> None:
        """Every bf16 logit is a little off, so some sampled token is outside our own set."""
        bench = run_of(precision, sampling=sampling)
        for index in range(4):
            take_lease(bench, index)
            verdict = bench.verdict(bench.honest())
            assert verdict.accepted, verdict.reason

    @pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
    @pytest.mark.parametrize("attack", [IgnoresTheCut, OneTokenOutside, LeavesOutTheLast])
    def test_tokens_that_are_not_kept(
        self,
        run_of: Callable[..., Bench],
        precision: str,
        sampling: dict[str, float],
        attack: type[Worker],
    ) -> None:
        rejected(run_of(precision, sampling=sampling), attack)
