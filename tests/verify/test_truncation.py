"""Top-k and top-p: one rule in three libraries, and what honest rounding may do to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from verify.truncation import Truncation, judged, kept_from, thresholds

VOCABULARY = 300
RULES = [
    Truncation(0.9, -1),
    Truncation(0.05, -1),
    Truncation(1.0, 20),
    Truncation(1.0, 1),
    Truncation(0.7, 30),
    Truncation(0.99, 1000),
]


def logits(rows: int = 200, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(rows, VOCABULARY))).astype(np.float32)


def arguments(rule: Truncation) -> dict[str, Any]:
    return {
        "top_p": rule.top_p if rule.top_p < 1.0 else None,
        "top_k": rule.top_k if rule.top_k > 0 else None,
    }


def kept_by_sorting(row: np.ndarray, rule: Truncation) -> np.ndarray:
    """The definition, in float64: bool [V]."""
    order = np.argsort(-row, kind="stable")
    kept = np.zeros(len(row), bool)
    kth = row[order[min(rule.top_k, len(row)) - 1]] if rule.top_k > 0 else -np.inf
    left = [token for token in order if row[token] >= kth]
    weights = np.exp(row[left].astype(np.float64) - row.max())
    weights /= weights.sum()
    for token in left:
        before = weights[row[left] > row[token]].sum()
        kept[token] = before < rule.top_p
    return kept


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_numpy_keeps_what_the_definition_keeps(rule: Truncation) -> None:
    rows = logits()
    least = kept_from(np, rows, **arguments(rule))
    assert least.shape == (len(rows), 1) and least.dtype == np.float32
    expected = np.stack([kept_by_sorting(row, rule) for row in rows])
    # A sum in float32 may fall on the other side of top_p than one in float64.
    assert ((rows >= least) == expected).all(axis=1).mean() > 0.99
    assert (rows == least).any(axis=1).all()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_and_jax_keep_the_same(rule: Truncation) -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    rows = logits()
    here = kept_from(np, rows, **arguments(rule))

    def loop(count: int, step: Any, state: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)

    compiled = jax.jit(lambda x: kept_from(jax.numpy, x, **arguments(rule), repeat=loop))
    for there in (
        kept_from(torch, torch.from_numpy(rows), **arguments(rule)).numpy(),
        np.asarray(compiled(rows)),
    ):
        assert (there == here).mean() > 0.99  # else a sum was rounded across top_p


def test_equals_at_the_threshold_share_their_fate() -> None:
    row = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert (row >= kept_from(np, row, top_k=2)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.5)).tolist() == [True] * 4
    assert (row >= kept_from(np, row, top_p=0.3)).tolist() == [True, False, False, False]


@settings(deadline=None, max_examples=200)
@given(
    row=arrays(np.float32, 40, elements=st.floats(-8, 8, width=32)),
    top_p=st.floats(0.05, 0.99),
    top_k=st.sampled_from([-1, 1, 5, 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_a_sampler_keeps_is_allowed_and_what_is_sure_it_keeps(
    row: np.ndarray, top_p: float, top_k: int, seed: int
) -> None:
    """Whatever each z is off by, up to half the margin."""
    margin = 0.1
    off = np.random.default_rng(seed).uniform(-margin / 2, margin / 2, row.shape)
    sampler = (row + off).astype(np.float32)
    # Exact equals at the kth place would be kept beyond k by one side alone: no rounding does that.
    if len(np.unique(row)) < len(row):
        row = row + np.arange(len(row), dtype=np.float32) * 1e-5
        sampler = (row + off).astype(np.float32)
    theirs = sampler >= kept_from(np, sampler, **arguments(Truncation(top_p, top_k)))

    ours = thresholds(np, row, Truncation(top_p, top_k, margin))

    slack = 1e-4  # float32 sums
    assert (row[theirs] >= ours.allowed - slack).all()
    assert theirs[row >= ours.sure + slack].all()
    assert ours.allowed <= ours.kept


@settings(deadline=None, max_examples=100)
@given(
    row=arrays(np.float32, 40, elements=st.floats(-8, 8, width=32)),
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


def test_the_last_one_kept_is_sure_where_the_next_is_far() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for rule in (
        Truncation(top_k=2, margin=0.1),
        Truncation(top_p=0.7, margin=0.1),
        Truncation(top_p=0.7, top_k=3, margin=0.1),
        Truncation(top_p=0.9, top_k=2, margin=0.1),
    ):
        found = thresholds(np, row, rule)
        assert (row >= found.kept).tolist() == (row >= found.sure).tolist() == [1, 1, 0, 0]
    # all, where there are no more
    assert (row >= thresholds(np, row, Truncation(top_k=4, margin=0.1)).sure).all()
    assert (row >= thresholds(np, row, Truncation(0.999, 9, margin=0.1)).sure).all()
    # and not where the mass before it is as good as top_p
    found = thresholds(np, row, Truncation(top_p=0.501, margin=0.1))
    assert (row >= found.kept).tolist() == [1, 1, 0, 0]
    assert (row >= found.sure).tolist() == [1, 0, 0, 0]


def test_torch_and_jax_are_sure_of_the_same() -> None:
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    rows = logits(50)
    for rule in (Truncation(0.9, -1, 0.1), Truncation(1.0, 20, 0.1), Truncation(0.7, 30, 0.1)):
        here = rows >= thresholds(np, rows, rule).sure
        there = torch.from_numpy(rows)
        assert ((there >= thresholds(torch, there, rule).sure).numpy() == here).mean() > 0.999
        there = jax.numpy.asarray(rows)
        assert (np.asarray(there >= thresholds(jax.numpy, there, rule).sure) == here).mean() > 0.999


def test_of_two_all_but_equal_either_may_be_the_only_one_kept() -> None:
    row = np.log(np.array([0.48, 0.47, 0.05], np.float32))
    noise = np.array([9.0, 0.0, 0.0], np.float32)

    for rule in (Truncation(top_k=1, margin=0.1), Truncation(top_p=0.4, margin=0.1)):
        first, second, third = (
            judged(np, row, noise, np.arange(3) == token, rule)[1] for token in range(3)
        )
        assert first == second == 0.0
        assert third > 1.0


def test_a_token_outside_is_as_far_below_as_its_distance_and_the_margin() -> None:
    row = np.array([4.0, 3.0, -5.0], np.float32)
    rule = Truncation(top_k=2, margin=0.1)
    noise = np.array([0.0, 0.0, 50.0], np.float32)  # it would win easily, were it kept

    logprob, gap = judged(np, row, noise, np.arange(3) == 2, rule)

    assert gap == pytest.approx(0.1 + (3.0 - 0.1) + 5.0)
    assert np.isfinite(logprob)


@pytest.mark.parametrize("rule", [Truncation(0.9, 5, 0.1), Truncation(0.5, -1, 0.1)], ids=str)
def test_the_tail_of_honest_rounding_makes_exceptions_not_forgeries(rule: Truncation) -> None:
    # given a sampler whose logits are off by more than the margin allows for, seldom as that is
    rows, rng = 2 * logits(3000), np.random.default_rng(1)
    theirs = (rows + rng.uniform(-0.2, 0.2, rows.shape)).astype(np.float32)
    noise = rng.gumbel(size=rows.shape).astype(np.float32)
    kept = theirs >= kept_from(np, theirs, **arguments(rule))
    tokens = np.where(kept, theirs + noise, -np.inf).argmax(-1)

    _, gaps = judged(np, rows, noise, np.arange(VOCABULARY) == tokens[:, None], rule)

    assert gaps.max() <= 2 * 0.2 + 1e-4  # what their logits may differ by, and no jump beyond
    assert (gaps > rule.margin).any()


def test_log_probs_are_of_the_tokens_kept() -> None:
    row = np.array([4.0, 3.0, -5.0], np.float32)
    logprob, gap = judged(np, row, np.zeros(3, np.float32), np.arange(3) == 1, Truncation(top_k=2))
    assert logprob == pytest.approx(-np.log(1 + np.e), abs=1e-6)
    assert gap == 1.0
