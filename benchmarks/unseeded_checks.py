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
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is first imported

import ml_dtypes

from benchmarks.unseeded.judged import SIZES, detection, distance, duplicates, honest
from benchmarks.unseeded.models import lines, trained
from benchmarks.unseeded.rollouts import Site, attacks, top_p
from verify.thresholds import BFLOAT16, FLOAT32
from verify.truncation import Truncation


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
