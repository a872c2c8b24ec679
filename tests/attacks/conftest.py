"""Fixtures of the attacks: runs in which honest work passes, and sandboxes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.sandboxed import SETS, Sandbox, make_sandbox
from tests.attacks.setting import fresh
from tests.verify.bench import MODEL, Bench
from tests.verify.coordinator.deployment import Site, tiny_spec


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


@pytest.fixture(params=list(SETS))
def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    """A sandbox for each set of mechanisms that this machine has."""
    directory = tmp_path / "scratches"
    directory.mkdir()
    tmp_path.chmod(0o755)
    return make_sandbox(request.param, directory, monkeypatch)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that has nothing to do with it."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as process:
        yield process
        process.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator at work; its origin serves version 0."""
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin(), site.serving():
        yield site
