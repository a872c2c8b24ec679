"""Tokens a second of rollouts whose environment waits after each turn, of the same without waiting.

    python -m benchmarks.turns [--wait 0.05] [--rounds 3] [--large]

A tiny Qwen2 in vLLM on the CPU, or one as deep and wide as SmolLM2-135M, 64 rollouts in flight,
four turns of at most 10 tokens each. Each step of the environment waits, and computes for 2 ms.
Both sides take turns in one process; prints JSON with their tokens/s and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from tests.sampler.engine.models import (
    MAX_MODEL_LEN,
    QWEN2,
    batch,
    running_engine,
    sample,
    save_version,
)
from verify.plugins import GraderFault

GROUPS, GROUP_SIZE, TURNS, PER_TURN = 16, 16, 4, 10
LARGE = {
    **QWEN2,
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
COMPUTES_S = 0.002


@dataclass
class Waits:
    """An environment's step with so many seconds of waiting."""

    seconds: float
    per_turn: int = PER_TURN
    fault: GraderFault | None = None

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        if self.seconds:
            time.sleep(self.seconds)
            until = time.thread_time() + COMPUTES_S
            while time.thread_time() < until:
                pass
        return None if len(turns) >= TURNS else [2, 3 + len(turns), 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    rates: dict[float, list[float]] = {0.0: [], options.wait: []}
    with tempfile.TemporaryDirectory() as folder:
        family = LARGE if options.large else QWEN2
        version = save_version(Path(folder) / "v0", family=family)
        with running_engine(version, max_num_seqs=64) as engine:
            sample(engine, batch(2, 2))
            for _ in range(options.rounds):
                for wait, found in rates.items():
                    requests = [
                        replace(each, max_length=MAX_MODEL_LEN, episode=Waits(wait))
                        for each in batch(GROUPS, GROUP_SIZE)
                    ]
                    begun = time.perf_counter()
                    tokens = sum(len(each.output_tokens) for each in sample(engine, requests))
                    found.append(tokens / (time.perf_counter() - begun))
    means = {str(wait): round(median(found)) for wait, found in rates.items()}
    ratio = median(rates[options.wait]) / median(rates[0.0])
    print(json.dumps({"benchmark": "turns", "tokens/s": means, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
