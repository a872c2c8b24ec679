"""What a submission made to hurt costs a validator, stage by stage, beside an honest one.

    python -m benchmarks.poison [--rows 64] [--tokens 8000]

Prints JSON: milliseconds of the checks that need no model, and of the proofs' statistics, for ROWS
rollouts of TOKENS tokens: honest, and the worst of legal size that we know.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy is first imported

import numpy as np

from tests.verify.bench import Bench
from tests.verify.small_model import VOCAB, ParityTask
from verify.checks.rows import fingerprints
from verify.examiner import Examiner
from verify.plugins import Graded, GradeItem, GraderFault
from verify.toploc import build_proofs_batch
from verify.toploc.statistics import verify_proofs_batch
from verify.watchdog import Stages


def timed_ms(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begun)


def outputs(tokens: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokens and log-probs of one row: an honest one's, and those that repeat themselves."""
    rng = np.random.default_rng(0)
    honest = rng.integers(0, 150_000, tokens).astype(np.int32)
    certain = np.full(tokens, -130.0 / tokens, np.float32)  # half of it is one run of 48 nats
    return {
        "honest": (honest, -rng.exponential(size=tokens).astype(np.float32)),
        "one token, information spread thin": (np.full(tokens, 7, np.int32), certain),
        "two tokens in turn": (np.arange(tokens, dtype=np.int32) % 2, certain),
        "honest tokens, information spread thin": (honest, certain),
    }


def activations(tokens: int, hidden: int) -> dict[str, np.ndarray]:
    """u16 [tokens, hidden]: as a model has them, and as none should."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(tokens, hidden)).astype(np.float32)
    values[:, 3] *= 100.0
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return {
        "honest, with an outlier channel": bits,
        "all zero": np.zeros_like(bits),
        "all alike": np.full_like(bits, 0x3F80),
        "infinities": np.full_like(bits, 0x7F80),
    }


def examined(tokens: int) -> dict[str, Any]:
    """Milliseconds a row of each stage without a model, of rollouts as long as they may be."""
    found = {}
    for name, (output, logprobs) in outputs(tokens).items():
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), max_new_tokens=tokens, max_model_len=tokens + 64)
            rows = [
                replace(
                    row,
                    output_tokens=1 + output % (VOCAB - 1),  # without the end token
                    logprobs=logprobs,
                    finish_reason="length",
                    task_reward=0.0,
                    length_penalty=0.0,
                    proofs=[b"\xff\xd9" + bytes(256)] * -(-tokens // 32),
                )
                for row in bench.honest()
            ]
            examiner = Examiner(
                bench.spec,
                task_set=Ungraded(),
                engine=bench.engine,
                vocab_size=VOCAB,
                wants_prefill=lambda submission: False,
                stages=(watched := Stages()),
            )
            verdict = examiner.examine([bench.file(*bench.packed(rows))])[0]
        spent = {stage: round(1e3 * s / len(rows), 2) for stage, s in watched.spent_s.items()}
        found[name] = {**spent, "reason": verdict.reason[:80]}
    return found


class Ungraded(ParityTask):
    """All rewards are 0: grading has deadlines of its own (docs/sandbox.md)."""

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        return [Graded(0.0, 0.0, 0.0) for _ in items]


def stages(rows: int, tokens: int, hidden: int) -> dict[str, Any]:
    runs = {
        name: round(rows * min(timed_ms(partial(fingerprints, *pair)) for _ in range(3)), 1)
        for name, pair in outputs(tokens).items()
    }
    bits = activations(min(tokens, 2048), hidden)
    (honest,) = build_proofs_batch([bits["honest, with an outlier channel"]])
    chunks = len(honest)
    proofs = {
        name: round(timed_ms(partial(verify_proofs_batch, [found], [honest])) / chunks, 3)
        for name, found in bits.items()
    }
    return {
        "duplicates_ms": runs,
        "proof_ms_a_chunk": {f"hidden {hidden}": proofs},
        "ms_a_row": examined(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.poison", description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    print(json.dumps(stages(options.rows, options.tokens, options.hidden), indent=2))


if __name__ == "__main__":
    main()
