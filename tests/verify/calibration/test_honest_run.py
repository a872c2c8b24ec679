"""Versions from a run directory: as an engine's client takes them, without asking anybody."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bridge.safetensors_io import read_headers, read_tensor
from broadcast.client import WeightsClient
from tests.verify.calibration.file_engine import save_small_model
from tests.verify.calibration.honest_run import HonestRun
from tests.verify.small_model import RUN, SmallModel, small_spec
from verify.calibration.honest_run import NO_SERVER, Version, find_version, place
from verify.calibration.prefills import noise, perturb
from verify.formats.lease import Lease

MODEL = SmallModel.random(seed=5)


@pytest.fixture
def run(tmp_path: Path) -> tuple[HonestRun, Lease]:
    made = HonestRun(tmp_path / "run", small_spec())
    save_small_model(MODEL, made.weights(0))
    made.publish(0)
    made.close()
    return made, made.lease(0, groups=1)[1]


def found(run: HonestRun, lease: Lease, fetched: Path | None = None) -> Version:
    version = find_version(run.directory, RUN, 0, lease.manifest_digest, fetched)
    assert version is not None
    return version


def fetched_by_client(cache: Path, digest: str) -> Path:
    with closing(
        WeightsClient([NO_SERVER], run=RUN, root_public_key="0" * 64, cache_dir=cache)
    ) as client:
        return client.fetch(0, manifest_digest=digest, deadline_s=2.0)


def mix_in(folder: Path) -> np.ndarray:
    return read_tensor(read_headers(folder)["mix"])


def test_an_engines_client_has_the_version_and_asks_nobody(
    run: tuple[HonestRun, Lease], tmp_path: Path
) -> None:
    made, lease = run
    place(found(made, lease), tmp_path / "cache")
    folder = fetched_by_client(tmp_path / "cache", lease.manifest_digest)
    assert (mix_in(folder) == MODEL.mix).all()
    # and what was fetched so is found again, as on a validator's machine
    again = found(made, lease, fetched=tmp_path / "cache")
    assert (mix_in(place(again, tmp_path / "second")) == MODEL.mix).all()


def test_perturbed_weights_take_the_place_of_a_link_and_not_of_the_file(
    run: tuple[HonestRun, Lease], tmp_path: Path
) -> None:
    made, lease = run
    perturb(place(found(made, lease), tmp_path / "cache"), noise(0.01))
    folder = fetched_by_client(tmp_path / "cache", lease.manifest_digest)
    ratio = mix_in(folder) / MODEL.mix - 1
    assert 0.009 < ratio.std() < 0.011 and abs(ratio.mean()) < 1e-3
    assert (mix_in(made.weights(0)) == MODEL.mix).all()
