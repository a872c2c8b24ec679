"""Validators do not start with profiles of another root, or of a model of another size."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.verify.bench import MODEL, lease_for, packed
from tests.verify.profiles import document, made_profile
from tests.verify.small_model import NumpyEngine, ParityTask, Worker, small_spec
from tests.verify.test_profile import with_profile
from tests.verify.test_validator import COORDINATOR, VALIDATOR, WORKER, QueueCoordinator
from verify import validator
from verify.coordinator.machine.gap_history import excess_of
from verify.thresholds import DRIFT, FLOAT32, GapNoise

LOG = logging.getLogger("test")


class EngineOfSize(NumpyEngine):
    """Its config.json says a hidden size."""

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        path = super().ensure_version(version, manifest_digest, deadline_s=deadline_s)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 192}
        (path / "config.json").write_text(json.dumps(sizes))
        return path


def test_verdicts_on_a_calibrated_pool_say_what_gaps_come_to(tmp_path: Path) -> None:
    # given a budget of gaps, and two submissions: an honest one, and one of perturbed weights
    noise = GapNoise(cap=0.5, mean=1e-3, probability=1e-6)
    profile = made_profile(replace(FLOAT32, gap_noise=noise))
    spec = with_profile(small_spec(), document(profile))
    coordinator = QueueCoordinator()
    for index, model in enumerate((MODEL, MODEL.perturbed(0.02))):
        signed, lease = lease_for(WORKER, COORDINATOR, index=index)
        rollouts = Worker(WORKER, model, spec, ParityTask()).rollouts(signed, lease)
        coordinator.offer(*packed(rollouts, signed, lease, WORKER), signed)
    engine = EngineOfSize({0: MODEL}, tmp_path)
    validator.Validator(
        spec, VALIDATOR, coordinator, engine, task_set_of=lambda folder: ParityTask(), log=LOG
    ).serve(threading.Event())
    # when both are judged, then each row says by how much its gaps exceed what is allowed for ever
    (_, honest), (_, other) = coordinator.opened()
    allowed = [DRIFT * noise.mean * row.length for row in honest]
    assert [row.gap_excess for row in honest] == pytest.approx([-each for each in allowed])
    excess = excess_of(other, noise)
    assert excess is not None
    assert excess > -DRIFT * noise.mean * sum(row.length for row in other)
