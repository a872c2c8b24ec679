"""Rollouts of trusted pools that take over versions in the middle: what is checked, what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.verify.bench import Bench
from verify.formats.submission import Rollout, decode_rollouts, encode_rollouts

IN_FLIGHT = {
    "trust": "trusted",
    "in_flight_updates": True,
    "sampling": {"temperature": 0.8, "seeded": True},
}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, **IN_FLIGHT)


def stamped(rollouts: list[Rollout], *versions: int) -> list[Rollout]:
    """The first tokens of every rollout under the first version, one under each other, the rest
    under the last."""
    rows = []
    for row in rollouts:
        stamps = np.full(len(row.output_tokens), versions[-1], np.int32)
        stamps[: len(versions)] = versions[: len(stamps)]
        rows.append(replace(row, versions=stamps))
    return rows


def checks_of(bench: Bench, rollouts: list[Rollout]) -> list[list[str]]:
    verdict = bench.verdict(rollouts)
    assert verdict.accepted, verdict.reason
    return [[check.name for check in row.checks] for row in verdict.rows]


def test_versions_of_tokens_survive_the_file(bench: Bench) -> None:
    rollouts = [*stamped(bench.honest()[:2], 0, 1), bench.honest()[2]]

    back = decode_rollouts(encode_rollouts(rollouts), max_rows=3, max_bytes=1 << 20)

    for one, two in zip(rollouts[:2], back, strict=False):
        assert two.versions.dtype == np.int32
        assert np.array_equal(one.versions, two.versions)
    assert back[2].versions is None


def test_a_rollout_of_the_leases_version_alone_is_recomputed_as_any(bench: Bench) -> None:
    for names in checks_of(bench, stamped(bench.honest(), 0)):
        assert names[-2:] == ["toploc", "duplicates"]


def test_a_rollout_of_several_versions_is_not_recomputed_and_the_verdict_says_so(
    bench: Bench,
) -> None:
    rollouts = bench.honest()
    mixed = [*stamped(rollouts[:1], 0, 0, 1), *stamped(rollouts[1:], 0)]
    # its log-probs are those of two versions: no prefill gives them
    mixed[0] = replace(mixed[0], logprobs=mixed[0].logprobs - np.float32(1.0))

    verdict = bench.verdict(mixed)

    assert verdict.accepted, verdict.reason
    last = verdict.rows[0].checks[-2]
    assert (last.name, last.passed, last.value) == ("prefill", True, 2.0)
    assert "versions 0 to 1" in last.reason
    assert verdict.rows[0].logprobs is None
    assert all(row.checks[-2].name == "toploc" for row in verdict.rows[1:])
    assert all(row.checks[-1].name == "duplicates" for row in verdict.rows)
    assert bench.engine.prefills == [len(rollouts) - 1]


def test_a_failure_names_the_row_of_the_submission(bench: Bench) -> None:
    rollouts = bench.honest()
    mixed = [*stamped(rollouts[:3], 0, 1), *stamped(rollouts[3:], 0)]
    # the proof of another prompt: of the same one, outputs of a single token have one proof
    mixed[5] = replace(mixed[5], proofs=mixed[0].proofs[:1] * len(mixed[5].proofs))

    assert bench.verdict(mixed).reason.startswith("toploc: row 5: ")


def test_a_submission_without_one_rollout_to_recompute_needs_no_weights(bench: Bench) -> None:
    assert all(
        names[-2:] == ["prefill", "duplicates"]
        for names in checks_of(bench, stamped(bench.honest(), 1))
    )
    assert bench.engine.prefills == []


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((1, 0), "older version than the one before it"),
        ((-1, 0), "a token of version -1, outside"),
        ((0, 5), "a token of version 5, outside [0, 4]"),
    ],
)
def test_versions_that_cannot_be_are_rejected(
    bench: Bench, versions: tuple[int, ...], reason: str
) -> None:
    verdict = bench.verdict(stamped(bench.honest(), *versions))
    assert not verdict.accepted
    assert verdict.reason.startswith("versions: row 0: ")
    assert reason in verdict.reason


@pytest.mark.parametrize(
    "pool",
    [{}, {"trust": "trusted"}, {**IN_FLIGHT, "trust": "untrusted"}],
    ids=["untrusted", "trusted, not in flight", "untrusted, in flight"],
)
def test_no_other_pool_may_escape_the_prefill_by_naming_versions(
    tmp_path: Path, pool: dict[str, object]
) -> None:
    bench = Bench(tmp_path, **pool)
    reason = bench.verdict(stamped(bench.honest(), 0, 1)).reason
    assert reason.startswith("versions: row 0: ")
    assert "does not update in flight" in reason
