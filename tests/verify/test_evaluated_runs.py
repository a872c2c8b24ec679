"""A run with evaluations trains bit for bit what it trains without them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.roles import sign_roles
from runspec.core.run_files import evaluation_files, submission_files
from runspec.core.spec.schema import Evaluation
from tests.verify.bench import MODEL
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.test_evaluations import RESULT
from tests.verify.small_model import ParityTask, Worker, fixed_key, small_spec
from tests.verify.test_workers_to_batches import DEADLINE_S, at_work, validate, work
from verify.formats.evaluation import sign_evaluation
from verify.formats.submission import decode_rollouts

WORKER, EVALUATOR = fixed_key(5), fixed_key(7)
STEPS = 3
OF_THE_CLOCK = {"lease"}
"""Field of a rollout that follows from the time of its lease."""


def trained(folder: Path, patch: pytest.MonkeyPatch, *, evaluated: bool) -> list[dict[str, Any]]:
    """The rollouts of all steps of a synchronous run, in the order in which they train."""
    drawn = iter(range(1000))
    known = SimpleNamespace(token_hex=lambda size: digest_bytes(str(next(drawn)).encode()))
    patch.setattr("verify.coordinator.services.leasing.secrets", known)
    spec = small_spec().model_copy(update={"steps": STEPS})
    algorithm = spec.algorithm.model_copy(update={"async_level": 0})
    evaluations = [Evaluation(name="held-out", source="parity")] if evaluated else []
    spec = spec.model_copy(update={"algorithm": algorithm, "evaluations": evaluations})
    folder.mkdir()
    site = Site(folder, spec)
    keys = {"publisher": site.publisher, "coordinator": site.coordinator}
    keys |= {"validator": site.validator, "evaluator": EVALUATOR}
    named = {role: [key.public_hex] for role, key in keys.items()}
    document = sign_roles(spec.name, named, site.root, valid_s=3600.0)
    write_atomic(site.run_dir / "keys" / "roles.json", document)
    worker = Worker(WORKER, MODEL, spec, ParityTask())
    rows = []
    with at_work(site), ThreadPoolExecutor(2) as pool:
        judging = pool.submit(validate, site, folder / "weights", spec)
        working = pool.submit(work, site, worker)
        for step in range(STEPS):
            # the evaluator sends its result while the step is sampled
            if evaluated:
                result = replace(RESULT, run=spec.name, version=step)
                site.client(EVALUATOR).evaluated(sign_evaluation(result, EVALUATOR))
            for group in site.batch(step).groups:
                files = submission_files(site.run_dir, group.step, group.submission)
                data = files.submission.read_bytes()
                found = decode_rollouts(data, max_rows=64, max_bytes=1 << 20)
                rows += [vars(row) for row in found if row.group == group.group]
            site.publish(step + 1)
        assert working.result(DEADLINE_S) and judging.result(DEADLINE_S)
    assert len(evaluation_files(site.run_dir)) == (STEPS if evaluated else 0)
    return rows


def test_evaluations_change_no_bit_of_what_a_synchronous_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given two runs with the same keys and nonces, which are random elsewhere
    without = trained(tmp_path / "without", monkeypatch, evaluated=False)
    evaluated = trained(tmp_path / "with", monkeypatch, evaluated=True)
    # then both train the same tokens, log-probs, rewards and proofs in the same order
    assert len(without) == len(evaluated) > 0
    for ours, theirs in zip(evaluated, without, strict=True):
        for name in ours.keys() - OF_THE_CLOCK:
            assert np.array_equal(ours[name], theirs[name]), name
