"""Samples that are not what the leased version samples with the leased noise: of a smaller model,
edited, cut, padded, chosen; in a seeded pool and in one that is not.

Every claim is as consistent as its worker can make it: but where a test says so, log-probs and
proofs are those of a prefill of the tokens handed in by the leased version, rewards are graded
honestly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attacks.conftest import (
    PRECISIONS,
    Decision,
    behind_honest_claims,
    like,
    rejection,
    take_lease,
)
from tests.verify.bench import MODEL, Bench, lease_for
from tests.verify.profiles import document, made_profile, with_profile
from tests.verify.small_model import EOS, VOCAB, SmallModel, Worker, log_softmax, token_noise
from verify.formats.lease import assignments
from verify.plugins import GradeItem, PrefillOutput
from verify.thresholds import limits_for
from verify.truncation import Truncation, thresholds

pytestmark = pytest.mark.slow

TEMPERATURE, LONGEST = 0.8, 40


@pytest.fixture(params=PRECISIONS)
def bench(request: pytest.FixtureRequest, run_of: Callable[..., Bench]) -> Bench:
    return run_of(request.param)


class Samples(Worker):
    """Adds the leased noise to what it makes of the log-probs."""

    temperature, longest = TEMPERATURE, LONGEST

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        state, tokens, noise = self.model.read(prompt), list[int](), self.noise(key)
        while len(tokens) < self.longest and (not tokens or tokens[-1] != EOS):
            logprobs = log_softmax(self.model.output(state)[1] / np.float32(self.temperature))
            tokens.append(int(np.argmax(self.seen(logprobs) + noise(len(tokens)))))
            state = self.model.step(state, tokens[-1])
        return tokens

    def noise(self, key: tuple[int, int]) -> Callable[[int], np.ndarray]:
        return lambda place: token_noise(key, place)

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        """The log-probs that are sampled from."""
        return logprobs

    def best(self, prompt: list[int], tries: list[list[int]]) -> list[int]:
        """The one with most task reward."""
        items = [GradeItem(0, prompt[-1], tokens) for tokens in tries]
        rewards = [graded.task_reward for graded in self.task_set.grade_all(items)]
        return tries[int(np.argmax(rewards))]


class TopFive(Samples):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(logprobs >= np.sort(logprobs)[-5], logprobs, -np.inf)


class HalfTheMass(Samples):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        order = np.argsort(-logprobs)
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        kept = np.zeros(len(logprobs), bool)
        kept[order[before < 0.5]] = True
        return np.where(kept, logprobs, -np.inf)


class NeverEnds(Samples):
    """Goes on to the longest output: the end token is never taken."""

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(logprobs)) == EOS, -np.inf, logprobs)


class EndsEarly(Samples):
    """Cuts an output after a few tokens, with an end token."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        return tokens if len(tokens) < 6 else [*tokens[:4], EOS]


class EditsTokens(Samples):
    """Replaces one token in the middle by another."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            tokens[len(tokens) // 2] = 1 + tokens[len(tokens) // 2] % (VOCAB - 1)
        return tokens


class EditsTokensOnly(EditsTokens):
    """Claims what was computed before the edit."""

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        before = list(tokens)
        if len(tokens) > 4:
            before[len(tokens) // 2] = 1 + (tokens[len(tokens) // 2] - 2) % (VOCAB - 1)
        return super().explain(prompt, before)


class EditsLastToken(Samples):
    """Where an output ended at the longest, its last token is exchanged."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        return tokens if tokens[-1] == EOS else [*tokens[:-1], 1 + tokens[-1] % (VOCAB - 1)]


class BestOfEight(Samples):
    """Draws eight outputs, the leased one among them, and hands in the one with most reward."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tries = [super(BestOfEight, self).sample(prompt, (key[0] ^ n, key[1])) for n in range(8)]
        return self.best(prompt, tries)


class SwapsSamples(Samples):
    """Of the leased samples of a group, hands in one as every one of them."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        return super().sample(prompt, (sum(prompt), 0))


def rejected(bench: Bench, attack: type[Worker], least: float, **changes: float) -> Decision:
    """By the seeded choice, and by how much."""
    worker = like(bench, attack)
    vars(worker).update(changes)
    found = rejection(bench, bench.rollouts_of(worker))
    assert found.check == "seeded_sampling" and found.value >= max(least, found.limit)
    return found


class TestSeededChoice:
    """Other tokens than the leased version takes with the leased noise."""

    def test_the_sampler_that_attacks_are_made_from_passes(self, bench: Bench) -> None:
        verdict = bench.verdict(bench.rollouts_of(like(bench, Samples)))
        assert verdict.accepted, verdict.reason

    @pytest.mark.parametrize(
        ("attack", "least", "temperature"),
        [
            (EditsTokens, 0.5, TEMPERATURE),
            (EndsEarly, 0.5, TEMPERATURE),
            (NeverEnds, 0.0, TEMPERATURE),
            (Samples, 0.5, 1e-6),  # greedy
            (Samples, 0.2, TEMPERATURE / 2),
            (Samples, 0.2, TEMPERATURE * 2),
            (TopFive, 0.2, TEMPERATURE),
            (HalfTheMass, 0.2, TEMPERATURE),
            (BestOfEight, 0.5, TEMPERATURE),
            (SwapsSamples, 0.5, TEMPERATURE),
        ],
    )
    def test_it_is_rejected(
        self, bench: Bench, attack: type[Worker], least: float, temperature: float
    ) -> None:
        rejected(bench, attack, least, temperature=temperature)


class TestLoosestDevices:
    """Devices that a worker only says it has: of none are the limits above the published ones."""

    @pytest.mark.parametrize("devices", ["cpu-b x 2", "cpu-c x 1"])
    @pytest.mark.parametrize(
        ("attack", "temperature"),
        [(EditsTokens, TEMPERATURE), (Samples, TEMPERATURE / 2), (TopFive, TEMPERATURE)],
    )
    def test_it_is_rejected_by_their_limits(
        self, bench: Bench, attack: type[Worker], temperature: float, devices: str
    ) -> None:
        # given limits that were measured for the pool's own devices, and looser ones of another
        precision = bench.spec.samplers[0].dtype
        published = limits_for(precision, "float32")
        sides = {"precision": precision}, {"precision": precision, "hardware": "cpu-b", "tensor": 2}
        tight = replace(published, gap_mean=published.gap_mean / 10)
        texts = [
            document(made_profile(limits, sampler=side))
            for limits, side in zip((tight, published), sides, strict=True)
        ]
        bench.spec = with_profile(bench.spec, *texts)
        # when a worker is leased to by the other devices, or by some that nobody measured
        bench.signed_lease, bench.lease = lease_for(
            bench.worker_key, bench.coordinator_key, devices=devices
        )
        assert bench.verdict(bench.honest()).accepted
        # then its samples are rejected as ever
        rejected(bench, attack, 0.2, temperature=temperature)


class TestSmallerModelsTokens:
    """A cheaper model samples, the leased one prefills: TOPLOC alone sees nothing wrong."""

    @pytest.mark.parametrize("units", [32, 56])
    def test_prefilled_by_the_leased_model(self, bench: Bench, units: int) -> None:
        worker = behind_honest_claims(bench, like(bench, Worker, smaller(units)))
        found = rejection(bench, bench.rollouts_of(worker))
        assert found.check == "seeded_sampling" and found.value >= 0.5 > found.limit

    def test_under_its_own_claims(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, Worker, smaller(56))))
        assert (found.check, found.value > 0.3) == ("logprobs_submission", True)


def smaller(units: int) -> SmallModel:
    """A model of so many hidden units: the others are always zero."""
    lives, model = np.arange(MODEL.mix.shape[0]) < units, MODEL
    mix = model.mix * lives * lives[:, None]
    return replace(model, embed=model.embed * lives, mix=mix, head=model.head * lives[:, None])


class TestEditedToken:
    """One token exchanged after sampling, for a better reward."""

    def test_in_one_row_alone(self, bench: Bench) -> None:
        honest, edited = bench.honest(), bench.rollouts_of(like(bench, EditsTokens))
        row = max(range(len(edited)), key=lambda n: len(edited[n].output_tokens))
        found = rejection(bench, [*honest[:row], edited[row], *honest[row + 1 :]])
        assert (found.check, found.row) == ("seeded_sampling", row)

    def test_under_the_old_claims(self, bench: Bench) -> None:
        found = rejection(bench, bench.rollouts_of(like(bench, EditsTokensOnly)))
        assert found.check == "logprobs_submission" and found.value >= 0.3 > found.limit


class TestEditedLastToken:
    """The last token is an input to no activation: no proof covers it, the seeded choice does."""

    def test_prefilled_again(self, bench: Bench) -> None:
        rows, honest = bench.rollouts_of(like(bench, EditsLastToken)), bench.honest()
        # given rows whose proofs are byte for byte those of honest ones
        assert [row.proofs for row in rows] == [row.proofs for row in honest]
        found = rejected(bench, EditsLastToken, 0.5)
        # then the gap that decided is that of the last token
        assert f"gap of token {len(rows[found.row].output_tokens) - 1}," in found.words


class TestTruncatedOutput:
    """Cut short to save tokens."""

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_without_an_end_token(self, bench: Bench, reason: str) -> None:
        rows = bench.honest()
        row = max(range(len(rows)), key=lambda n: len(rows[n].output_tokens))
        tokens, logprobs = rows[row].output_tokens[:5], rows[row].logprobs[:5]
        cut = replace(rows[row], output_tokens=tokens, logprobs=logprobs, finish_reason=reason)
        found = rejection(bench, [*rows[:row], cut, *rows[row + 1 :]])
        assert (found.check, found.row) == ("termination", row)


class TestPaddedOutput:
    """Made longer, for the target length's sake or for credit."""

    def test_by_tokens_after_the_end(self, bench: Bench) -> None:
        rows = bench.honest()
        row = next(n for n, r in enumerate(rows) if r.finish_reason == "stop")
        longer = [*rows[row].output_tokens.tolist(), 7, 7, EOS]
        claims = bench.worker.explain(rows[row].prompt_tokens.tolist(), longer).logprobs
        tokens = np.array(longer, np.int32)
        rows[row] = replace(rows[row], output_tokens=tokens, logprobs=claims)
        found = rejection(bench, rows)
        assert (found.check, found.row) == ("termination", row)


class TestBestOfN:
    """Cherry-picking among honest samples: every sample has noise of its own."""

    def test_it_would_gain(self, bench: Bench) -> None:
        rows, honest = bench.rollouts_of(like(bench, BestOfEight)), bench.honest()
        gain = np.mean([r.task_reward for r in rows]) - np.mean([r.task_reward for r in honest])
        assert gain >= 0.1


class Branches(Samples):
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
        return self.best(prompt, tries)

    def _follow(
        self, prompt: list[int], key: tuple[int, int], begun: list[int]
    ) -> tuple[list[int], list[list[int]]]:
        """The leased sample after some tokens, and where it might have gone another way."""
        tokens, ties = list(begun), []
        state = self.model.read([*prompt, *tokens])
        while len(tokens) < LONGEST and (not tokens or tokens[-1] != EOS):
            scaled = self.model.output(state)[1] / np.float32(TEMPERATURE)
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

    def all_of(self, bench: Bench, near: float) -> tuple[list[str], float, float, float]:
        """Why submissions are rejected, others to choose from for each token, gain in task reward
        and the share of rollouts that are not the leased ones."""
        attack = like(bench, Branches)
        attack.near, reasons, gain, others, tokens = near, [], [], [], 0
        for index in range(4):
            take_lease(bench, index)
            honest, rows = bench.honest(), bench.rollouts_of(attack)
            reasons.append(bench.verdict(rows).reason)
            for one, other in zip(honest, rows, strict=True):
                gain.append(other.task_reward - one.task_reward)
                others.append(not np.array_equal(one.output_tokens, other.output_tokens))
                tokens += len(one.output_tokens)
        share = sum(attack.found) / tokens
        return reasons, share, float(np.mean(gain)), float(np.mean(others))

    def test_within_rounding_it_is_not_seen(self, run_of: Callable[..., Bench]) -> None:
        reasons, share, gain, others = self.all_of(run_of("bfloat16"), 0.05)
        assert reasons == [""] * 4
        assert share > 0.02 and gain > 0.005 and others > 0.1

    def test_beyond_rounding_it_is_rejected(self, bench: Bench) -> None:
        reasons, _, _, _ = self.all_of(bench, 0.5)
        assert all(reason.startswith("seeded_sampling") for reason in reasons)


def choosing(bench: Bench, **chosen: int) -> list:
    """Rows of group 0 sampled of another problem or target than assigned, and graded for it."""
    lease, worker = bench.lease, bench.worker
    given = assignments(lease, n_problems=len(bench.task_set), targets=bench.task_set.targets)
    digest = bench.honest()[0].lease
    tasks = [replace(given[0], **chosen), *given[1:]]
    return [worker._rollout(lease, digest, task, n) for task in tasks for n in range(4)]


class TestChosenProblems:
    """Samples the problems that it answers best."""

    def test_another_problem_than_assigned(self, bench: Bench) -> None:
        other = (int(bench.honest()[0].problem_id.split("-")[1]) + 1) % len(bench.task_set)
        found = rejection(bench, choosing(bench, problem=other))
        assert (found.check, found.row, found.value) == ("assignment", 0, 2)  # and its prompt
        assert "problem_id is 'parity-" in found.words

    def test_under_the_assigned_problems_name(self, bench: Bench) -> None:
        rows, name = choosing(bench, problem=3), bench.honest()[0].problem_id
        found = rejection(bench, [replace(r, problem_id=name) for r in rows[:4]] + rows[4:])
        assert "the prompt is not the assigned problem's" in found.words

    def test_groups_that_were_hard_are_left_out(self, bench: Bench) -> None:
        found = rejection(bench, bench.honest()[:4])
        assert found.check == "assignment" and "4 rows, the lease asks for 8" in found.words


class TestChosenTargets:
    """Asks itself for the length that it likes."""

    def test_another_length_than_assigned(self, bench: Bench) -> None:
        other = 24 if bench.honest()[0].target == 8 else 8
        found = rejection(bench, choosing(bench, target=other))
        assert (found.check, found.row, found.value) == ("assignment", 0, 2)  # and its prompt
        assert "target is " in found.words


# --- Pools that cut -------------------------------------------------------------------------------

TRUNCATED = [
    {"temperature": TEMPERATURE, "top_p": 0.8},
    {"temperature": TEMPERATURE, "top_k": 4},
    {"temperature": TEMPERATURE, "top_p": 0.9, "top_k": 10},
]


class OneTokenOutside(Worker):
    """Replaces one token by the least likely one, which nobody keeps."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if len(tokens) > 4:
            _, logits = self.model.output(self.model.read([*prompt, *tokens[:2]]))
            tokens[2] = int(np.argmin(logits[1:])) + 1
        return tokens


class LeavesOutTheLast(Samples):
    """Samples from all that the spec keeps but the least likely of it: top-k 3 for top-k 4."""

    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        sampling = self.spec.samplers[0].sampling
        rule = Truncation(sampling.top_p, sampling.top_k)
        kept = logprobs[logprobs >= thresholds(np, logprobs, rule).kept]
        return np.where(logprobs >= np.sort(kept)[:2][-1], logprobs, -np.inf)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sampling", TRUNCATED, ids=str)
class TestAnotherCut:
    """Other tokens than the spec's top-k and top-p keep."""

    def test_honest_rounding_at_the_edge_passes(
        self, run_of: Callable[..., Bench], precision: str, sampling: dict[str, float]
    ) -> None:
        """Every bf16 logit is a little off, so some sampled token is outside our own set."""
        bench = run_of(precision, sampling=sampling)
        for index in range(4):
            take_lease(bench, index)
            verdict = bench.verdict(bench.honest())
            assert verdict.accepted, verdict.reason

    @pytest.mark.parametrize("attack", [Samples, OneTokenOutside, LeavesOutTheLast])
    def test_tokens_that_are_not_kept(
        self,
        run_of: Callable[..., Bench],
        precision: str,
        sampling: dict[str, float],
        attack: type[Worker],
    ) -> None:
        rejected(run_of(precision, sampling=sampling), attack, 0.0)


# --- Pools that are not seeded --------------------------------------------------------------------


class Unseeded(Samples):
    """Draws noise of its own; what it claims is the leased version's."""

    longest = 100

    def noise(self, key: tuple[int, int]) -> Callable[[int], np.ndarray]:
        rng = np.random.default_rng(key[0] % 2**32)
        return lambda place: rng.gumbel(size=VOCAB)

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        return Worker(self.key, MODEL, self.spec, self.task_set).explain(prompt, tokens)


class UnseededTopK(Unseeded):
    def seen(self, logprobs: np.ndarray) -> np.ndarray:
        return np.where(logprobs >= np.sort(logprobs)[-6], logprobs, -np.inf)


class BestOf16(Unseeded):
    """Hands in the most probable of sixteen samples, a token."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tries = [super(BestOf16, self).sample(prompt, (key[0] ^ n, 0)) for n in range(16)]
        return max(tries, key=lambda tokens: self.explain(prompt, tokens).logprobs.mean())


class EndsAtOnce(Unseeded):
    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        return [*tokens[: min(1, len(tokens) - 1)], EOS]


class UnseededPads(NeverEnds, Unseeded):
    """Goes on to the longest output."""


class AnotherModel(Unseeded):
    """Text of a model of its own, which it serves for less."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        other = SmallModel.random(seed=9)
        return Unseeded(self.key, other, self.spec, self.task_set).sample(prompt, key)


class Repeats(Unseeded):
    """Hands in one sample of a prompt again and again, with one other token at the end."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        once = super().sample(prompt, (sum(prompt), 0))
        return [*once[:-2], 1 + key[0] % 40, once[-1]]


@pytest.fixture
def unseeded(tmp_path: Path) -> Callable[..., Bench]:
    """A bench of two groups of sixteen, sampled without a seed; keywords are of the sampling."""

    def make(**sampling: object) -> Bench:
        chosen = {"temperature": TEMPERATURE, "seeded": False, **sampling}
        bench = Bench(tmp_path, trust="trusted", max_new_tokens=100, sampling=chosen)
        take_lease(bench, 2)
        algorithm = bench.spec.algorithm.model_copy(update={"group_size": 16})
        bench.spec = bench.spec.model_copy(update={"algorithm": algorithm})
        return bench

    return make


def rows_of(bench: Bench, kind: type[Samples], temperature: float = TEMPERATURE) -> list[Any]:
    worker = kind(bench.worker_key, MODEL, bench.spec, bench.task_set)
    worker.temperature = temperature
    return bench.rollouts_of(worker)


class TestUnseededChoices:
    """Greedy, other temperatures, top-k, best of n, another model, ends too soon or too late."""

    def test_honest_workers_pass(self, unseeded: Callable[..., Bench]) -> None:
        bench = unseeded()
        for index in range(3):
            take_lease(bench, index)
            verdict = bench.verdict(rows_of(bench, Unseeded))
            assert verdict.accepted, verdict.reason
            assert [check.name for check in verdict.rows[0].checks][-7:] == [
                *("kept_tokens", "ends_submission", "ends"),
                *("chosen_tokens_submission", "chosen_tokens", "toploc", "duplicates"),
            ]

    @pytest.mark.parametrize(
        ("attack", "temperature", "check", "words"),
        [
            (Unseeded, 1e-3, "chosen_tokens_submission", "nothing below 1 of the largest probab"),
            (Unseeded, TEMPERATURE / 2, "chosen_tokens_submission", "temperature / 1.5"),
            (Unseeded, TEMPERATURE * 2, "chosen_tokens_submission", "temperature / 0.5"),
            (UnseededTopK, TEMPERATURE, "chosen_tokens_submission", "temperature / 1.25"),
            (BestOf16, TEMPERATURE, "chosen_tokens_submission", "temperature / 1."),
            (AnotherModel, TEMPERATURE, "ends_submission", "ends anywhere"),
            (EndsAtOnce, TEMPERATURE, "ends_submission", "ends anywhere, 0.01 a token"),
            (UnseededPads, TEMPERATURE, "ends_submission", "odds of the end token times 0.0"),
        ],
    )
    def test_a_choice_that_is_not_the_policys(
        self,
        unseeded: Callable[..., Bench],
        attack: type[Samples],
        temperature: float,
        check: str,
        words: str,
    ) -> None:
        bench = unseeded()
        found = rejection(bench, rows_of(bench, attack, temperature))
        assert (found.check, found.row, words in found.words) == (check, 0, True), found.words
        assert found.value > found.limit

    def test_a_single_row_is_looked_at_alone(self, unseeded: Callable[..., Bench]) -> None:
        bench = unseeded()
        honest, greedy = rows_of(bench, Unseeded), rows_of(bench, Unseeded, 1e-3)
        row = max(range(len(greedy)), key=lambda n: len(greedy[n].output_tokens))
        reason = bench.verdict([*honest[:row], greedy[row], *honest[row + 1 :]]).reason
        assert reason.startswith(f"chosen_tokens: row {row}: ")

    def test_tokens_that_the_pool_cuts_off(self, unseeded: Callable[..., Bench]) -> None:
        bench = unseeded(top_k=5)
        reason = bench.verdict(rows_of(bench, Unseeded)).reason
        assert reason.startswith("kept_tokens: row ") and "lies below those that top-k" in reason


class TestDuplicateRows:
    """One sample handed in as many, or another worker's as one's own."""

    def test_one_sample_handed_in_twice(self, unseeded: Callable[..., Bench]) -> None:
        bench = unseeded()
        bench.prefill = False  # else the edited tokens are seen too
        reason = bench.verdict(rows_of(bench, Repeats)).reason
        assert reason.startswith("duplicates: row ") and "a run of tokens of row " in reason
