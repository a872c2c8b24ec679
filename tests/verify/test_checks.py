"""Every check passes honest rollouts, and refuses what it is for with the deciding number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import Thresholds
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import NumpyEngine
from verify.examiner import Verdict
from verify.formats.lease import assignments
from verify.formats.submission import Rollout
from verify.plugins import PrefillInput, PrefillOutput
from verify.thresholds import BFLOAT16, FLOAT32, limits_for
from verify.truncation import Truncation

Edit = Callable[[list[Rollout]], list[Rollout]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def names(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.rows[0].checks]


# --- honest -------------------------------------------------------------------------------------


def test_an_honest_submission_passes_every_check(bench: Bench) -> None:
    rollouts = bench.honest()

    verdict = bench.verdict(rollouts)

    assert (verdict.accepted, verdict.reason, verdict.dropped_groups) == (True, "", [])
    assert names(verdict) == [
        "assignment",
        "bounds",
        "versions",
        "termination",
        "proof_format",
        "reward",
        "logprobs_submission",
        "logprobs",
        "seeded_sampling",
        "seeded_sampling_submission",
        "toploc",
        "duplicates",
    ]
    for rollout, row in zip(rollouts, verdict.rows, strict=True):
        assert row.reward == pytest.approx(rollout.task_reward + rollout.length_penalty)
        assert row.length == len(rollout.output_tokens)
        np.testing.assert_allclose(row.logprobs, rollout.logprobs, atol=1e-5)
        assert row.logprob_diff is not None and row.logprob_diff < 1e-5


def test_an_honest_bf16_sampler_passes_the_bf16_limits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, dtype="bfloat16")
    bench.worker.model = MODEL.in_bfloat16()

    verdict = bench.verdict(bench.honest())

    assert verdict.accepted, verdict.reason
    assert max(row.logprob_diff or 0 for row in verdict.rows) > 1e-3  # the precisions do differ


def test_a_verdict_says_where_proofs_are_too_short_to_tell_from_a_guess(bench: Bench) -> None:
    rollouts = bench.honest()
    short = [len(rollout.output_tokens) < 3 for rollout in rollouts]
    assert any(short)

    verdict = bench.verdict(rollouts)

    found = [next(c for c in row.checks if c.name == "toploc") for row in verdict.rows]
    said = ["too short or too predictable" in each.reason for each in found]
    assert all(each.passed for each in found)
    assert all(told for told, is_short in zip(said, short, strict=True) if is_short)
    assert not all(said)


def test_without_prefill_the_cheap_checks_decide(bench: Bench) -> None:
    bench.prefill = False
    verdict = bench.verdict(bench.honest())
    assert verdict.accepted and bench.engine.prefills == []
    assert verdict.rows[0].logprobs is None and verdict.rows[0].logprob_diff is None
    assert names(verdict)[-2:] == ["reward", "duplicates"]


def test_strict_limits_need_float32_on_both_sides() -> None:
    assert limits_for("float32", "float32") == FLOAT32
    assert limits_for("bfloat16", "float32") == BFLOAT16 == limits_for("float32", "bfloat16")


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


def test_thresholds_of_the_pools_precision_take_the_place_of_calibrated_limits() -> None:
    thresholds = [Thresholds.model_validate(FP8)]

    limits = limits_for("fp8", "bfloat16", thresholds)

    assert {name: getattr(limits, name) for name in FP8 if name != "name"} == {
        name: value for name, value in FP8.items() if name != "name"
    }
    assert limits.constant_ratio == BFLOAT16.constant_ratio
    assert limits.miss_share == FP8["mismatch_share"]
    assert limits_for("bfloat16", "bfloat16", thresholds) == BFLOAT16  # of another precision


def test_verdicts_judge_by_the_specs_thresholds(tmp_path: Path) -> None:
    strict = {**FP8, "name": "bfloat16", "logprob_submission": 1e-6}
    bench = Bench(tmp_path, dtype="bfloat16")
    bench.worker.model = MODEL.in_bfloat16()
    verify = bench.spec.verify.model_copy(
        update={"thresholds": [Thresholds.model_validate(strict)]}
    )
    bench.spec = bench.spec.model_copy(update={"verify": verify})

    verdict = bench.verdict(bench.honest())

    assert not verdict.accepted
    assert "logprobs_submission" in verdict.reason and "limit 1e-06" in verdict.reason


class DamagedEngine(NumpyEngine):
    """Honest but for one number of the last rollout, as a faulty device would be."""

    damage: Callable[[PrefillOutput], PrefillOutput]

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        *whole, last = super().prefill(version, inputs, temperature=temperature)
        return [*whole, self.damage(last)]


def with_first(values: np.ndarray | None, value: float) -> np.ndarray:
    assert values is not None
    changed = values.copy()
    changed.flat[0] = value
    return changed


DAMAGE: dict[str, Callable[[PrefillOutput], PrefillOutput]] = {
    "log-prob": lambda out: replace(out, logprobs=with_first(out.logprobs, np.nan)),
    "seeded gap": lambda out: replace(out, seeded_gap=with_first(out.seeded_gap, np.inf)),
    "hidden state": lambda out: replace(out, hidden=with_first(out.hidden, 0xFFC0)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_prefill_that_is_not_finite_is_our_fault_and_no_rejection(
    bench: Bench, tmp_path: Path, what: str
) -> None:
    bench.engine = engine = DamagedEngine({0: MODEL}, tmp_path)
    engine.damage = DAMAGE[what]
    with pytest.raises(UserError, match=f"own prefill of version 0 gave a {what}"):
        bench.verdict(bench.honest())


# --- what is not as leased ----------------------------------------------------------------------


def every(**changes: object) -> Edit:
    return lambda rollouts: [replace(r, **changes) for r in rollouts]


def last(**changes: object) -> Edit:
    return lambda rollouts: [*rollouts[:-1], replace(rollouts[-1], **changes)]


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


EDITS: dict[str, tuple[Edit, str]] = {
    "another run": (every(run="other"), "assignment: row 0: run is 'other'"),
    "another step": (every(step=1), "assignment: row 0: step is '1', assigned '0'"),
    "another worker": (every(worker="ee" * 32), "assignment: row 0: worker is"),
    "another lease": (every(lease="ee" * 32), "assignment: row 0: lease is"),
    "an older version": (every(version=7), "assignment: row 0: version is '7', assigned '0'"),
    "another temperature": (every(temperature=0.1), "assignment: row 0: temperature is"),
    "top-p": (every(top_p=0.5), "assignment: row 0: top_p is"),
    "top-k": (every(top_k=1), "assignment: row 0: top_k is '1', assigned '-1'"),
    "a chosen target": (last(target=9), "assignment: row 7: target is '9'"),
    "no target": (last(target=None), "assignment: row 7: target is 'None'"),
    "a chosen problem": (last(problem_id="easy"), "assignment: row 7: problem_id is 'easy'"),
    "another prompt": (last(prompt_tokens=i32(1, 2)), "assignment: row 7: the prompt is not"),
    "a row missing": (lambda rows: rows[:-1], "assignment: row 0: 7 rows, the lease asks for 8"),
    "a sample twice": (
        lambda rows: [*rows[:-1], rows[0]],
        "assignment: row 0: group 0 sample 0 appears 2 times",
    ),
    "a group too many": (last(group=2), "assignment: row 7: group 2 sample 3 is not of the lease"),
    "a negative sample": (last(sample=-1), "assignment: row 7: group 1 sample -1 is not"),
    "one row too many": (lambda rows: [*rows, rows[0]], "format: 9 rows, more than the 8 allowed"),
    "no rows": (lambda rows: [], "format: no rows"),
    "no output": (
        last(output_tokens=i32(), logprobs=np.zeros(0, np.float32), proofs=[]),
        "bounds: row 7: 0 output tokens, outside [1, 40]",
    ),
    "too long an output": (
        last(output_tokens=np.full(41, 5, np.int32), logprobs=np.full(41, -1.0, np.float32)),
        "bounds: row 7: 41 output tokens",
    ),
    "log-probs missing": (last(logprobs=np.zeros(1, np.float32)), "bounds: row 7: 1 log-probs for"),
    "infinite reward": (last(task_reward=float("inf")), "bounds: row 7: task_reward inf"),
    "NaN penalty": (last(length_penalty=float("nan")), "bounds: row 7: length_penalty nan"),
    "an unknown finish": (last(finish_reason="tired"), "termination: row 7: finish reason 'tired'"),
    "proofs missing": (last(proofs=[]), "proof_format: row 7: 0 proofs for"),
    "a malformed proof": (
        lambda rows: last(proofs=[b"\xff" * 258] * len(rows[-1].proofs))(rows),
        "proof_format: row 7: proof 0:",
    ),
    "claimed task reward": (every(task_reward=1.0), "reward: row 0: claimed against re-graded"),
    "claimed length penalty": (every(length_penalty=0.0), "reward: row 0: claimed against"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_row_is_rejected_and_the_model_is_not_asked(bench: Bench, name: str) -> None:
    edit, reason = EDITS[name]

    verdict = bench.verdict(edit(bench.honest()))

    assert not verdict.accepted
    assert verdict.reason.startswith(reason)
    assert bench.engine.prefills == []  # cheap checks come first


# --- the grader's faults ------------------------------------------------------------------------


def test_a_fault_of_the_grader_drops_its_group_without_blame(tmp_path: Path) -> None:
    # given a grader that fails on the problem of group 1
    bench = Bench(tmp_path)
    problems = assignments(bench.lease, n_problems=30, targets=bench.task_set.targets)
    assert problems[0].problem != problems[1].problem
    rollouts = bench.honest()
    bench.task_set.faulty = frozenset({problems[1].problem})

    # when the worker claims whatever it likes there
    verdict = bench.verdict([*rollouts[:4], *(replace(r, task_reward=1.0) for r in rollouts[4:])])

    # then that group alone is lost
    assert verdict.accepted and verdict.dropped_groups == [1]
    assert verdict.fault == f"the grader of problem {problems[1].problem} hung"
    assert [row.reward for row in verdict.rows[4:]] == [0.0] * 4


def test_a_claim_on_what_cannot_be_graded_again_alike_is_not_compared(tmp_path: Path) -> None:
    # given a term in which time has a say, and a worker whose programs ran out of it
    bench = Bench(tmp_path)
    rollouts = [replace(r, task_reward=0.0) for r in bench.honest()]
    refused = bench.verdict(rollouts)
    bench.task_set.repeatable = False

    # when the validator finds other task rewards
    verdict = bench.verdict(rollouts)

    # then nobody is blamed, and what trains is the validator's own; a repeatable term rejects
    assert verdict.accepted
    assert any(row.task_reward > 0 for row in verdict.rows)
    assert not refused.accepted and refused.reason.startswith("reward: row 0")


# --- several at once ----------------------------------------------------------------------------


def test_submissions_of_one_version_share_a_prefill_and_keep_their_own_verdict(
    bench: Bench,
) -> None:
    rollouts = bench.honest()
    good = bench.packed(rollouts)
    bad = bench.packed(every(task_reward=1.0)(rollouts))
    files = [
        replace(bench.file(*pair), submission=f"{number:064x}")
        for number, pair in enumerate([good, bad, (good[0], b"junk"), good])
    ]

    verdicts = bench.examiner().examine(files)

    assert [v.submission for v in verdicts] == [f.submission for f in files]
    assert [v.accepted for v in verdicts] == [True, False, False, True]
    assert bench.engine.prefills == [16]
