"""Where rounding moves the edge of top-p or top-k, log-probs differ by more, and honestly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.verify.bench import MODEL, Bench, lease_for
from verify.thresholds import BFLOAT16
from verify.truncation import Truncation, judged

LEASES = 40
TIES = (2, 20, 24)


def bench_of(directory: Path, top_p: float, top_k: int = -1, **pool: object) -> Bench:
    sampling = {"temperature": 0.8, "top_p": top_p, "top_k": top_k, "seeded": True}
    bench = Bench(directory, dtype="bfloat16", sampling=sampling, **pool)
    bench.worker.model = MODEL.in_bfloat16()
    return bench


def test_honest_outputs_of_one_token_pass_where_the_edge_moves(tmp_path: Path) -> None:
    # given answers of one token, the four of a group after the same prompt
    bench = bench_of(tmp_path, 0.5, max_new_tokens=1)
    verdicts = []
    for index in range(LEASES):
        bench.signed_lease, bench.lease = lease_for(
            bench.worker_key, bench.coordinator_key, index=index
        )
        verdicts.append(bench.verdict(bench.honest()))
    # then none is rejected
    assert [verdict.reason for verdict in verdicts if not verdict.accepted] == []
    # though in some a group is further off than rounding alone may be
    diffs = [[row.logprob_diff or 0.0 for row in verdict.rows] for verdict in verdicts]
    assert max(map(np.mean, diffs)) > BFLOAT16.logprob_submission


def test_honest_outputs_pass_where_either_of_two_tokens_is_the_only_one_kept(
    tmp_path: Path,
) -> None:
    # given a pool that keeps one token, and a lease on whose way two are as good as equal
    bench = bench_of(tmp_path, 1.0, 1, max_new_tokens=4)
    diffs = []
    for index in TIES:
        bench.signed_lease, bench.lease = lease_for(
            bench.worker_key, bench.coordinator_key, index=index
        )
        verdict = bench.verdict(bench.honest())
        assert verdict.accepted, verdict.reason
        diffs.append(np.mean([row.logprob_diff or 0.0 for row in verdict.rows]))
    assert min(diffs) > BFLOAT16.logprob_submission


def test_one_edge_moves_a_log_prob_by_the_bound_at_most() -> None:
    # given logits, and the same a little off
    rng = np.random.default_rng(0)
    rows = (3 * rng.normal(size=(4000, 40))).astype(np.float32)
    theirs = (rows + rng.uniform(-0.01, 0.01, rows.shape)).astype(np.float32)
    own, noise = np.arange(40) == rows.argmax(-1)[:, None], np.zeros_like(rows)
    for top_p in (0.3, 0.5, 0.9):
        here, there = (
            judged(np, each, noise, own, Truncation(top_p))[0] for each in (rows, theirs)
        )
        moved = np.abs(here - there).max()
        assert 0.3 < moved / -math.log(top_p) < 1.0 + 0.03 / -math.log(top_p)


def test_more_than_one_edge_is_not_explained(tmp_path: Path) -> None:
    # given outputs of up to 40 tokens, with log-probs that are off by the bound all along
    bench = bench_of(tmp_path, 0.7)
    rollouts = bench.honest()
    assert bench.verdict(rollouts).accepted
    tampered = [replace(row, logprobs=row.logprobs + math.log(0.7)) for row in rollouts]
    assert bench.verdict(tampered).reason.startswith("logprobs_submission: ")
    # or of one of them alone
    longest = max(range(len(rollouts)), key=lambda number: len(rollouts[number].output_tokens))
    alone = [*rollouts]
    alone[longest] = tampered[longest]
    assert not bench.verdict(alone).accepted
