"""From parameters on disk to served weights, in order, however often it is started again."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import pytest

from bridge.publisher import Publisher, publish_versions
from broadcast.store import newest_version
from learner_jax.checkpoint import save_params
from learner_jax.model import init_params
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.latest import open_latest
from runspec.core.run_files import params_folder, versions_in, weights_folder
from tests.figures import figures_of
from tests.learner_jax.conftest import Run, write_initial_model

LOG = logging.getLogger("test")


@pytest.fixture
def run(run: Run) -> Run:
    """With an initial model, so that versions can be exported."""
    write_initial_model(run)
    return run


def add_version(run: Run, version: int) -> None:
    """What the learner writes: other weights for every version, and a probe."""
    params = init_params(model_config(run.spec), jax.random.key(version))
    save_params(params_folder(run.path, run.spec), version, params, {"sequences": [version]})()


def publisher_of(run: Run) -> Publisher:
    return Publisher(run.path, run.spec, LOG)


def latest(run: Run) -> Any:
    data = (run.path / "store" / "origin" / run.spec.name / "latest.json").read_bytes()
    return open_latest(data, run=run.spec.name, publishers={run.publisher.public_hex})


def test_versions_are_published_in_order_and_old_ones_go(run: Run) -> None:
    # given more versions than are kept
    for version in range(5):
        add_version(run, version)
    # when the publisher looks
    assert publisher_of(run).publish_new() == [0, 1, 2, 3, 4]
    # then the newest three are served, with config, tokenizer and probe, and latest.json says so
    assert latest(run).version == 4
    assert versions_in(weights_folder(run.path)) == [2, 3, 4]
    served = {p.name for p in (run.path / "store/origin/tiny/versions").iterdir()}
    assert served == {"2", "3", "4"}
    files = {path.name for path in (weights_folder(run.path) / "v4").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "probe.json"} <= files
    # and of the parameters only the newest are left
    assert versions_in(params_folder(run.path, run.spec)) == [4]


def test_its_figures_count_what_it_published(run: Run) -> None:
    # given two versions, and a publisher that was started again after the first
    add_version(run, 0)
    publisher_of(run).publish_new()
    add_version(run, 1)
    publisher = publisher_of(run)
    publisher.publish_new()
    # then it has counted the second alone
    found = figures_of(publisher.figures)
    assert found["runspec_publisher_newest_version"] == 1.0
    assert found["runspec_publisher_versions_total/whole"] == 1.0
    size = sum(path.stat().st_size for path in (weights_folder(run.path) / "v1").glob("*.*"))
    assert found["runspec_publisher_published_bytes_total"] == pytest.approx(size, rel=0.2)
    assert found["runspec_publisher_stage_seconds_total/export"] > 0.0


@pytest.mark.parametrize("lost", ["nothing", "store", "weights", "half an export"])
def test_a_publisher_killed_anywhere_goes_on(run: Run, lost: str) -> None:
    # given a publisher that died after, or in the middle of, publishing version 1
    add_version(run, 0)
    add_version(run, 1)
    publisher_of(run).publish_new()
    digest = latest(run).manifest_digest
    if lost == "store":
        shutil.rmtree(run.path / "store")
    if lost in ("weights", "half an export"):
        shutil.rmtree(weights_folder(run.path) / "v1")
    if lost == "half an export":
        (weights_folder(run.path) / ".tmp-0123-v1").mkdir()
    # when another is started
    publisher = publisher_of(run)
    assert publisher.publish_new() == [1]
    # then the version has the manifest that it had, and the next one follows
    assert latest(run).manifest_digest == digest
    add_version(run, 2)
    assert publisher.publish_new() == [2]
    assert latest(run).version == 2
    assert not list(weights_folder(run.path).glob(".tmp-*"))


def test_a_version_is_never_published_with_other_bits(run: Run) -> None:
    add_version(run, 0)
    publisher_of(run).publish_new()
    # given parameters of version 0 that are not those published
    shutil.rmtree(params_folder(run.path, run.spec) / "v0")
    shutil.rmtree(weights_folder(run.path) / "v0")
    params = init_params(model_config(run.spec), jax.random.key(99))
    save_params(params_folder(run.path, run.spec), 0, params, {"sequences": [0]})()
    # when the publisher starts again, then it refuses
    with pytest.raises(UserError, match="published"):
        publisher_of(run).publish_new()


def test_latest_is_signed_again_while_no_version_comes(run: Run) -> None:
    add_version(run, 0)
    publisher = publisher_of(run)
    publisher.publish_new()
    before = latest(run)
    publisher.refresh()
    after = latest(run)
    assert after.issued > before.issued and after.expires > before.expires
    assert after.manifest_digest == before.manifest_digest


def test_the_loop_publishes_what_appears_and_ends_when_told(run: Run) -> None:
    # given a publisher that waits
    stop = threading.Event()
    thread = threading.Thread(target=publish_versions, args=(publisher_of(run), stop))
    thread.start()
    # when a version appears, then it is served soon
    add_version(run, 0)
    deadline = time.monotonic() + 20
    store = run.path / "store" / "origin"
    while newest_version(store, run="tiny") != 0:
        assert time.monotonic() < deadline and thread.is_alive()
        stop.wait(0.01)
    stop.set()
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_the_publisher_needs_no_jax() -> None:
    code = "import sys, bridge.publisher; print(json.dumps('jax' in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], capture_output=True, check=True, text=True
    )
    assert json.loads(out.stdout) is False
