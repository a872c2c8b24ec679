"""Detection of attacks that change what is sampled, in seeded pools; JSON, a line a model size.

    python -m benchmarks.attack_detection [SIZE ...] [--quick]
    python -m benchmarks.attack_detection --pretrained DIR [VERSION_DIR ...] [--samplers float32]
    python -m benchmarks.attack_detection 256 --rows ROWS.jsonl  (rows as they are measured)
    python -m benchmarks.attack_detection --plot RESULTS.jsonl DRAWING.svg

Small transformers are trained here (`benchmarks.attacks.policies`), sampled under the leases'
noise by an engine of its own (`.engine`), and judged by the examiner with the JAX prefill
(`.site`), by pairs of precisions. Each attack (`.book`) claims the log-probs and proofs of what it
ran (`own`), or those that the validator itself finds (`validator's`: nothing is wrong with the
claims, so that the choice of tokens alone decides; `calibrated`: the same, by limits that were
calibrated for the pair on other rollouts). Submissions of 8 rollouts go through the examiner;
those of other sizes are drawn from the same rollouts, with replacement (`.measure`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is first imported

import numpy as np

from benchmarks.attacks.book import Attack, Engine, attacks
from benchmarks.attacks.engine import LONGEST, Sampled
from benchmarks.attacks.measure import (
    CHECKS,
    Rows,
    decided,
    detection,
    found_out,
    interval,
    largest_mean_gaps,
    rows_of,
)
from benchmarks.attacks.policies import (
    SIZES,
    Policies,
    pretrained_policies,
    pretrained_prompts,
    prompts_of,
    text_with_ends,
    train_policies,
)
from benchmarks.attacks.site import ROLLOUTS, Leases, Pair, Site
from benchmarks.attacks.torch_engine import sample_torch
from benchmarks.null.text_model import Size, read_text
from verify.calibration.derive import derive
from verify.calibration.measure import Measurements
from verify.checks import Subject
from verify.thresholds import Limits

PAIRS = (
    Pair("float32", "float32"),
    Pair("bfloat16", "float32"),
    Pair("bfloat16", "bfloat16"),
)
ATTACKING = 1 << 20
"""Leases from here on are the attackers'."""
ENOUGH = 0.999
RATE = 1e-5
"""Of honest rollouts that calibrated limits may reject."""
SAMPLING_LIMITS = (
    "logprob_submission",
    "logprob_rollout",
    "gap",
    "gap_share",
    "gap_max",
    "gap_mean",
)
VARIANTS = ("own", "validator's", "calibrated")


@dataclass(frozen=True)
class Plan:
    """How much is run of a size."""

    honest: int
    """Rollouts of each type of sampler."""
    attacking: int
    """Rollouts of each class and type of sampler."""
    examined: int
    """Submissions of each class that the examiner judges."""
    batch: int
    """Rollouts that are sampled and prefilled at once."""
    torch: int
    """Of so many honest batches `transformers` samples one in torch, the others JAX."""
    trials: int = 3000
    """Submissions of each size."""
    rollouts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Of a submission."""
    looser: bool = False
    """Whether calibrated limits may be above the published ones."""
    workers: int = 1000
    """Whose submissions together are looked at."""
    submissions: int = 400
    """Of each of them."""


PLANS = {
    "64": Plan(3072, 256, 8, 256, 6),
    "128": Plan(1792, 128, 4, 128, 6),
    "256": Plan(192, 32, 2, 32, 6),
}
PRETRAINED = Plan(128, 16, 2, 16, 4, rollouts=(1, 2, 4, 8, 16), looser=True)
QUICK = Plan(128, 16, 2, 64, 2, trials=100, rollouts=(1, 8), workers=10, submissions=10)
QUICK_SIZE = Size(32, 1, 40, 8, 3e-3)


class Bench:
    """A trained size with a site for each pair."""

    def __init__(
        self, name: str, policies: Policies, prompts: np.ndarray, plan: Plan, rows: Path | None
    ) -> None:
        self.name, self.policies, self.plan, self.rows = name, policies, plan, rows
        self.sites = {pair: Site(policies.leased, prompts, pair) for pair in PAIRS}
        self.calibrated: dict[Pair, Limits] = {}

    def engine(self, sampler: str) -> Engine:
        return Engine(self.policies, sampler, self.plan.batch)

    def honest(self, sampler: str) -> dict[str, Any]:
        """False rejections of a sampler's rollouts by the validators of its pairs.

        The first half is measured for `calibrated` limits, by which the second half is judged too.
        """
        plan = self.plan
        found: dict[Pair, list[Rows]] = {pair: [] for pair in self._pairs(sampler)}
        again: dict[Pair, list[Rows]] = {pair: [] for pair in found}
        refused = {pair: list[str]() for pair in found}
        measured = {pair: Measurements() for pair in found}
        for start in range(0, plan.honest, plan.batch):
            count = min(plan.batch, plan.honest - start)
            leases = self.sites[PAIRS[0]].leases(start // ROLLOUTS, count)
            sampled = self._sampled(leases, sampler, number=start // plan.batch)
            for pair in found:
                site = self.sites[pair]
                subject, reasons = judged(site, leases, sampled, len(leases.leases))
                found[pair].append(rows_of(subject))
                refused[pair] += [reason for reason in reasons if reason]
                if start < plan.honest / 2:
                    for first in range(0, count, ROLLOUTS):
                        pairs = subject.prefilled[first : first + ROLLOUTS]
                        measured[pair].take(pairs, site.limits)
                else:
                    if pair not in self.calibrated:
                        derived = calibrated(measured[pair], site.limits, looser=plan.looser)
                        self.calibrated[pair] = derived
                    limits = self.calibrated[pair]
                    again[pair].append(rows_of(replace(subject, limits=limits)))
                site.engine.forget()
            self._say(f"honest {sampler}: {start + count} rollouts")
        measured_rows = {
            str(pair): {
                **honest_row(together(rows), refused[pair]),
                "largest_mean_gaps": largest_mean_gaps(together(rows), plan.rollouts, plan.trials),
                "calibrated": calibrated_row(together(again[pair]), self.calibrated[pair]),
                "workers": self._found_out(together(again[pair]), self.calibrated[pair]),
            }
            for pair, rows in found.items()
        }
        for name, row in measured_rows.items():
            self._keep({"pair": name, "kind": "honest", **row})
        return measured_rows

    def _sampled(self, leases: Leases, sampler: str, *, number: int) -> Sampled:
        if number % self.plan.torch:
            return self.engine(sampler).sample(leases)
        weights, rows = self.policies.leased, self.plan.batch
        return sample_torch(weights, leases.prompts, leases.keys, dtype=sampler, rows=rows)

    def attacked(self, sampler: str) -> dict[str, list[dict[str, Any]]]:
        """Every class by every pair of a sampler."""
        leases = self.sites[PAIRS[0]].leases(ATTACKING, self.plan.attacking)
        engine = self.engine(sampler)
        honest = engine.sample(leases)
        found: dict[str, list[dict[str, Any]]] = {str(pair): [] for pair in self._pairs(sampler)}
        for attack in attacks(self.policies):
            sampled = attack.make(engine, leases, honest)
            for pair in self._pairs(sampler):
                site = self.sites[pair]
                row = self._measured(site, attack, leases, sampled, differ(sampled, honest))
                found[str(pair)].append(row)
                site.engine.forget()
                self._keep({"pair": str(pair), **row})
                self._say(f"{pair}: {attack.name}: {brief(row)}")
        return found

    def _measured(
        self, site: Site, attack: Attack, leases: Leases, sampled: Sampled, changed: np.ndarray
    ) -> dict[str, Any]:
        """One class, under both claims."""
        row: dict[str, Any] = {
            "kind": attack.kind,
            "attack": attack.name,
            "changed_rollouts": round(float(changed.mean()), 3),
        }
        # Of what leaves some outputs as they were only the others are an attack.
        counts = changed if attack.kind == "tokens" else np.ones_like(changed)
        if not counts.any():
            return row
        for variant in ("own", "validator's"):
            claims = sampled if variant == "own" else site.claimed_by_validator(leases, sampled)
            subject, reasons = judged(site, leases, claims, self.plan.examined)
            attacking = counts.reshape(-1, ROLLOUTS).any(1)[: len(reasons)]
            told = [why for why, is_one in zip(reasons, attacking, strict=True) if is_one]
            mine = rows_of(subject).only(counts)
            if variant == "own":
                row["distance"] = float(mine.distance.sum() / mine.tokens.sum())
                row["moved"] = moved(site, leases, sampled)
                row["mean_gap"] = float(mine.gaps.sum() / mine.tokens.sum())
                row["rollouts"], row["tokens"] = len(mine.tokens), int(mine.tokens.sum())
            row[variant] = {
                "examined": len(told),
                "rejected": sum(bool(why) for why in told),
                "by": Counter(why.split(":")[0] for why in told if why),
                "submissions": self._detected(mine, site.limits),
            }
        limits = self.calibrated[site.pair]
        sharper = rows_of(replace(subject, limits=limits)).only(counts)
        row["calibrated"] = {"submissions": self._detected(sharper, limits)}
        row["workers"] = self._found_out(sharper, limits)
        return row

    def _found_out(self, rows: Rows, limits: Limits) -> dict[str, float]:
        assert limits.gap_noise is not None, "the pools here sample seeded"
        plan = self.plan
        return found_out(rows, limits.gap_noise, submissions=plan.submissions, workers=plan.workers)

    def _detected(self, rows: Rows, limits: Limits) -> list[dict[str, object]]:
        return detection(rows, limits, self.plan.rollouts, self.plan.trials)

    def _pairs(self, sampler: str) -> list[Pair]:
        return [pair for pair in PAIRS if pair.sampler == sampler]

    def _keep(self, row: dict[str, Any]) -> None:
        if self.rows:
            with self.rows.open("a") as file:
                file.write(json.dumps({"size": self.name, **row}) + "\n")

    def _say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)


def judged(
    site: Site, leases: Leases, sampled: Sampled, examined: int
) -> tuple[Subject, list[str]]:
    """All rows as one submission, and the examiner's reasons for the first real submissions.

    Raises:
        RuntimeError: the two do not agree.
    """
    rollouts = site.rollouts(leases, sampled)
    subject = site.subject(leases, rollouts)
    first = Leases(leases.signed[:examined], leases.leases[:examined], leases.prompts, leases.keys)
    reasons = [verdict.reason for verdict in site.examine(first, rollouts)]
    chosen = np.arange(len(reasons) * ROLLOUTS).reshape(-1, ROLLOUTS)
    expected = decided(rows_of(subject), chosen, site.limits)
    for reason, by in zip(reasons, expected, strict=True):
        name = reason.split(":")[0]
        if bool(reason) != by.any() or (reason and not by[CHECKS.index(name)]):
            raise RuntimeError(f"the examiner says {reason!r}, the rows {by.tolist()}")
    return subject, reasons


def calibrated(measured: Measurements, published: Limits, *, looser: bool) -> Limits:
    """As `python -m verify calibrate` derives them, with `--allow-looser` where `looser`."""
    return derive(measured, published, rate=RATE, allow_looser=looser).limits


def calibrated_row(rows: Rows, limits: Limits) -> dict[str, Any]:
    """False rejections of rollouts that were not measured, in submissions of 8."""
    chosen = np.arange(len(rows.tokens)).reshape(-1, ROLLOUTS)
    return {
        "limits": {name: getattr(limits, name) for name in SAMPLING_LIMITS},
        "gap_noise": limits.gap_noise and vars(limits.gap_noise),
        "submissions": len(chosen),
        "rejected_submissions": int(decided(rows, chosen, limits).any(1).sum()),
    }


def together(rows: list[Rows]) -> Rows:
    parts = zip(*(vars(each).values() for each in rows), strict=True)
    return Rows(*(np.concatenate(arrays) for arrays in parts))


def honest_row(rows: Rows, refused: list[str]) -> dict[str, Any]:
    """Counts, and how near honest rollouts come to the limits."""
    tokens = int(rows.tokens.sum())
    per_row = rows.gaps / rows.tokens
    return {
        "rollouts": len(rows.tokens),
        "tokens": tokens,
        "submissions": len(rows.tokens) // ROLLOUTS,
        "rejected_submissions": len(refused),
        "rejected_below": interval(len(refused), len(rows.tokens) // ROLLOUTS)[1],
        "rejected_rollouts": int(rows.failed.any(1).sum()),
        "reasons": refused[:5],
        "distance": float(rows.distance.sum() / tokens),
        "distance_largest": float((rows.distance / rows.tokens).max()),
        "mean_gap": float(rows.gaps.sum() / tokens),
        "mean_gap_largest": float(per_row.max()),
        "gap_largest": float(rows.gap_max.max()),
        "tokens_above_tau": int(rows.above.sum()),
    }


def differ(sampled: Sampled, honest: Sampled) -> np.ndarray:
    """bool [M]: whose tokens are other than the honest ones."""
    used = np.arange(LONGEST) < honest.lengths[:, None]
    other = ((sampled.tokens != honest.tokens) & used).any(1)
    return other | (sampled.lengths != honest.lengths)


def moved(site: Site, leases: Leases, sampled: Sampled) -> float:
    """D: mean |log q - log p| of the tokens, q what they were sampled from, p the leased policy."""
    outputs = site.recomputed(leases, sampled)
    far = [
        np.abs(chosen[: len(output.logprobs)] - output.logprobs)
        for chosen, output in zip(sampled.chosen, outputs, strict=True)
    ]
    return float(np.concatenate(far).mean())


def enough(row: dict[str, Any], variant: str) -> int | None:
    """Tokens from which on submissions are detected; None: at no size."""
    table = row[variant]["submissions"]
    good = [entry["detected"] >= ENOUGH for entry in table]
    first = next((i for i in range(len(good)) if all(good[i:])), None)
    return None if first is None else int(table[first]["tokens"])


def brief(row: dict[str, Any]) -> str:
    if "own" not in row:
        return "no output would change"
    needs = ", ".join(f"{variant}: {enough(row, variant)}" for variant in VARIANTS)
    return f"D {row['moved']:.4f}, mean gap {row['mean_gap']:.2e}, tokens needed {needs}"


def trained(name: str, text: np.ndarray, *, quick: bool, rows: Path | None) -> Bench:
    size, plan = (QUICK_SIZE, QUICK) if quick else (SIZES[name], PLANS[name])
    return Bench(name, train_policies(size, text), prompts_of(text, 4096), plan, rows)


def measure(bench: Bench, samplers: Sequence[str]) -> dict[str, Any]:
    policies, config = bench.policies, bench.policies.leased.config
    return {
        "benchmark": "attack_detection",
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "loss": policies.loss and round(policies.loss, 3),
        "honest": {pair: r for s in samplers for pair, r in bench.honest(s).items()},
        "attacks": {pair: r for s in samplers for pair, r in bench.attacked(s).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=", ".join(SIZES))
    parser.add_argument("--quick", action="store_true", help="the smallest size, in a minute")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULTS", "DRAWING"))
    parser.add_argument(
        "--pretrained", nargs="+", type=Path, metavar="DIR", help="a model, versions of its run"
    )
    both = sorted({pair.sampler for pair in PAIRS}, reverse=True)
    parser.add_argument("--samplers", nargs="+", choices=both, default=both, help="their precision")
    parser.add_argument("--rows", type=Path, help="a file to which each row is added when measured")
    options = parser.parse_args()
    if unknown := set(options.sizes) - set(SIZES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(SIZES)}")
    if options.plot:
        from benchmarks.attacks.plot import draw

        results, drawing = options.plot
        drawing.write_text(draw([json.loads(line) for line in results.read_text().splitlines()]))
        return
    if options.pretrained:
        model, *versions = options.pretrained
        policies = pretrained_policies(model, versions)
        prompts = pretrained_prompts(model, read_text(), 512)
        bench = Bench(model.name, policies, prompts, PRETRAINED, options.rows)
        print(json.dumps(measure(bench, options.samplers)), flush=True)
        return
    text = text_with_ends()
    for name in options.sizes or (["64"] if options.quick else SIZES):
        bench = trained(name, text, quick=options.quick, rows=options.rows)
        print(json.dumps(measure(bench, options.samplers)), flush=True)


if __name__ == "__main__":
    main()
