"""False rejections and detections of the checks of unseeded pools; prints JSON.

    python -m benchmarks.unseeded_checks

Two recurrent models of characters learn this repository's documentation, a larger one (the policy)
and a smaller one. A rollout continues the first characters of a line to its end. Honest samplers
compute in float32 and in bfloat16, the validator in float32. Each attack hands in rollouts that its
own way of choosing gave, prefilled by the policy. A submission of R rollouts is a random choice of
R of them, so that detection is given against its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is first imported

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from verify.checks.distribution import (
    ChosenTokensCheck,
    KeptTokensCheck,
    SubmissionChosenTokensCheck,
    evidence,
    log_ratios,
    sums,
)
from verify.checks.duplicates import fingerprints
from verify.checks.termination import EndsCheck, SubmissionEndsCheck, end_sums
from verify.choices import Choices, describe
from verify.formats.verdict import CheckResult
from verify.thresholds import BFLOAT16, FLOAT32, Limits
from verify.truncation import Truncation, thresholds

VOCAB, END, PROMPT, LONGEST = 128, 0, 8, 160
TEMPERATURE = 0.8
BATCH = 256
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rollouts of a submission; 64 is that of the shipped targets."""
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Model:
    """h_t = tanh(E[x_t] + h_{t-1} A), logits = (h_t / rms(h_t)) W."""

    embed: np.ndarray
    mix: np.ndarray
    head: np.ndarray
    dtype: Any = np.float32
    """What activations are rounded to."""

    def step(self, state: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._round(np.tanh(self.embed[tokens] + state @ self.mix))

    def logits(self, state: np.ndarray) -> np.ndarray:
        hidden = self._round(state / np.sqrt(np.mean(state**2, -1, keepdims=True) + 1e-6))
        return self._round(hidden @ self.head)

    def _round(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype).astype(np.float32)


def lines() -> np.ndarray:
    """i32 [lines, LONGEST + 1]: characters of the documentation, then the end token."""
    rows = []
    for path in sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"]):
        for line in path.read_text().splitlines():
            text = [ord(c) for c in line.strip() if 31 < ord(c) < VOCAB][:LONGEST]
            if len(text) >= 3 * PROMPT:
                rows.append(text + [END] * (LONGEST + 1 - len(text)))
    return np.array(rows, np.int32)


def trained(hidden: int, text: np.ndarray, steps: int) -> Model:
    """A model of the lines, by Adam on the cross-entropy up to the end token."""
    keys = jax.random.split(jax.random.key(hidden), 3)
    shapes = ((VOCAB, hidden), (hidden, hidden), (hidden, VOCAB))
    scales = (0.5, 0.9 / hidden**0.5, 1.0 / hidden**0.5)
    params = [s * jax.random.normal(k, n) for k, n, s in zip(keys, shapes, scales, strict=True)]
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    def loss(params: list[jax.Array], tokens: jax.Array) -> jax.Array:
        embed, mix, head = params

        def one(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(embed[token] + state @ mix)
            return state, state

        start = jnp.zeros((tokens.shape[0], hidden))
        _, states = jax.lax.scan(one, start, tokens[:, :-1].T)
        normed = states * jax.lax.rsqrt(jnp.mean(states**2, -1, keepdims=True) + 1e-6)
        logprobs = jax.nn.log_softmax(normed @ head)
        targets = tokens[:, 1:].T
        mine = jnp.take_along_axis(logprobs, targets[..., None], -1)[..., 0]
        before = tokens[:, :-1].T != END  # the end token itself is the last that counts
        return -(mine * before).sum() / before.sum()

    @jax.jit
    def update(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state, value

    state, rng = optimizer.init(params), np.random.default_rng(0)
    value = jnp.zeros(())
    for _ in range(steps):
        params, state, value = update(params, state, text[rng.integers(0, len(text), 32)])
    print(f"hidden {hidden}: loss {float(value):.3f} nats a character", file=sys.stderr)
    embed, mix, head = (np.asarray(p) for p in params)
    return Model(embed, mix, head)


Choose = Callable[[np.ndarray], np.ndarray]
"""From log-probs [B, V] at the pool's temperature to those sampled from, -inf for never."""


def sample(model: Model, prompts: np.ndarray, rng: np.random.Generator, choose: Choose) -> Any:
    """i32 [B, LONGEST] outputs, and their lengths [B]."""
    state = np.zeros((len(prompts), model.mix.shape[0]), np.float32)
    for column in prompts.T:
        state = model.step(state, column)
    outputs = np.full((len(prompts), LONGEST), END, np.int32)
    lengths = np.full(len(prompts), LONGEST)
    for place in range(LONGEST):
        seen = choose(log_softmax(model.logits(state) / TEMPERATURE))
        tokens = np.argmax(seen + rng.gumbel(size=seen.shape), -1)
        outputs[:, place] = tokens
        lengths = np.where((tokens == END) & (lengths == LONGEST), place + 1, lengths)
        state = model.step(state, tokens)
    return outputs, lengths


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Row:
    """What the validator finds of one rollout."""

    tokens: np.ndarray
    choices: Choices
    ended: bool


def prefill(
    model: Model,
    prompts: np.ndarray,
    outputs: np.ndarray,
    lengths: np.ndarray,
    rule: Truncation | None,
) -> list[Row]:
    """Rows of the policy in float32."""
    state = np.zeros((len(prompts), model.mix.shape[0]), np.float32)
    for column in prompts.T:
        state = model.step(state, column)
    places = []
    ids = np.arange(VOCAB)[None]
    for column in outputs.T:
        scaled = (model.logits(state) / TEMPERATURE).astype(np.float32)
        places.append(describe(np, scaled, ids == column[:, None], ids == END, rule))
        state = model.step(state, column)
    whole = Choices(*(np.stack(arrays, 1) for arrays in zip(*places, strict=True)))
    return [
        Row(outputs[b, :n], Choices(*(a[b, :n] for a in whole)), bool(outputs[b, n - 1] == END))
        for b, n in enumerate(lengths)
    ]


class Site:
    """The models, and who samples from them.

    Args:
        policy, smaller: the validator's, and an attacker's.
        text: lines that begin with the prompts.
        rule: what the pool cuts, as the validator sees it.
    """

    def __init__(
        self, policy: Model, smaller: Model, text: np.ndarray, rule: Truncation | None = None
    ) -> None:
        self.policy, self.smaller, self._text, self._rule = policy, smaller, text, rule

    def cutting(self, rule: Truncation) -> Site:
        """The same with another pool."""
        return Site(self.policy, self.smaller, self._text, rule)

    def rollouts(
        self, count: int, seed: int, choose: Choose = lambda p: p, *, model: Model | None = None
    ) -> list[Row]:
        """Rollouts of a way to choose, as the policy sees them."""
        return self._rows(
            count, seed, choose, model or self.policy, lambda prompt, out, n: (out, n)
        )

    def best_of(self, n: int, count: int, seed: int) -> list[Row]:
        """Of n samples of each prompt the one with the largest mean log-prob."""
        tries = [self._rows(count, seed, lambda p: p, self.policy, None, k) for k in range(n)]
        return [
            max(same, key=lambda row: float(row.choices.logprobs.mean()))
            for same in zip(*tries, strict=True)
        ]

    def truncated(self, share: float, keep: float, count: int, seed: int) -> list[Row]:
        """A share of the rollouts ends after a part of its length."""

        def cut(prompts: np.ndarray, outputs: np.ndarray, lengths: np.ndarray) -> Any:
            chosen = np.random.default_rng(seed).uniform(size=len(lengths)) < share
            shorter = np.maximum(1, (keep * lengths).astype(int))
            lengths = np.where(chosen, shorter, lengths)
            ended = outputs.copy()
            rows = np.flatnonzero(chosen)
            ended[rows, lengths[rows] - 1] = END
            return ended, lengths

        return self._rows(count, seed, lambda p: p, self.policy, cut)

    def _rows(
        self, count: int, seed: int, choose: Choose, model: Model, change: Any, attempt: int = 0
    ) -> list[Row]:
        rows: list[Row] = []
        for begin in range(0, count, BATCH):
            size = min(BATCH, count - begin)
            which = np.random.default_rng([seed, begin]).integers(0, len(self._text), size)
            prompts = self._text[which, :PROMPT]
            rng = np.random.default_rng([seed, begin, attempt])
            outputs, lengths = sample(model, prompts, rng, choose)
            if change is not None:
                outputs, lengths = change(prompts, outputs, lengths)
            rows += prefill(self.policy, prompts, outputs, lengths, self._rule)
        return rows


def never_ends(logprobs: np.ndarray) -> np.ndarray:
    """The end token is never taken."""
    return np.where(np.arange(VOCAB) == END, -np.inf, logprobs)


def top_k(k: int) -> Choose:
    return lambda p: np.where(p >= np.sort(p, -1)[:, -k][:, None], p, -np.inf)


def top_p(p: float) -> Choose:
    rule = Truncation(p)
    return lambda seen: np.where(seen >= thresholds(np, seen, rule).kept, seen, -np.inf)


def attacks(site: Site, count: int) -> dict[str, list[Row]]:
    """Rollouts of each attack."""
    return {
        "greedy": site.rollouts(count, 1, lambda p: 1e4 * p),
        "temperature x 0.5": site.rollouts(count, 2, lambda p: 2.0 * p),
        "temperature x 0.8": site.rollouts(count, 3, lambda p: p / 0.8),
        "temperature x 0.9": site.rollouts(count, 4, lambda p: p / 0.9),
        "temperature x 1.1": site.rollouts(count, 5, lambda p: p / 1.1),
        "temperature x 1.25": site.rollouts(count, 6, lambda p: p / 1.25),
        "temperature x 2": site.rollouts(count, 7, lambda p: p / 2.0),
        "top-k of 5": site.rollouts(count, 8, top_k(5)),
        "top-k of 10": site.rollouts(count, 9, top_k(10)),
        "best of 4 by log-prob": site.best_of(4, count, 10),
        "best of 16 by log-prob": site.best_of(16, count, 11),
        "smaller model": site.rollouts(count, 12, model=site.smaller),
        "smaller model, cooler": site.rollouts(count, 13, lambda p: p / 0.7, model=site.smaller),
        "all cut to a half": site.truncated(1.0, 0.5, count, 14),
        "a quarter cut to a half": site.truncated(0.25, 0.5, count, 15),
        "padded: no end before the longest": site.rollouts(count, 16, never_ends),
    }


@dataclass(frozen=True)
class Summary:
    """What the checks need of a rollout."""

    sums: np.ndarray
    ends: np.ndarray
    outside: np.ndarray
    tokens: int


def summary(row: Row, limits: Limits) -> Summary:
    ends = end_sums(row.choices, ended=row.ended, tau=limits.gap)
    outside = row.choices.outside
    return Summary(sums(row.choices, limits.gap_mean), ends, outside, len(row.tokens))


def failed(rows: Sequence[Summary], limits: Limits) -> list[str]:
    """The checks that reject a submission."""
    chosen, ends = [row.sums for row in rows], [row.ends for row in rows]
    results: list[CheckResult] = [
        *KeptTokensCheck().judged([row.outside for row in rows], limits),
        SubmissionEndsCheck().judged(ends),
        *EndsCheck().judged(ends),
        SubmissionChosenTokensCheck().judged(chosen),
        *ChosenTokensCheck().judged(chosen),
    ]
    return sorted({result.name for result in results if not result.passed})


def honest(rows: list[Row], limits: Limits, size: int) -> dict[str, Any]:
    """False rejections, and how often numbers are reached that chance may reach."""
    found = [summary(row, limits) for row in rows]
    submissions = [found[n : n + size] for n in range(0, len(found), size)]
    alone = np.array([evidence(row.sums)[0] for row in found])
    together = np.array([evidence(np.sum([r.sums for r in s], 0))[0] for s in submissions])
    ends = np.array([evidence(row.ends)[0] for row in found])
    ratios = np.concatenate([np.exp(log_ratios(row.choices)) for row in rows])
    return {
        "rollouts": len(rows),
        "tokens": sum(row.tokens for row in found),
        "submissions": len(submissions),
        "rejected_submissions": sum(bool(failed(s, limits)) for s in submissions),
        "largest_evidence": {
            "chosen_tokens": alone.max(),
            "chosen_tokens_submission": together.max(),
            "ends": ends.max(),
            "ends_submission": max(
                evidence(np.sum([row.ends for row in s], 0))[0] for s in submissions
            ),
        },
        "share_of_rollouts_with_evidence_of": {
            str(odds): {
                "chosen_tokens": float((alone >= np.log(odds)).mean()),
                "ends": float((ends >= np.log(odds)).mean()),
            }
            for odds in (10, 100, 1000)
        },
        "mean_ratio_less_one": {
            "of_alternatives": [round(float(x), 6) for x in ratios.mean(0) - 1],
            "standard_errors": [round(float(x), 6) for x in ratios.std(0) / np.sqrt(len(ratios))],
        },
    }


def detection(rows: list[Row], limits: Limits, trials: int) -> list[dict[str, Any]]:
    """The share of submissions that is rejected, by their size."""
    found = [summary(row, limits) for row in rows]
    rng = np.random.default_rng(0)
    table = []
    for size in SIZES:
        chosen = [
            [found[i] for i in rng.choice(len(found), size, replace=False)] for _ in range(trials)
        ]
        names = [failed(submission, limits) for submission in chosen]
        tokens = [sum(row.tokens for row in submission) for submission in chosen]
        table.append(
            {
                "rollouts": size,
                "tokens": round(float(np.mean(tokens))),
                "detected": float(np.mean([bool(n) for n in names])),
                "by": {
                    kind: float(np.mean([any(n.startswith(kind) for n in ns) for ns in names]))
                    for kind in ("ends", "chosen_tokens", "kept_tokens")
                },
            }
        )
    return table


def distance(rows: list[Row]) -> float:
    """Mean log-prob of the chosen tokens above minus the entropy, nats: 0 for honest sampling."""
    # H = - d/da log sum p^a at a = 1, by the two powers next to it
    above = [
        row.choices.logprobs - (row.choices.log_powers[:, 3] - row.choices.log_powers[:, 2]) / 0.25
        for row in rows
    ]
    return float(np.concatenate(above).mean())


def duplicates(rows: list[Row], per_trial: int = 200) -> dict[str, Any]:
    """Copies that are found, whole and edited, and honest rollouts that share a run."""
    prints = [fingerprints(row.tokens, row.choices.logprobs) for row in rows]
    compared = [n for n, found in enumerate(prints) if found]
    owners: dict[int, int] = {}
    alike = sum(owners.setdefault(p, n) != n for n in compared for p in prints[n])
    rng, detected = np.random.default_rng(0), {}
    for edits in (0, 1, 2, 4):
        hits = 0
        for n in compared[:per_trial]:
            tokens = rows[n].tokens.copy()
            places = rng.integers(0, len(tokens), edits)
            tokens[places] = rng.integers(32, VOCAB, edits)
            hits += bool(set(fingerprints(tokens, rows[n].choices.logprobs)) & set(prints[n]))
        detected[str(edits)] = hits / len(compared[:per_trial])
    return {
        "honest_rollouts": len(rows),
        "of_64_nats": len(compared),
        "fingerprints": len(owners),
        "shared_by_honest_rollouts": alike,
        "mean_tokens_of_those": float(np.mean([len(rows[n].tokens) for n in compared])),
        "copies_found_by_edited_tokens": detected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=12800, help="honest rollouts a precision")
    parser.add_argument("--attacking", type=int, default=1024, help="rollouts an attack")
    parser.add_argument("--trials", type=int, default=1000, help="submissions a size")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    options = parser.parse_args()
    text = lines()
    policy, smaller = (trained(hidden, text, options.steps) for hidden in (128, 24))
    site = Site(policy, smaller, text)
    rounding = replace(policy, dtype=ml_dtypes.bfloat16)
    found: dict[str, Any] = {"benchmark": "unseeded_checks", "honest": {}, "attacks": {}}
    for name, model, limits in (
        ("float32", policy, FLOAT32),
        ("bfloat16 sampler", rounding, BFLOAT16),
    ):
        rows = site.rollouts(options.honest, 100, model=model)
        found["honest"][name] = honest(rows, limits, SIZES[-1])
        if name == "float32":
            found["duplicates"] = duplicates(rows)
    nucleus = site.cutting(Truncation(0.9, margin=BFLOAT16.gap))
    rows = nucleus.rollouts(options.honest, 101, top_p(0.9), model=rounding)
    found["honest"]["bfloat16 sampler, top-p 0.9"] = honest(rows, BFLOAT16, SIZES[-1])
    for name, kept in (("top-p 0.9 ignored", 1.0), ("top-p 0.8 for 0.9", 0.8)):
        rows = nucleus.rollouts(options.attacking, 17, top_p(kept), model=rounding)
        found["attacks"][name] = {"bfloat16 limits": detection(rows, BFLOAT16, options.trials)}
    for name, rows in attacks(site, options.attacking).items():
        found["attacks"][name] = {
            "mean_logprob_above_minus_entropy": distance(rows),
            "float32": detection(rows, FLOAT32, options.trials),
            "bfloat16 limits": detection(rows, BFLOAT16, options.trials),
        }
        print(name, file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
