"""A claimed reward is a float32: it is compared with what the validator would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.verify.bench import Bench
from tests.verify.small_model import ParityTask
from verify.plugins import Graded, GradeItem, GraderFault


class LongPenalty(ParityTask):
    """Penalties in the thousands, where float32 is further off than the tolerance."""

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        penalties = [-4000.00012 - len(item.output_tokens) for item in items]
        return [Graded(0.5, penalty, 0.5 + penalty) for penalty in penalties]


def test_an_honest_claim_of_any_size_is_accepted_and_its_neighbour_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LongPenalty())
    honest = bench.honest()
    assert bench.verdict(honest).reason == ""
    row = honest[0]
    next_to_it = float(np.nextafter(np.float32(row.length_penalty), np.float32(0)))
    edited = [replace(row, length_penalty=next_to_it), *honest[1:]]
    assert bench.verdict(edited).reason.startswith("reward: row 0")
