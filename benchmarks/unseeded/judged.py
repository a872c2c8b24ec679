"""What the checks of unseeded pools say of rollouts: false rejections, detections, copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.unseeded.models import VOCAB
from benchmarks.unseeded.rollouts import Row
from verify.checks.prefill import (
    END_NAMES,
    NAMES,
    all_evidence,
    each_evidence,
    end_sums,
    evidence,
    judge_outside,
    log_ratios,
    sums,
)
from verify.checks.rows import fingerprints
from verify.formats.verdict import CheckResult
from verify.thresholds import Limits

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rollouts of a submission; 64 is that of the shipped targets."""


@dataclass(frozen=True)
class Summary:
    """What the checks need of a rollout."""

    sums: np.ndarray
    ends: np.ndarray
    outside: np.ndarray
    tokens: int


def summary(row: Row, limits: Limits) -> Summary:
    ended = row.ended & (np.arange(len(row.tokens)) == len(row.tokens) - 1)
    ends = end_sums(row.choices, ended=ended, tau=limits.gap)
    outside = row.choices.outside
    return Summary(sums(row.choices, limits.gap_mean), ends, outside, len(row.tokens))


def failed(rows: Sequence[Summary], limits: Limits) -> list[str]:
    """The checks that reject a submission."""
    chosen, ends = [row.sums for row in rows], [row.ends for row in rows]
    results: list[CheckResult] = [
        *(judge_outside(row.outside, limits) for row in rows),
        *all_evidence("ends_submission", END_NAMES, ends),
        *each_evidence("ends", END_NAMES, ends),
        *all_evidence("chosen_tokens_submission", NAMES, chosen),
        *each_evidence("chosen_tokens", NAMES, chosen),
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
