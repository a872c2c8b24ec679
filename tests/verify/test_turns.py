"""Rollouts of several turns: honest ones pass every check, and nobody is blamed for a fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verify.bench import Bench
from tests.verify.turns import CountTask, TurnsBench
from verify.formats.turns import gaps, joined
from verify.formats.verdict import decode_verdicts, encode_verdicts


@pytest.mark.parametrize("seeded", [True, False])
def test_honest_turns_pass_and_the_verdict_says_what_stands_between_them(tmp_path, seeded):
    # given rollouts of several turns
    bench = TurnsBench(tmp_path, sampling={"temperature": 0.8, "seeded": seeded})
    rollouts = bench.honest()
    assert {len(row.turns) for row in rollouts} >= {3}
    # when they are examined
    verdict = bench.verdict(rollouts)
    # then they are accepted, and verdict and submission make the sequence that was sampled
    assert verdict.accepted, verdict.reason
    for row, said in zip(rollouts, decode_verdicts(encode_verdicts(verdict.rows)), strict=True):
        whole = joined(row.output_tokens, row.turns, said.between, said.between_lengths)
        assert whole.tokens[whole.own].tolist() == row.output_tokens.tolist()
        assert (said.between_lengths == 4).all() and len(said.between) == 4 * (len(row.turns) - 1)
        assert said.length == len(row.output_tokens)


def test_turns_of_a_task_with_one_are_rejected(tmp_path):
    bench = Bench(tmp_path)
    rows = [replace(r, turns=np.array([len(r.output_tokens)], np.int32)) for r in bench.honest()]
    assert bench.verdict(rows).reason.startswith("bounds: row 0: lengths of turns")


@pytest.mark.parametrize(
    "at_worker, turn", [(2, 2), (None, 2), (None, 1), (None, 0), (0, 0)], ids=str
)
def test_an_environment_that_fails_drops_the_group_and_blames_nobody(tmp_path, at_worker, turn):
    # given an environment that fails at a turn of the validator's or its start, also the worker's
    bench = TurnsBench(tmp_path, CountTask(breaks_at=at_worker))
    rollouts = bench.honest()
    # when what was played so far is handed in
    bench.task_set = CountTask(breaks_at=turn)
    verdict = bench.verdict(rollouts)
    # then the submission is accepted without the groups, and says where it failed
    assert verdict.accepted and verdict.dropped_groups == [0, 1], verdict
    assert verdict.fault == f"environment.py:{7 if turn else 3} hangs"
    for row, said in zip(rollouts, verdict.rows, strict=True):
        if len(row.turns) >= turn:
            assert said.between is None and said.logprobs is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6))
def test_joined_holds_every_token_once_in_order(sizes):
    turns = [n for n, _ in sizes]
    between = [[1000 + i] * gap for i, (_, gap) in enumerate(sizes[:-1])]
    output = np.arange(sum(turns), dtype=np.int32)
    whole = joined(output, turns, *gaps(between))
    assert whole.tokens[whole.own].tolist() == output.tolist()
    assert whole.tokens[~whole.own].tolist() == [t for gap in between for t in gap]
    assert whole.own[0] and whole.own[-1] and len(whole.own) == len(whole.tokens)
    assert joined(output, None, None, None).own is None
    for wrong in ([*turns, 1], [turns[0] + 1, *turns[1:]]):
        with pytest.raises(ValueError, match="turns of"):
            joined(output, wrong, *gaps(between))
