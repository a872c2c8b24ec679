"""What changed goes out instead of everything, from whatever base is at hand, once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bridge.delta import apply_deltas
from bridge.publisher import Publisher
from broadcast.layout import chunk_name, latest_name, manifest_name
from broadcast.manifest import WeightsManifest, open_manifest
from broadcast.store import newest_version
from learner_jax.checkpoint import save_params
from learner_jax.model import init_params
from learner_jax.warm_start import model_config
from runspec.core.run_files import params_folder, versions_in, weights_folder
from runspec.core.spec.schema import Pretrain
from tests.learner_jax.conftest import Run, changed, write_initial_model

pytestmark = pytest.mark.slow

LOG = logging.getLogger("test")
ANCHOR_EVERY = 4


@pytest.fixture
def run(run: Run) -> Run:
    """One that publishes deltas."""
    write_initial_model(run)
    return with_broadcast(run, format="delta", anchor_every=ANCHOR_EVERY)


def with_broadcast(run: Run, **changes: Any) -> Run:
    run.spec = changed(run.spec, broadcast=changes)
    return run


def add_version(run: Run, version: int, *, share: float = 0.01) -> None:
    """What the learner writes: the parameters before, of which a share is other numbers now."""
    start = init_params(model_config(run.spec), jax.random.key(0))
    rng = np.random.default_rng(version)

    def moved(leaf: Any) -> np.ndarray:
        new = np.array(leaf).ravel()
        count = max(1, int(share * new.size))
        new[:count] = rng.standard_normal(count)
        return new.reshape(leaf.shape)

    params = jax.tree.map(moved, start) if version else start
    save_params(params_folder(run.path, run.spec), version, params, {"sequences": [version]})()


def publish_each(run: Run, *versions: int) -> None:
    publisher = Publisher(run.path, run.spec, LOG)
    for version in versions:
        add_version(run, version)
        assert publisher.publish_new()[-1] == version
        publisher.refresh()


def signed(run: Run, version: int) -> bytes:
    return (run.path / "store" / "origin" / manifest_name("tiny", version)).read_bytes()


def manifest(run: Run, version: int) -> WeightsManifest:
    return open_manifest(signed(run, version), run="tiny", publishers={run.publisher.public_hex})


def test_a_version_goes_out_as_what_changed_and_every_fourth_whole_too(run: Run) -> None:
    # when six versions are published
    publish_each(run, 0, 1, 2, 3, 4, 5)
    # then each but the first has the one before as its base, and two are whole
    found = {v: manifest(run, v) for v in (0, 1, 2, 3, 4, 5)}
    assert {v: m.base for v, m in found.items()} == {0: None, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    assert [v for v, m in found.items() if m.is_anchor] == [0, 4]
    # and a delta is what was changed (and its header, most of it here), the small files beside it
    whole = sum(info.size for info in found[0].objects.values())
    delta = found[5]
    assert sum(info.size for info in delta.delta.values()) < whole / 5
    assert {"config.json", "tokenizer.json", "probe.json"} <= set(delta.objects)
    assert set(delta.delta) == {"model.safetensors.delta"}


def test_versions_with_gaps_are_counted_and_not_the_steps_between(run: Run) -> None:
    # given a run on documents that publishes every tenth step, and the last
    pretrain = {"kind": "pretrain", "tokens_per_update": 1024, "publish_every": 10}
    run.spec = run.spec.model_copy(update={"algorithm": Pretrain.model_validate(pretrain)})
    # when six versions are published
    publish_each(run, 0, 10, 20, 30, 40, 45)
    # then each has the one before as its base, and the fifth is whole, and the last with it
    found = {v: manifest(run, v) for v in (0, 10, 20, 30, 40, 45)}
    assert {v: m.base for v, m in found.items()} == {0: None, 10: 0, 20: 10, 30: 20, 40: 30, 45: 40}
    assert [v for v, m in found.items() if m.is_anchor] == [0, 40, 45]
    assert versions_in(weights_folder(run.path)) == [30, 40, 45]


def test_deltas_one_after_the_other_make_the_weights_that_were_exported(
    run: Run, tmp_path: Path
) -> None:
    publish_each(run, 0, 1, 2)
    weights = weights_folder(run.path)
    copy = shutil.copytree(weights / "v0", tmp_path / "copy")

    apply_deltas(copy, [weights / f"v{v}" / "delta" for v in (1, 2)], manifest(run, 2).tensors)

    made, exported = copy / "model.safetensors", weights / "v2" / "model.safetensors"
    assert made.read_bytes() == exported.read_bytes()


@pytest.mark.parametrize("lost", ["nothing", "its weights", "its base", "half a delta"])
def test_a_published_version_is_left_as_it_is(run: Run, lost: str) -> None:
    # given a publisher that died with version 2 out
    publish_each(run, 0, 1, 2)
    before = signed(run, 2)
    weights = weights_folder(run.path)
    if lost == "its weights":
        shutil.rmtree(weights / "v2")
    if lost == "its base":
        shutil.rmtree(weights / "v1")
    if lost == "half a delta":
        (weights / "v2" / ".tmp-0123-delta").mkdir()
    # when another starts, then it goes on from there, and signs no other manifest
    publish_each(run, 3)
    assert signed(run, 2) == before
    assert manifest(run, 3).base == 2


def test_a_version_that_was_stored_and_not_announced_is_announced(run: Run) -> None:
    # given a publisher that died between a version's manifest and latest.json
    publish_each(run, 0)
    store = run.path / "store" / "origin"
    latest = (store / latest_name("tiny")).read_bytes()
    publish_each(run, 1)
    (store / latest_name("tiny")).write_bytes(latest)
    before = signed(run, 1)
    # when another starts
    publisher = Publisher(run.path, run.spec, LOG)
    publisher.publish_new()
    # then it says what is newest, and changes nothing of it
    assert newest_version(store, run="tiny") == 1
    assert signed(run, 1) == before


def test_newer_roles_are_served_where_nothing_is_new(run: Run) -> None:
    # given roles that were signed again while the publisher was down
    publish_each(run, 0)
    run.sign_roles()
    publisher = Publisher(run.path, run.spec, LOG)
    publisher.publish_new()
    publisher.refresh()
    served = (run.path / "store" / "origin" / "tiny" / "roles.json").read_bytes()
    assert served == (run.path / "keys" / "roles.json").read_bytes()


def test_the_same_versions_have_the_same_manifests(run: Run, tmp_path: Path) -> None:
    again = Run(tmp_path / "again", run.spec)
    write_initial_model(again)
    for one in (run, again):
        publish_each(one, 0, 1)
    assert manifest(run, 1) == manifest(again, 1)


@pytest.mark.parametrize("form", ["full", "delta"])
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is not what was"),
        ("model.safetensors", lambda data: data[:100], "cut off"),
        ("tensors.json", lambda data: b"{", "tensors.json cannot be read"),
    ],
)
def test_weights_damaged_before_they_were_published_are_exported_again(
    run: Run,
    caplog: pytest.LogCaptureFixture,
    form: str,
    name: str,
    damage: Callable[[bytes], bytes],
    said: str,
) -> None:
    # given a version that was exported and not published, and a file of it that is damaged
    publish_each(run, 0, 1)
    exported = weights_folder(run.path) / "v1"
    sound = [(exported / part).read_bytes() for part in ("model.safetensors", "tensors.json")]
    shutil.rmtree(run.path / "store" / "origin" / "tiny" / "versions" / "1")
    (run.path / "store" / "origin" / latest_name("tiny")).unlink()
    (exported / name).write_bytes(damage((exported / name).read_bytes()))
    # when the publisher starts
    with_broadcast(run, format=form)
    assert Publisher(run.path, run.spec, LOG).publish_new() == [1]
    # then it says so, and publishes what the learner saved
    assert sound == [
        (exported / part).read_bytes() for part in ("model.safetensors", "tensors.json")
    ]
    assert said in caplog.text and "exported again" in caplog.text
    assert manifest(run, 1).base == (None if form == "full" else 0)


def test_with_a_damaged_base_a_version_goes_out_whole(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    publish_each(run, 0, 1)
    (weights_folder(run.path) / "v1" / "model.safetensors").write_bytes(b"")
    publish_each(run, 2, 3)
    assert (manifest(run, 2).base, manifest(run, 2).is_anchor) == (None, True)
    assert (manifest(run, 3).base, manifest(run, 3).is_anchor) == (2, False)
    assert "version 2 goes out whole" in caplog.text and "header is cut off" in caplog.text


def test_without_a_base_a_version_goes_out_whole(run: Run) -> None:
    # given weights that are gone from this disk, for whatever reason
    publish_each(run, 0, 1)
    shutil.rmtree(weights_folder(run.path))
    publisher = Publisher(run.path, run.spec, LOG)
    add_version(run, 2)
    shutil.rmtree(params_folder(run.path, run.spec) / "v1")
    publisher.publish_new()
    assert (manifest(run, 2).base, manifest(run, 2).is_anchor) == (None, True)
    # and the next is a delta again
    add_version(run, 3)
    publisher.publish_new()
    assert (manifest(run, 3).base, manifest(run, 3).is_anchor) == (2, False)


def test_weights_of_before_a_rollback_are_no_base(run: Run) -> None:
    # given a rollback to version 2: the store is gone, weights before it stay, the keys are new
    publish_each(run, 0, 1, 2)
    shutil.rmtree(run.path / "store" / "origin" / "tiny")
    shutil.rmtree(weights_folder(run.path) / "v2")
    shutil.rmtree(run.path / "keys")
    rolled_back = Run(run.path, run.spec)
    # when it goes on
    publish_each(rolled_back, 3)
    # then nobody needs what no store has: the first version is whole, the next a delta of it
    assert (manifest(rolled_back, 2).base, manifest(rolled_back, 2).is_anchor) == (None, True)
    assert manifest(rolled_back, 3).base == 2


def test_where_everything_changed_it_goes_out_whole(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish_each(run, 0)
    add_version(run, 1, share=1.0)
    Publisher(run.path, run.spec, LOG).publish_new()
    assert (manifest(run, 1).base, manifest(run, 1).is_anchor) == (None, True)
    assert not (weights_folder(run.path) / "v1" / "delta").exists()
    assert "100 % of the elements changed since version 0" in caplog.text


def test_the_log_says_what_changed_and_how_long_it_took(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish_each(run, 0, 1)
    delta = sum(info.size for info in manifest(run, 1).delta.values())
    assert f"elements changed since version 0: a delta of {delta} bytes, of " in caplog.text
    assert "version 1 published as a delta of version 0 as" in caplog.text
    assert "compared in" in caplog.text and "version 0 published whole as" in caplog.text


def test_a_run_may_change_to_deltas_and_back(run: Run) -> None:
    publish_each(with_broadcast(run, format="full"), 0, 1)
    publish_each(with_broadcast(run, format="delta"), 2)
    publish_each(with_broadcast(run, format="full"), 3)
    publish_each(with_broadcast(run, format="delta"), 5)
    found = {v: manifest(run, v) for v in (1, 2, 3, 5)}
    assert {v: (m.base, m.is_anchor) for v, m in found.items()} == {
        1: (None, True),
        2: (1, False),
        3: (None, True),
        5: (3, False),
    }


def test_old_weights_go_and_the_anchor_stays_in_the_store(run: Run) -> None:
    # given more versions than are kept, the newest anchor among the old ones
    publish_each(run, 0, 1, 2, 3)
    assert versions_in(weights_folder(run.path)) == [1, 2, 3]
    for version in (0, 1, 2, 3):
        assert manifest(run, version)
    # when there is another anchor, and a chain after it, then the old chain goes
    publish_each(run, 4, 5, 6)
    stored = {int(p.name) for p in (run.path / "store/origin/tiny/versions").iterdir()}
    assert stored == {4, 5, 6}


def test_what_a_power_cut_took_of_a_published_version_is_put_back(run: Run) -> None:
    # given a stored chunk that is not what it was: manifests are synced, chunks are not
    publish_each(run, 0, 1)
    (info,) = manifest(run, 1).delta.values()
    chunk = run.path / "store" / "origin" / chunk_name("tiny", info.chunks[0].blake3)
    delta = chunk.read_bytes()
    chunk.write_bytes(b"")
    before = signed(run, 1)
    # when the publisher starts again
    Publisher(run.path, run.spec, LOG).publish_new()
    # then the version can be had again, and is the same
    assert (chunk.read_bytes(), signed(run, 1)) == (delta, before)


def test_a_renewed_key_goes_on_with_an_anchor(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    # given a publisher's key that was revoked for a new one, and so all that it had signed
    publish_each(run, 0, 1)
    before = signed(run, 1)
    shutil.rmtree(run.path / "keys")
    renewed = Run(run.path, run.spec, root=run.root)
    # when it goes on
    publish_each(renewed, 2, 3)
    # then the next version needs nothing of what nobody believes, and the old one is left alone
    assert (manifest(renewed, 2).base, manifest(renewed, 2).is_anchor) == (None, True)
    assert manifest(renewed, 3).base == 2
    assert signed(run, 1) == before
    assert "version 1 stays as it is in the store" in caplog.text
