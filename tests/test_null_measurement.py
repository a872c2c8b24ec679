"""What the benchmark of forged proofs says of what it judged (`benchmarks.toploc_null`)."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from benchmarks import toploc_null
from benchmarks.null import collisions
from benchmarks.null.forgeries import Library, TokenTable
from benchmarks.null.judging import ACCEPTED, DECIDED, NullTests, chunks_of, compared, judged
from benchmarks.null.models import Model
from benchmarks.null.summary import explained, summary, upper_bound
from benchmarks.null.text_model import SEQUENCE, Size, rollouts, transformers_model, windows
from benchmarks.toploc_null import judgements
from learner_jax.model import init_params
from verify.checks.prefill import judge_proofs, null_test_of
from verify.thresholds import BFLOAT16, NULL_BITS
from verify.toploc import build_proofs_batch

WIDTH = 64


def states(count: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(count, 32, WIDTH)).astype(np.float32)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def rows(*windows: list[tuple[int, int, int]]) -> np.ndarray:
    """Hits, how many more were required, flags; of each chunk of each window."""
    return np.array(windows, np.int16)


class TestSummary:
    def test_a_window_is_forged_where_every_decided_chunk_of_it_passes(self) -> None:
        # given windows of two chunks: one passed whole, one in part, one undecided, one refused
        passed, refused = (110, -2, DECIDED + ACCEPTED), (60, 48, DECIDED)
        undecided = (128, -20, ACCEPTED)

        # when they are summed up
        found = summary(
            rows([passed, undecided], [passed, refused], [undecided, undecided], [refused, refused])
        )

        # then what was not decided proves nothing, and one refused chunk is enough
        assert (found["chunks"], found["decided"], found["pass_decided"]) == (8, 5, 2)
        assert (found["windows"], found["windows_pass"], found["windows_pass_some"]) == (3, 1, 2)

    def test_chunks_that_come_near_together_are_said_to(self) -> None:
        # given windows of two chunks alike, and others that are independent
        rng = np.random.default_rng(1)
        short = rng.integers(1, 100, (20000, 2))
        alike = np.stack([short[:, 0], short[:, 0]], axis=1)

        def measured(values: np.ndarray) -> float:
            flags = np.full_like(values, DECIDED)
            return summary(np.stack([100 - values, values, flags], axis=2))["together"]

        # then the factor is 1 where they are independent, and the inverse share where they are one
        assert 0.5 < measured(short) < 1.7
        assert measured(alike) > 50

    @pytest.mark.parametrize("passed, tried", [(0, 100), (0, 54000), (3, 200), (10, 12)])
    def test_the_bound_is_clopper_and_pearsons(self, passed: int, tried: int) -> None:
        rate = upper_bound(passed, tried)
        chance = sum(
            comb(tried, n) * rate**n * (1 - rate) ** (tried - n) for n in range(passed + 1)
        )
        assert chance == pytest.approx(0.05, rel=1e-6)
        if passed == 0:
            assert rate == pytest.approx(1 - 0.05 ** (1 / tried))

    def test_what_a_table_explains_is_not_decided_by_the_rule_that_counts_it(self) -> None:
        # given two chunks that a forger passes, of which somebody else's table hits one
        forged = rows([(110, -2, DECIDED + ACCEPTED), (110, -2, DECIDED + ACCEPTED)])
        known = rows([(105, 3, DECIDED), (20, 88, DECIDED)])
        assert explained(forged, known) == {"decided": 1, "pass_decided": 1}


class TestJudging:
    def test_a_judgement_is_that_of_the_check(self) -> None:
        # given honest proofs of near and of far activations
        true = states(30, seed=1)
        claims = np.concatenate([true[:10], states(20, seed=2)])
        proofs = [proof for [proof] in build_proofs_batch(list(claims))]

        # then hits, what is missing and the flags are what the rules say one by one
        found = list(compared(true, proofs))
        for row, s in zip(judged(found, NullTests()), found, strict=True):
            test = null_test_of(s, BFLOAT16)
            assert row[0] == 128 - s.misses[test.radius]
            assert row[1] == s.misses[test.radius] - test.allowed
            accepted = all(result.passed for result in judge_proofs([s], BFLOAT16))
            assert bool(row[2] & ACCEPTED) == accepted
            assert bool(row[2] & DECIDED) == (test.bits >= NULL_BITS)

    def test_windows_are_drawn_in_a_random_order_and_once(self) -> None:
        text = np.arange(400 * SEQUENCE, dtype=np.uint32) // SEQUENCE  # a window's own number
        found = np.concatenate([windows(text, 0, 100), windows(text, 100, 220)])
        assert (found == found[:, :1]).all()
        assert sorted(found[:, 0]) == list(range(80, 400)) != list(found[:, 0])
        with pytest.raises(ValueError, match="320 windows"):
            windows(text, 300, 21)

    def test_chunks_come_with_the_tokens_before_them(self) -> None:
        tokens = np.arange(2 * 256).reshape(2, 256)
        hidden = np.repeat(tokens[:, 32:, None], WIDTH, axis=2).astype(np.uint16)
        for chunk, read in zip(*vars(chunks_of(hidden, tokens)).values(), strict=True):
            assert (read[-32:] == chunk[:, 0]).all() and (np.diff(read) == 1).all()


class TestRuns:
    def test_a_run_that_goes_on_judges_what_one_run_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # given a model whose states follow from the tokens
        table = np.random.default_rng(11).normal(size=(256, WIDTH)).astype(ml_dtypes.bfloat16)

        def tokens(first: int, count: int) -> np.ndarray:
            rng = np.random.default_rng(12).spawn(first + count)
            return np.stack([each.integers(0, 256, SEQUENCE) for each in rng[first:]])

        def hidden(read: np.ndarray) -> np.ndarray:
            return (table[read[:, 32:]] + table[read[:, 31:-1]]).view(np.uint16)

        model = Model("tiny", WIDTH, 1, None, tokens, hidden, lambda _: iter(()), b"tiny")

        # when twelve windows are judged at once, or three of them first
        whole = judgements(model, 3, 12, None)
        judgements(model, 3, 3, tmp_path)
        parts = judgements(model, 3, 12, tmp_path)

        # then the judgements are the same, a tenth of the windows for forgeries that rules refuse
        assert {name: len(rows) for name, rows in whole.items()} == {
            name: 2 if name.startswith(("constant", "channels")) or name == "cells" else 12
            for name in whole
        }
        assert whole.keys() == parts.keys()
        assert all((whole[name] == parts[name]).all() for name in whole)

        # and fewer windows than are kept are those that so many would have been
        fewer = judgements(model, 3, 11, None)
        cut = judgements(model, 3, 11, tmp_path)
        assert all(np.array_equal(cut[name], fewer[name]) for name in whole)

        # and what was kept of another text, or under other limits, is not taken for these
        assert len(list(tmp_path.iterdir())) == 1
        judgements(replace(model, source=b"another"), 3, 3, tmp_path)
        monkeypatch.setattr(toploc_null, "BFLOAT16", replace(BFLOAT16, miss_share=0.01))
        judgements(model, 3, 3, tmp_path)
        assert len(list(tmp_path.iterdir())) == 3

    def test_a_rollout_is_sampled_from_the_models_own_logits(self) -> None:
        # given a model and prompts of all but eight tokens
        size = Size(64, 1, 0, 0, 0.0)
        model = transformers_model(init_params(size.config, jax.random.key(1)), size, "float32")
        prompts = np.random.default_rng(13).integers(1, 256, (3, SEQUENCE - 8)).astype(np.int32)

        # when it continues them
        found = rollouts(model, prompts, seed=5)

        # then each token is the argmax of the logits of a pass over the whole, and the noise
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(found.astype(np.int64))).logits.numpy()
        rng = np.random.default_rng(5)
        assert (found[:, :-8] == prompts).all()
        for place in range(SEQUENCE - 8, SEQUENCE):
            noise = rng.gumbel(size=(3, 256)).astype(np.float32)
            assert (found[:, place] == (logits[:, place - 1] + noise).argmax(axis=1)).all()


class TestTokenTable:
    def test_the_longest_context_met_is_looked_up(self) -> None:
        # given a library where a state is the sum of the last three tokens
        rng = np.random.default_rng(4)
        tokens = rng.integers(0, 3, (50, 34)).astype(np.int32)
        sums = tokens[:, :-2] + 10 * tokens[:, 1:-1] + 100 * tokens[:, 2:]
        hidden = np.repeat(sums[..., None], WIDTH, axis=2).astype(ml_dtypes.bfloat16)
        table = TokenTable(Library(hidden.view(np.uint16), tokens))

        # then a table of three tokens gives it of other text
        other = rng.integers(0, 3, (5, 34)).astype(np.int32)
        wanted = other[:, :-2] + 10 * other[:, 1:-1] + 100 * other[:, 2:]
        found = table.states(other).view(ml_dtypes.bfloat16)[..., 0]
        assert (found == wanted.astype(ml_dtypes.bfloat16)).all()

    def test_where_no_context_was_met_it_gives_the_mean(self) -> None:
        tokens = np.zeros((4, 34), np.int32)
        table = TokenTable(Library(states(4, seed=6), tokens))
        mean = states(4, seed=6).view(ml_dtypes.bfloat16).astype(np.float32).mean(axis=(0, 1))
        found = table.states(tokens + 1).view(ml_dtypes.bfloat16).astype(np.float32)
        assert np.allclose(found, mean, atol=1e-2)

    def test_a_context_needs_the_tokens_before_the_chunk(self) -> None:
        with pytest.raises(ValueError, match="contexts of 4 tokens"):
            TokenTable(Library(states(1, seed=6), np.zeros((1, 34), np.int32)), (4,))


class TestCollisions:
    def test_no_proof_fixed_beforehand_passes_more_than_the_bound(self) -> None:
        # given chunks of which a third are noise around one and the same chunk
        base = states(1, seed=7).view(ml_dtypes.bfloat16).astype(np.float32)
        rng = np.random.default_rng(8)

        def sample(count: int) -> np.ndarray:
            near = base * (1 + 0.002 * rng.normal(size=(count, 32, WIDTH)))
            near = near.astype(ml_dtypes.bfloat16).view(np.uint16)
            alike = rng.random(count) < 1 / 3
            return np.where(alike[:, None, None], near, states(count, int(rng.integers(1 << 30))))

        # when the bound is measured, a chunk a window, and the proof of that chunk is tried
        left, right = sample(150), sample(150)
        found = collisions.bound(left[:, None], right[:, None])
        proof = [
            p for [p] in build_proofs_batch([base[0].astype(ml_dtypes.bfloat16).view(np.uint16)])
        ]
        accepted = judged(list(compared(left, proof * len(left))), NullTests())[:, 2] & ACCEPTED > 0

        # then it passes a third, and the bound is above
        assert 0.2 < accepted.mean() <= float(found["pass_below"]) <= float(found["pass_below_95"])

    def test_chunks_that_have_nothing_in_common_leave_next_to_nothing(self) -> None:
        found = collisions.bound(*(states(200, seed=n)[:, None] for n in (9, 10)))
        assert found["required_least"] >= 90 and float(found["pass_below"]) < 0.01

    def test_a_window_counts_once_however_many_chunks_it_has(self) -> None:
        # given windows of one chunk, and those where it stands three times
        windows = [states(60, seed=n)[:, None] for n in (9, 10)]
        once = collisions.bound(*windows)
        thrice = collisions.bound(*(np.repeat(each, 3, axis=1) for each in windows))

        # then there are nine times the pairs of chunks and as many of windows, and the same bound
        assert once["window_pairs"] == 30
        assert thrice == {**once, "pairs": 9 * once["pairs"]}

    def test_what_the_bound_is_measured_on_fixes_nothing(self) -> None:
        # given second halves of windows that have nothing in common, or are one and the same
        left, right = (states(60, seed=n)[:, None] for n in (9, 10))
        alike = np.repeat(states(1, seed=11)[None], 30, axis=0)
        halves = (np.concatenate([each[:30], alike]) for each in (left, right))
        apart, same = collisions.bound(left, right), collisions.bound(*halves)

        # then as many agreements are asked for, and where all are alike the bound says nothing
        assert all(apart[name] == same[name] for name in ("required_least", "t_95", "pass_below"))
        assert (same["window_pairs_agree"], float(same["pass_below_95"])) == (30, 1.0)
        assert apart["window_pairs_agree"] == 0 and float(apart["pass_below_95"]) < 1

    def test_where_nothing_is_decided_nothing_is_said(self) -> None:
        alike = np.full((50, 1, 32, WIDTH), 0x3F80, np.uint16)
        assert collisions.bound(alike, alike) == {}
