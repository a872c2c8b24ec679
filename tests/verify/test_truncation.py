"""Top-k and top-p: one rule in three libraries, and what honest rounding may do at its edge."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.verify.bench import MODEL, Bench, lease_for
from verify.thresholds import BFLOAT16
from verify.truncation import Truncation, judged, kept_from, thresholds

pytestmark = pytest.mark.slow

VOCABULARY = 300
RULES = [
    *(Truncation(0.9, -1), Truncation(0.05, -1), Truncation(1.0, 20), Truncation(1.0, 1)),
    *(Truncation(0.7, 30), Truncation(0.99, 1000)),
]
SMALL_ROWS = arrays(np.float32, 40, elements=st.floats(-8, 8, width=32))


def logits(rows: int = 200, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(rows, VOCABULARY))).astype(np.float32)


def arguments(rule: Truncation) -> dict[str, Any]:
    return {
        "top_p": rule.top_p if rule.top_p < 1.0 else None,
        "top_k": rule.top_k if rule.top_k > 0 else None,
    }


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


def kept_by_sorting(row: np.ndarray, rule: Truncation) -> np.ndarray:
    """The definition, in float64: bool [V]."""
    order = np.argsort(-row, kind="stable")
    kept = np.zeros(len(row), bool)
    kth = row[order[min(rule.top_k, len(row)) - 1]] if rule.top_k > 0 else -np.inf
    left = [token for token in order if row[token] >= kth]
    weights = np.exp(row[left].astype(np.float64) - row.max())
    weights /= weights.sum()
    for token in left:
        kept[token] = weights[row[left] > row[token]].sum() < rule.top_p
    return kept


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_library_keeps_what_the_definition_keeps(rule: Truncation) -> None:
    rows = logits()
    least = kept_from(np, rows, **arguments(rule))
    assert least.shape == (len(rows), 1) and least.dtype == np.float32
    expected = np.stack([kept_by_sorting(row, rule) for row in rows])
    # A sum in float32 may fall on the other side of top_p than one in float64.
    assert ((rows >= least) == expected).all(axis=1).mean() > 0.99
    assert (rows == least).any(axis=1).all()

    def loop(count: int, step: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)

    compiled = jax.jit(lambda x: kept_from(jax.numpy, x, **arguments(rule), repeat=loop))
    in_torch = torch.from_numpy(rows)
    assert (kept_from(torch, in_torch, **arguments(rule)).numpy() == least).mean() > 0.99
    assert (np.asarray(compiled(rows)) == least).mean() > 0.99
    # and they are sure of the same where both may be off
    margin = replace(rule, margin=0.1)
    here = rows >= thresholds(np, rows, margin).sure
    theirs = (in_torch >= thresholds(torch, in_torch, margin).sure).numpy()
    assert (theirs == here).mean() > 0.999
    assert (np.asarray(rows >= thresholds(jax.numpy, rows, margin).sure) == here).mean() > 0.999


def test_equals_at_the_threshold_share_their_fate() -> None:
    row = logs(0.4, 0.2, 0.2, 0.2)
    assert (row >= kept_from(np, row, top_k=2)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.5)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.3)).tolist() == [True, False, False, False]


@settings(max_examples=100, derandomize=True)
@given(
    row=SMALL_ROWS,
    top_p=st.floats(0.05, 0.99),
    top_k=st.sampled_from([-1, 1, 5, 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_a_sampler_keeps_is_allowed_and_what_is_sure_it_keeps(
    row: np.ndarray, top_p: float, top_k: int, seed: int
) -> None:
    """Whatever each logit is off by, up to half the margin."""
    off = np.random.default_rng(seed).uniform(-0.05, 0.05, row.shape)
    # Exact equals at the kth place would be kept beyond k by one side alone: no rounding does that.
    if len(np.unique(row)) < len(row):
        row = row + np.arange(len(row), dtype=np.float32) * 1e-5
    sampler = (row + off).astype(np.float32)
    theirs = sampler >= kept_from(np, sampler, **arguments(Truncation(top_p, top_k)))
    ours = thresholds(np, row, Truncation(top_p, top_k, 0.1))
    slack = 1e-4  # float32 sums
    assert (row[theirs] >= ours.allowed - slack).all()
    assert theirs[row >= ours.sure + slack].all()
    assert ours.allowed <= ours.kept


@settings(max_examples=60, derandomize=True)
@given(
    row=SMALL_ROWS,
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([-1, 1, 5, 20, 39, 40, 50]),
)
def test_what_is_sure_is_kept_in_the_worst_case_and_nothing_more_is_left_open(
    row: np.ndarray, top_p: float, top_k: int
) -> None:
    """Of the least that is sure all others move up, and it down."""
    rule, margin = Truncation(top_p, top_k, 0.1), 0.1
    if not rule.cuts:
        return
    sure = np.flatnonzero(row >= thresholds(np, row, rule).sure)
    left = np.setdiff1d(np.flatnonzero(row >= thresholds(np, row, rule).kept), sure)

    def in_the_worst_case(token: int, by: float) -> bool:
        moved = row + np.float32(by / 2)
        moved[token] -= np.float32(by)
        return bool(moved[token] >= kept_from(np, moved, **arguments(rule))[0])

    if len(sure):
        assert in_the_worst_case(sure[row[sure].argmin()], margin - 1e-3)
    if len(left) and top_p == 1.0:
        assert not in_the_worst_case(left[row[left].argmax()], margin + 1e-3)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept", "sure"),
    [
        *((1.0, 2, 2, 2), (0.7, -1, 2, 2), (0.7, 3, 2, 2), (0.9, 2, 2, 2)),
        *((1.0, 4, 4, 4), (0.999, 9, 4, 4)),  # all, where there are no more
        (0.501, -1, 2, 1),  # the mass before the second is as good as top_p
    ],
)
def test_the_last_one_kept_is_sure_where_the_next_is_far(
    top_p: float, top_k: int, kept: int, sure: int
) -> None:
    row = logs(0.5, 0.3, 0.15, 0.05)
    found = thresholds(np, row, Truncation(top_p, top_k, margin=0.1))
    assert ((row >= found.kept).sum(), (row >= found.sure).sum()) == (kept, sure)


def test_gaps_and_log_probs_are_of_the_tokens_that_may_be_kept() -> None:
    # of two all but equal either may be the only one
    row, noise = logs(0.48, 0.47, 0.05), np.array([9.0, 0.0, 0.0], np.float32)
    for rule in (Truncation(top_k=1, margin=0.1), Truncation(top_p=0.4, margin=0.1)):
        gaps = [judged(np, row, noise, np.arange(3) == token, rule)[1] for token in range(3)]
        assert gaps[0] == gaps[1] == 0.0 and gaps[2] > 1.0
    # one outside, which would win were it kept, is as far below as its distance and the margin
    row, noise = np.array([4.0, 3.0, -5.0], np.float32), np.array([0.0, 0.0, 50.0], np.float32)
    logprob, gap = judged(np, row, noise, np.arange(3) == 2, Truncation(top_k=2, margin=0.1))
    assert gap == pytest.approx(0.1 + (3.0 - 0.1) + 5.0) and np.isfinite(logprob)
    # and a log-prob is of those kept alone
    logprob, gap = judged(np, row, 0 * noise, np.arange(3) == 1, Truncation(top_k=2))
    assert logprob == pytest.approx(-np.log(1 + np.e), abs=1e-6) and gap == 1.0


@pytest.mark.parametrize("rule", [Truncation(0.9, 5, 0.1), Truncation(0.5, -1, 0.1)], ids=str)
def test_the_tail_of_honest_rounding_makes_exceptions_not_forgeries(rule: Truncation) -> None:
    # given a sampler whose logits are off by more than the margin allows for, seldom as that is
    rows, rng = 2 * logits(2000), np.random.default_rng(1)
    theirs = (rows + rng.uniform(-0.2, 0.2, rows.shape)).astype(np.float32)
    noise = rng.gumbel(size=rows.shape).astype(np.float32)
    kept = theirs >= kept_from(np, theirs, **arguments(rule))
    tokens = np.where(kept, theirs + noise, -np.inf).argmax(-1)
    _, gaps = judged(np, rows, noise, np.arange(VOCABULARY) == tokens[:, None], rule)
    assert gaps.max() <= 2 * 0.2 + 1e-4  # what their logits may differ by, and no jump beyond
    assert (gaps > rule.margin).any()


def test_one_edge_moves_a_log_prob_by_the_bound_at_most() -> None:
    # given logits, and the same a little off
    rng = np.random.default_rng(0)
    rows = (3 * rng.normal(size=(4000, 40))).astype(np.float32)
    theirs = (rows + rng.uniform(-0.01, 0.01, rows.shape)).astype(np.float32)
    own, noise = np.arange(40) == rows.argmax(-1)[:, None], np.zeros_like(rows)
    for top_p in (0.3, 0.5, 0.9):
        here, there = (judged(np, z, noise, own, Truncation(top_p))[0] for z in (rows, theirs))
        moved = np.abs(here - there).max()
        assert 0.3 < moved / -math.log(top_p) < 1.0 + 0.03 / -math.log(top_p)


# --- submissions of pools that cut --------------------------------------------------------------


def bench_of(directory: Path, top_p: float, top_k: int = -1, **pool: object) -> Bench:
    sampling = {"temperature": 0.8, "top_p": top_p, "top_k": top_k, "seeded": True}
    bench = Bench(directory, dtype="bfloat16", sampling=sampling, **pool)
    bench.worker.model = MODEL.in_bfloat16()
    return bench


@pytest.mark.parametrize(
    ("top_p", "top_k", "most", "leases"), [(0.5, -1, 1, range(40)), (1.0, 1, 4, (2, 20, 24))]
)
def test_honest_outputs_pass_where_the_edge_moves(
    tmp_path: Path, top_p: float, top_k: int, most: int, leases: range
) -> None:
    """Answers of one token after the same prompt; and two tokens of which one is kept."""
    bench = bench_of(tmp_path, top_p, top_k, max_new_tokens=most)
    diffs = []
    for index in leases:
        bench.signed_lease, bench.lease = lease_for(
            bench.worker_key, bench.coordinator_key, index=index
        )
        verdict = bench.verdict(bench.honest())
        assert verdict.accepted, verdict.reason
        diffs.append(np.mean([row.logprob_diff or 0.0 for row in verdict.rows]))
    # though in some a group is further off than rounding alone may be
    assert max(diffs) > BFLOAT16.logprob_submission


def test_more_than_one_edge_is_not_explained(tmp_path: Path) -> None:
    # given outputs of up to 40 tokens, with log-probs that are off by the bound all along
    bench = bench_of(tmp_path, 0.7)
    rollouts = bench.honest()
    assert bench.verdict(rollouts).accepted
    tampered = [replace(row, logprobs=row.logprobs + math.log(0.7)) for row in rollouts]
    assert bench.verdict(tampered).reason.startswith("logprobs_submission: ")
    # or of one of them alone
    longest = max(range(len(rollouts)), key=lambda number: len(rollouts[number].output_tokens))
    rollouts[longest] = tampered[longest]
    assert not bench.verdict(rollouts).accepted
