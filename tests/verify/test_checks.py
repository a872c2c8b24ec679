"""The contract of the checks: honest rollouts pass every one, and each lie fails the one for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from runspec.core.errors import UserError
from runspec.core.schema import Thresholds
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import NumpyEngine, ParityTask
from verify.checks import few_exceptions
from verify.checks.rows import OUTPUT_NATS, fingerprints
from verify.examiner import Verdict
from verify.formats.lease import assignments
from verify.formats.submission import Rollout
from verify.formats.verdict import MAX_FINGERPRINTS
from verify.plugins import Graded, GradeItem, GraderFault, PrefillOutput
from verify.thresholds import BFLOAT16, FLOAT32, limits_for

Edit = Callable[[list[Rollout]], list[Rollout]]
ROWS = ["assignment", "bounds", "versions", "termination", "proof_format", "reward"]
LOGPROBS = ["logprobs_submission", "logprobs"]
SEEDED = ["seeded_sampling", "seeded_sampling_submission"]
ENDS = ["ends_submission", "ends"]
UNSEEDED = ["kept_tokens", *ENDS, "chosen_tokens_submission", "chosen_tokens"]
IN_FLIGHT = {"trust": "trusted", "in_flight_updates": True}
FREE = {"trust": "trusted", "sampling": {"temperature": 0.8, "seeded": False}}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(verdict: Verdict, row: int = 0) -> list[str]:
    return [check.name for check in verdict.rows[row].checks]


def every(**changes: object) -> Edit:
    return lambda rollouts: [replace(r, **changes) for r in rollouts]


def last(**changes: object) -> Edit:
    return lambda rollouts: [*rollouts[:-1], replace(rollouts[-1], **changes)]


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def of_tokens(*tokens: int, **changes: object) -> Edit:
    """The last row with these output tokens."""
    return last(output_tokens=i32(*tokens), logprobs=np.full(len(tokens), -1.0, "f4"), **changes)


def ended(reason: str, *tokens: int) -> Edit:
    return of_tokens(*tokens, finish_reason=reason)


def of_logprob(value: float) -> Edit:
    return last(output_tokens=i32(5, 0), logprobs=f32(-1, value))


def stamped(*versions: int) -> Edit:
    """The first tokens under one version each, the rest under the last."""

    def edit(rollouts: list[Rollout]) -> list[Rollout]:
        rows = []
        for row in rollouts:
            stamps = np.full(len(row.output_tokens), versions[-1], np.int32)
            stamps[: len(versions)] = versions[: len(stamps)]
            rows.append(replace(row, versions=stamps))
        return rows

    return edit


# --- the honest ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "edit", "checks"),
    [
        ({}, every(), [*ROWS, *LOGPROBS, *SEEDED, "toploc", "duplicates"]),
        (FREE, every(), [*ROWS, *LOGPROBS, *UNSEEDED, "toploc", "duplicates"]),
        (IN_FLIGHT, stamped(0), [*ROWS, *LOGPROBS, *SEEDED, "toploc", "duplicates"]),
        (IN_FLIGHT, stamped(1), [*ROWS, "prefill", "duplicates"]),
    ],
    ids=["seeded", "unseeded", "in flight, of the lease's version", "in flight, of another"],
)
def test_an_honest_submission_passes_every_check(
    tmp_path: Path, pool: dict[str, object], edit: Edit, checks: list[str]
) -> None:
    bench = Bench(tmp_path, **pool)
    rollouts = edit(bench.honest())
    verdict = bench.verdict(rollouts)
    assert (verdict.accepted, verdict.reason, verdict.dropped_groups) == (True, "", [])
    assert bench.engine.prefills == ([8] if "toploc" in checks else [])
    for number, (rollout, row) in enumerate(zip(rollouts, verdict.rows, strict=True)):
        assert names(verdict, number) == checks
        assert row.reward == pytest.approx(rollout.task_reward + rollout.length_penalty)
        assert (row.row, row.length) == (number, len(rollout.output_tokens))
        if "toploc" in checks:
            np.testing.assert_allclose(row.logprobs, rollout.logprobs, atol=1e-5)
            assert row.logprob_diff is not None and row.logprob_diff < 1e-5
        else:
            assert row.logprobs is None and row.logprob_diff is None


def test_an_honest_bf16_sampler_passes_its_limits_and_not_stricter_ones(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dtype="bfloat16")
    bench.worker.model = MODEL.in_bfloat16()
    verdict = bench.verdict(bench.honest())
    assert verdict.accepted, verdict.reason
    assert max(row.logprob_diff or 0 for row in verdict.rows) > 1e-3  # the precisions do differ
    # when the spec has thresholds of its own
    strict = Thresholds.model_validate({**FP8, "name": "bfloat16", "logprob_submission": 1e-6})
    verify = bench.spec.verify.model_copy(update={"thresholds": [strict]})
    bench.spec = bench.spec.model_copy(update={"verify": verify})
    # then they decide
    reason = bench.verdict(bench.honest()).reason
    assert reason.startswith("logprobs_submission: row 0: ") and "limit 1e-06" in reason


def test_a_verdict_says_where_proofs_are_too_short_to_tell_from_a_guess(bench: Bench) -> None:
    rollouts = bench.honest()
    reasons = [row.checks[-2].reason for row in bench.verdict(rollouts).rows]
    told = ["too short or too predictable" in reason for reason in reasons]
    short = [number for number, row in enumerate(rollouts) if len(row.output_tokens) < 3]
    assert short and not all(told) and all(told[number] for number in short)


def test_without_prefill_the_cheap_checks_decide(bench: Bench) -> None:
    bench.prefill = False
    verdict = bench.verdict(bench.honest())
    assert verdict.accepted and bench.engine.prefills == []
    assert names(verdict) == [*ROWS, "duplicates"]


# --- each way of lying --------------------------------------------------------------------------

LIES: dict[str, Edit] = {
    "assignment: row 0: run is 'other'": every(run="other"),
    "assignment: row 0: step is '1', assigned '0'": every(step=1),
    "assignment: row 0: worker is": every(worker="ee" * 32),
    "assignment: row 0: lease is": every(lease="ee" * 32),
    "assignment: row 0: version is '7', assigned '0'": every(version=7),
    "assignment: row 0: temperature is": every(temperature=0.1),
    "assignment: row 0: top_p is": every(top_p=0.5),
    "assignment: row 0: top_k is '1', assigned '-1'": every(top_k=1),
    "assignment: row 7: target is '9'": last(target=9),
    "assignment: row 7: problem_id is 'easy'": last(problem_id="easy"),
    "assignment: row 7: the prompt is not": last(prompt_tokens=i32(1, 2)),
    "assignment: row 0: 7 rows, the lease asks for 8": lambda rows: rows[:-1],
    "assignment: row 0: group 0 sample 0 appears 2 times": lambda rows: [*rows[:-1], rows[0]],
    "assignment: row 7: group 2 sample 3 is not of the lease": last(group=2),
    "assignment: row 7: group -1 sample 3 is not": last(group=-1),
    "assignment: row 7: group 1 sample 4 is not": last(sample=4),
    "assignment: row 7: group 1 sample -1 is not": last(sample=-1),
    "format: 9 rows, more than the 8 allowed": lambda rows: [*rows, rows[0]],
    "format: no rows": lambda rows: [],
    "bounds: row 7: 0 output tokens, outside [1, 40]": of_tokens(proofs=[]),
    "bounds: row 7: 41 output tokens": of_tokens(*[5] * 41),
    "bounds: row 7: token 48 outside the vocabulary of 48": of_tokens(5, 48),
    "bounds: row 7: token -1 outside": of_tokens(-1),
    "bounds: row 7: 1 log-probs for": last(logprobs=f32(0)),
    "bounds: row 7: log-prob 0.000199": of_logprob(2e-4),
    "bounds: row 7: log-prob -10001": of_logprob(-10_001),
    "bounds: row 7: log-prob nan": of_logprob(np.nan),
    "bounds: row 7: task_reward inf": last(task_reward=float("inf")),
    "bounds: row 7: length_penalty nan": last(length_penalty=float("nan")),
    "versions: row 0: versions of tokens, from a pool that does not": stamped(0, 1),
    "termination: row 7: finish reason 'tired'": last(finish_reason="tired"),
    "termination: row 7: stopped, with end tokens at [] of 2": ended("stop", 5, 5),
    "termination: row 7: stopped, with end tokens at [1, 3] of 4": ended("stop", 5, 0, 5, 0),
    "termination: row 7: went on after the end token at 38": ended("length", *[5] * 38, 0, 5),
    "termination: row 7: cut at 39 tokens, not at 40": ended("length", *[5] * 39),
    "proof_format: row 7: 0 proofs for": last(proofs=[]),
    "proof_format: row 7: proof 0:": lambda rows: last(
        proofs=[b"\xff" * 258] * len(rows[-1].proofs)
    )(rows),
    "reward: row 0: claimed against re-graded": every(task_reward=1.0),
    "reward: row 0: claimed against": every(length_penalty=0.0),
}


def off(by: float) -> Edit:
    return lambda rows: [replace(r, logprobs=r.logprobs + np.float32(by)) for r in rows]


def proofs_of_another(rows: list[Rollout]) -> list[Rollout]:
    return [*rows[:5], replace(rows[5], proofs=rows[0].proofs[:1] * len(rows[5].proofs)), *rows[6:]]


LIES_OF_POOLS: dict[str, tuple[dict[str, object], Edit]] = {
    "logprobs_submission: row 0: mean over the submission": ({}, off(-0.01)),
    "toploc: row 5: ": ({}, proofs_of_another),
    "toploc: row 5:": (
        IN_FLIGHT,
        lambda rows: [*stamped(0, 1)(rows[:3]), *proofs_of_another(stamped(0)(rows))[3:]],
    ),
    "versions: row 0: a token of an older": (IN_FLIGHT, stamped(1, 0)),
    "versions: row 0: a token of version -1, outs": (IN_FLIGHT, stamped(-1, 0)),
    "versions: row 0: a token of version 5, outsi": (IN_FLIGHT, stamped(0, 5)),
    "versions: row 0: no versions of tokens": (IN_FLIGHT, every()),
    "versions: row 7: 1 versions for": (
        IN_FLIGHT,
        lambda rows: last(versions=i32(0))(stamped(0)(rows)),
    ),
    "versions: row 0: versions of": ({**IN_FLIGHT, "trust": "untrusted"}, stamped(0, 1)),
}
ROWS_OF_LIES = [*((reason, {}, edit) for reason, edit in LIES.items())]
ROWS_OF_LIES += [(reason, *lie) for reason, lie in LIES_OF_POOLS.items()]


@pytest.mark.parametrize(("reason", "pool", "edit"), ROWS_OF_LIES)
def test_a_lie_is_named_and_one_in_the_rows_alone_asks_no_model(
    tmp_path: Path, reason: str, pool: dict[str, object], edit: Edit
) -> None:
    bench = Bench(tmp_path, **pool)
    verdict = bench.verdict(edit(bench.honest()))
    assert not verdict.accepted and verdict.reason.startswith(reason)
    assert bool(bench.engine.prefills) == reason.startswith(("logprobs", "toploc"))


def test_a_rollout_of_several_versions_is_not_recomputed_and_the_verdict_says_so(
    tmp_path: Path,
) -> None:
    # given log-probs of two versions, which no prefill gives
    bench = Bench(tmp_path, **IN_FLIGHT)
    rollouts = bench.honest()
    mixed = [*off(-1.0)(stamped(0, 0, 1)(rollouts[:1])), *stamped(0)(rollouts[1:])]
    verdict = bench.verdict(mixed)
    assert verdict.accepted, verdict.reason
    found = verdict.rows[0].checks[-2]
    assert (found.name, found.passed, found.value) == ("prefill", True, 2.0)
    assert "versions 0 to 1" in found.reason and verdict.rows[0].logprobs is None
    assert all(names(verdict, row)[-2:] == ["toploc", "duplicates"] for row in range(1, 8))
    assert bench.engine.prefills == [7]


# --- rewards ------------------------------------------------------------------------------------


def test_a_fault_of_the_grader_drops_its_group_without_blame(bench: Bench) -> None:
    # given a grader that fails on the problem of group 1
    problems = assignments(bench.lease, n_problems=30, targets=bench.task_set.targets)
    rollouts = bench.honest()
    bench.task_set.faulty = frozenset({problems[1].problem})
    # when the worker claims whatever it likes there, then that group alone is lost
    verdict = bench.verdict([*rollouts[:4], *every(task_reward=1.0)(rollouts[4:])])
    assert verdict.accepted and verdict.dropped_groups == [1]
    assert verdict.fault == f"the grader of problem {problems[1].problem} hung"
    assert [row.reward for row in verdict.rows[4:]] == [0.0] * 4


def test_a_claim_on_what_cannot_be_graded_again_alike_is_not_compared(bench: Bench) -> None:
    rollouts = every(task_reward=0.0)(bench.honest())
    assert bench.verdict(rollouts).reason.startswith("reward: row 0")
    # when time has a say in the term, then what trains is the validator's own reward
    bench.task_set.repeatable = False
    verdict = bench.verdict(rollouts)
    assert verdict.accepted and any(row.task_reward > 0 for row in verdict.rows)


class LongPenalty(ParityTask):
    """Penalties in the thousands, where float32 is further off than the tolerance."""

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        penalties = [-4000.00012 - len(item.output_tokens) for item in items]
        return [Graded(0.5, penalty, 0.5 + penalty) for penalty in penalties]


def test_an_honest_claim_of_any_size_is_accepted_and_its_neighbour_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LongPenalty())
    first, *rest = bench.honest()
    assert bench.verdict([first, *rest]).reason == ""
    beside = float(np.nextafter(np.float32(first.length_penalty), np.float32(0)))
    edited = [replace(first, length_penalty=beside), *rest]
    assert bench.verdict(edited).reason.startswith("reward: row 0")


# --- a prefill that is not finite ---------------------------------------------------------------


@dataclass(kw_only=True)
class DamagedEngine(NumpyEngine):
    """Honest but for the last rollout, as a faulty device would be."""

    damage: Callable[[PrefillOutput], PrefillOutput]

    def prefill(self, *arguments: object, **options: object) -> list[PrefillOutput]:
        *whole, last = super().prefill(*arguments, **options)
        return [*whole, self.damage(last)]


def with_first(values: np.ndarray | None, value: float) -> np.ndarray:
    assert values is not None
    changed = values.copy()
    changed.flat[0] = value
    return changed


def choice(field: str, value: float) -> Callable[[PrefillOutput], PrefillOutput]:
    def damage(out: PrefillOutput) -> PrefillOutput:
        assert out.choices is not None
        changed = {field: with_first(getattr(out.choices, field), value)}
        return replace(out, choices=out.choices._replace(**changed))

    return damage


DAMAGE: dict[str, tuple[dict[str, object], Callable[[PrefillOutput], PrefillOutput]]] = {
    "gave a log-prob": ({}, lambda o: replace(o, logprobs=with_first(o.logprobs, np.nan))),
    "gave a seeded gap": ({}, lambda o: replace(o, seeded_gap=with_first(o.seeded_gap, np.inf))),
    "gave a hidden state": ({}, lambda o: replace(o, hidden=with_first(o.hidden, 0xFFC0))),
    r"a distribution \(log_powers\) that": (FREE, choice("log_powers", np.nan)),
    r"a distribution \(end_least\) that": (FREE, choice("end_least", np.inf)),
    "does not compute the distributions": (FREE, lambda o: replace(o, choices=None)),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_prefill_at_fault_is_our_own_and_rejects_nobody(tmp_path: Path, words: str) -> None:
    pool, damage = DAMAGE[words]
    bench = Bench(tmp_path, **pool)
    bench.engine = DamagedEngine({0: MODEL}, tmp_path, damage=damage)
    with pytest.raises(UserError, match=words):
        bench.verdict(bench.honest())


# --- limits -------------------------------------------------------------------------------------

# What one of fp8 measured, had it: looser than bfloat16 in the log-probs, else as bfloat16 is.
FP8 = {
    "name": "fp8",
    "logprob_submission": 0.06,
    "logprob_rollout": 0.2,
    "gap": 0.2,
    "gap_share": 0.02,
    "gap_max": 4.0,
    "gap_mean": 2e-3,
    "mismatch_share": 0.4,
    "mantissa_mean": 20.0,
    "mantissa_median": 16.0,
}


def test_limits_are_of_both_precisions_unless_the_spec_has_its_own() -> None:
    assert limits_for("float32", "float32") == FLOAT32
    assert limits_for("bfloat16", "float32") == BFLOAT16 == limits_for("float32", "bfloat16")
    given = [Thresholds.model_validate(FP8)]
    own = {name: value for name, value in FP8.items() if name != "name"}
    assert limits_for("fp8", "bfloat16", given) == replace(BFLOAT16, miss_share=0.4, **own)
    assert limits_for("bfloat16", "bfloat16", given) == BFLOAT16  # of another precision


@pytest.mark.parametrize(
    ("tokens", "gaps", "passes"),
    [
        (50, (0.09,), True),
        (50, (0.299,), True),  # one, in too short a rollout for a share
        (50, (0.25, 0.11), False),
        (50, (0.31,), False),
        (250, (1.9, 1.9), True),  # 1 % of 250
        (250, (1.9, 0.11, 0.11), False),
        (250, (2.0,), True),
        (250, (2.1,), False),
        (250, (float("nan"),), False),
        (50, (float("inf"),), False),
    ],
)
def test_few_tokens_in_bfloat16_may_be_off_by_more_than_rounding(
    tokens: int, gaps: tuple[float, ...], passes: bool
) -> None:
    values = np.zeros(tokens, np.float32)
    values[: len(gaps)] = gaps
    found = few_exceptions("gaps", values, BFLOAT16, largest="token {token}", over="above")
    assert found.passed == passes


# --- duplicates ---------------------------------------------------------------------------------


def sampled(n: int, seed: int, nats: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and log-probs of about so much information each."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 50, n).astype(np.int32), -rng.exponential(nats, n).astype(np.float32)


def shared(one: list[int], two: list[int]) -> int:
    return len(set(one) & set(two))


def test_other_rollouts_share_nothing() -> None:
    prints = [fingerprints(*sampled(600, seed)) for seed in range(100)]
    assert all(len(each) == MAX_FINGERPRINTS for each in prints)
    assert len({p for row in prints for p in row}) == 100 * MAX_FINGERPRINTS


@pytest.mark.parametrize(("edits", "noise", "least"), [(1, 0.0, 1), (3, 0.0, 1), (0, 0.01, 6)])
def test_neither_edits_nor_rounding_hide_a_copy(edits: int, noise: float, least: int) -> None:
    for seed in range(30):
        tokens, logprobs = sampled(1000, seed)
        rng, copy = np.random.default_rng(seed), tokens.copy()
        places = rng.integers(0, len(copy), edits)
        copy[places] = (copy[places] + 1) % 50
        theirs = logprobs + noise * rng.normal(size=1000).astype(np.float32)
        assert shared(fingerprints(tokens, logprobs), fingerprints(copy, theirs)) >= least


def test_a_run_begins_at_every_token_that_enough_follows() -> None:
    tokens, eight_nats = np.arange(16, dtype=np.int32), np.full(16, -8.0, np.float32)
    # 48 nats are 6 tokens, and so 8: nine runs, of which none is the whole output
    assert len(set(fingerprints(tokens, eight_nats))) == 1 + 9
    assert len(set(fingerprints(tokens[:8], eight_nats[:8]))) == 1


def test_what_carries_little_information_may_be_alike() -> None:
    tokens, logprobs = sampled(600, 1)
    total = -logprobs.sum(dtype=np.float64)
    little, enough = (logprobs * np.float32(OUTPUT_NATS / total * f) for f in (0.99, 1.01))
    assert fingerprints(tokens, little) == []
    assert fingerprints(tokens, enough) != []
    # as is a text that the policy writes anyway, before two rollouts go on differently
    certain = np.full(600, -0.01, np.float32)
    one, two = (
        fingerprints(np.append(tokens, more), np.append(certain, nats))
        for more, nats in (sampled(400, 2), sampled(400, 3))
    )
    assert shared(one, two) == 0
