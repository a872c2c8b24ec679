"""Coordinator, workers and validator over HTTP, with real signatures and a real small model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from runspec.core.run_files import submission_files
from runspec.core.spec.schema import RunSpec
from tests.verify.bench import MODEL, packed
from tests.verify.coordinator.deployment import Site
from tests.verify.small_model import NumpyEngine, ParityTask, Worker, fixed_key, small_spec
from verify.client import RunFinished, SubmissionRefused
from verify.formats.lease import open_lease
from verify.formats.submission import decode_rollouts
from verify.formats.verdict import decode_verdicts
from verify.validator import Validator

HONEST, DISHONEST = fixed_key(5), fixed_key(6)
DEADLINE_S = 60.0
STEPS = 3
SPEC = small_spec().model_copy(update={"steps": STEPS})


@contextmanager
def at_work(site: Site) -> Iterator[None]:
    """The coordinator of a run whose newest version is 0."""
    site.publish(0)
    with site.origin(), site.serving():
        yield


def work(site: Site, worker: Worker) -> int:
    """Answers leases until the run is finished; returns how many."""
    answered, client = 0, site.client(worker.key, deadline_s=DEADLINE_S)
    client.register("home", {})
    try:
        while True:
            signed = client.lease(1.0)
            if signed is None:
                continue
            lease = open_lease(signed, coordinators=frozenset({site.coordinator.public_hex}))
            rollouts = worker.rollouts(signed, lease)
            try:
                client.submit(*packed(rollouts, signed, lease, worker.key))
            except SubmissionRefused:
                continue
            answered += 1
    except RunFinished:
        return answered


def validate(site: Site, directory: Path, spec: RunSpec = SPEC) -> int:
    """Judges until the run is finished; returns how many. All versions have the same weights."""
    validator = Validator(
        *(spec, site.validator, site.client(site.validator, deadline_s=DEADLINE_S)),
        NumpyEngine(dict.fromkeys(range(STEPS), MODEL), directory),
        task_set_of=lambda weights: ParityTask(),
        log=logging.getLogger("validator"),
    )
    validator.serve(threading.Event())
    return validator.checked


def test_honest_rollouts_reach_the_batches_and_no_others(tmp_path: Path) -> None:
    # given a run with an honest worker and one that serves perturbed weights
    site = Site(tmp_path, SPEC)
    workers = [
        Worker(HONEST, MODEL, SPEC, ParityTask()),
        Worker(DISHONEST, MODEL.perturbed(0.05), SPEC, ParityTask()),
    ]

    # when it runs to its last step
    with at_work(site), ThreadPoolExecutor(3) as pool:
        checked = pool.submit(validate, site, tmp_path / "weights")
        answers = [pool.submit(work, site, worker) for worker in workers]
        answered = [answer.result(DEADLINE_S) for answer in answers]
        assert checked.result(DEADLINE_S) > 0

    # then both took part, and every batch is whole, made of the honest worker's groups alone
    assert all(answered)
    manifests = [site.batch(step) for step in range(STEPS)]
    for manifest in manifests:
        assert manifest.complete and len(manifest.groups) == SPEC.algorithm.prompts_per_step
        for group in manifest.groups:
            files = submission_files(site.run_dir, group.step, group.submission)
            rows = decode_rollouts(files.submission.read_bytes(), max_rows=64, max_bytes=1 << 20)
            verdicts = decode_verdicts(files.verdict.read_bytes())
            assert {row.worker for row in rows} == {HONEST.public_hex}
            assert all(v.logprob_diff is not None and v.logprob_diff < 1e-5 for v in verdicts)
    assert sum(m.stats["rejected_submissions"] for m in manifests) > 0
