"""Where attacks are tried: a run of one pool in which honest work passes, a coordinator at work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.verify.bench import MODEL, Bench, lease_for
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.small_model import NumpyEngine, SmallModel, Worker
from verify.examiner import Verdict
from verify.formats.submission import Rollout
from verify.plugins import PrefillOutput

PRECISIONS = ["float32", "bfloat16"]


@dataclass(frozen=True)
class Decision:
    """What rejected a submission."""

    check: str
    row: int
    value: float
    limit: float
    words: str
    """The whole reason."""


def rejection(bench: Bench, rows: list[Rollout]) -> Decision:
    """The check that rejects these rows, which it must, and its number."""
    verdict = bench.verdict(rows)
    assert not verdict.accepted
    return decision(verdict)


def decision(verdict: Verdict) -> Decision:
    """The first row's first failure, which is the verdict's reason."""
    failed = [
        (number, check)
        for number, row in enumerate(verdict.rows)
        for check in row.checks
        if not check.passed
    ]
    number, check = failed[0]
    assert verdict.reason.startswith(f"{check.name}: row {number}: ")
    assert not check.value <= check.limit
    return Decision(check.name, number, check.value, check.limit, verdict.reason)


def refused(bench: Bench, envelope: bytes, table: bytes) -> str:
    """Why these bytes are rejected, which they must be before the model is asked."""
    asked = len(bench.engine.prefills)
    verdict = bench.verdict_on(envelope, table)
    assert not verdict.accepted and len(bench.engine.prefills) == asked
    return verdict.reason


def fresh(bench: Bench) -> Bench:
    """A copy of which a test may change everything."""
    own = copy(bench)
    own.engine = NumpyEngine(dict(bench.engine.versions), bench.engine.directory)
    own.worker = copy(bench.worker)
    return own


def lease_version(bench: Bench, version: int, model: SmallModel) -> None:
    """The next lease names this version, and the worker has it."""
    bench.engine.versions[version] = model
    bench.worker.model = replace(model, dtype=bench.worker.model.dtype)
    take_lease(bench, 0, version=version)


def take_lease(bench: Bench, index: int, *, step: int = 0, version: int | None = None) -> None:
    """The worker's next lease, of other problems and noise."""
    version = bench.lease.version if version is None else version
    bench.signed_lease, bench.lease = lease_for(
        bench.worker_key, bench.coordinator_key, step=step, index=index, version=version
    )


def like(bench: Bench, kind: type[Worker], model: SmallModel | None = None) -> Worker:
    """A dishonest worker with the honest one's key and precision."""
    honest = bench.worker
    model = replace(model or honest.model, dtype=honest.model.dtype)
    return kind(honest.key, model, honest.spec, honest.task_set)


def behind_honest_claims(bench: Bench, worker: Worker) -> Worker:
    """Hands in that worker's tokens, with log-probs and proofs of the leased version."""
    honest = bench.worker

    class Behind(type(worker)):
        def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
            return honest.explain(prompt, tokens)

    return Behind(worker.key, worker.model, worker.spec, worker.task_set)


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """Makes a run of a pool (its fields by keyword). Of each an honest submission has passed."""
    made: dict[str, Bench] = {}

    def bench(dtype: str = "float32", **pool: Any) -> Bench:
        name = json.dumps([dtype, pool], sort_keys=True)
        if name not in made:
            one = Bench(tmp_path_factory.mktemp("bench"), dtype=dtype, **pool)
            if dtype == "bfloat16":  # the worker's engine rounds too, and wider limits apply
                one.worker.model = MODEL.in_bfloat16()
            verdict = one.verdict(one.honest())
            assert verdict.accepted, verdict.reason
            made[name] = one
        return fresh(made[name])

    return bench


@pytest.fixture
def bench(run_of: Callable[..., Bench]) -> Bench:
    """A seeded pool of float32, recomputed in float32."""
    return run_of()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator at work; its origin serves version 0."""
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin(), site.serving():
        yield site
