"""From parameters on disk to served weights: in order, as what changed or whole, once, and the same
however often the publisher is started again."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bridge.delta import apply_deltas
from bridge.publisher import Publisher, publish_versions
from broadcast.layout import chunk_name, latest_name, manifest_name
from broadcast.manifest import WeightsManifest, open_manifest
from broadcast.store import newest_version
from learner_jax.checkpoint import save_params
from learner_jax.model import init_params
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.roles import Latest, open_latest
from runspec.core.run_files import params_folder, versions_in, weights_folder
from runspec.core.schema import Pretrain
from tests.figures import figures_of
from tests.learner_jax.conftest import Run, changed, tiny_spec, write_initial_model
from tests.waiting import eventually

pytestmark = pytest.mark.slow
LOG = logging.getLogger("test")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with an initial model, which publishes deltas, and every fourth version whole too."""
    run = Run(tmp_path / "run", tiny_spec())
    write_initial_model(run)
    return with_broadcast(run, format="delta", anchor_every=4)


def with_broadcast(run: Run, **changes: Any) -> Run:
    run.spec = changed(run.spec, broadcast=changes)
    return run


def add_version(run: Run, version: int, *, share: float = 0.01, seed: int | None = None) -> None:
    """What the learner writes: the parameters before, of which a share is other numbers now."""
    start = init_params(model_config(run.spec), jax.random.key(0))
    rng = np.random.default_rng(version if seed is None else seed)

    def moved(leaf: Any) -> np.ndarray:
        new = np.array(leaf).ravel()
        count = max(1, int(share * new.size))
        new[:count] = rng.standard_normal(count)
        return new.reshape(leaf.shape)

    params = jax.tree.map(moved, start) if version or seed else start
    save_params(params_folder(run.path, run.spec), version, params, {"sequences": [version]})()


def publish_each(run: Run, *versions: int) -> Publisher:
    """A publisher that is started, and finds each version when the one before is out."""
    publisher = Publisher(run.path, run.spec, LOG)
    for version in versions:
        add_version(run, version)
        assert publisher.publish_new()[-1] == version
        publisher.refresh()
    return publisher


def store(run: Run) -> Path:
    return run.path / "store" / "origin"


def weights(run: Run, version: int) -> Path:
    return weights_folder(run.path) / f"v{version}"


def signed(run: Run, version: int) -> bytes:
    return (store(run) / manifest_name("tiny", version)).read_bytes()


def manifest(run: Run, version: int) -> WeightsManifest:
    return open_manifest(signed(run, version), run="tiny", publishers={run.publisher.public_hex})


def forms(run: Run, *versions: int) -> dict[int, tuple[int | None, bool]]:
    """The base of each version, and whether it is whole."""
    return {v: (manifest(run, v).base, manifest(run, v).is_anchor) for v in versions}


def latest(run: Run) -> Latest:
    data = (store(run) / latest_name("tiny")).read_bytes()
    return open_latest(data, run="tiny", publishers={run.publisher.public_hex})


WHOLE = (None, True)


def test_versions_go_out_as_what_changed_and_every_fourth_whole_too(run, tmp_path):
    # when four versions are published
    publisher = publish_each(run, 0, 1, 2, 3)
    # then each but the first has the one before as its base
    assert forms(run, 0, 1, 2, 3) == {0: WHOLE, 1: (0, False), 2: (1, False), 3: (2, False)}
    assert latest(run).version == 3
    # and a delta is what was changed (and its header, most of it here), the small files beside it
    whole, delta = manifest(run, 0), manifest(run, 3)
    small = sum(info.size for info in delta.delta.values())
    assert small < sum(info.size for info in whole.objects.values()) / 5
    assert {"config.json", "tokenizer.json", "probe.json"} <= set(delta.objects)
    assert set(delta.delta) == {"model.safetensors.delta"}
    # and of weights the newest three are left, of parameters the newest, in the store all
    assert versions_in(weights_folder(run.path)) == [1, 2, 3]
    assert versions_in(params_folder(run.path, run.spec)) == [3]
    # and deltas one after the other make the weights that were exported
    copy = shutil.copytree(weights(run, 1), tmp_path / "copy")
    apply_deltas(copy, [weights(run, v) / "delta" for v in (2, 3)], delta.tensors)
    made, exported = copy / "model.safetensors", weights(run, 3) / "model.safetensors"
    assert made.read_bytes() == exported.read_bytes()
    # when the next is an anchor, and a chain follows it, then the old chain goes from the store
    for version in (4, 5, 6):
        add_version(run, version)
    assert publisher.publish_new() == [4, 5, 6]
    assert forms(run, 4, 5) == {4: (3, True), 5: (4, False)}
    stored = {path.name for path in (store(run) / "tiny/versions").iterdir()}
    assert stored == {"4", "5", "6"}
    # and whoever asks is told how much it was
    found = figures_of(publisher.figures)
    assert found["runspec_publisher_newest_version"] == 6.0
    assert found["runspec_publisher_versions_total/delta"] == 5.0


def test_versions_with_gaps_are_counted_and_not_the_steps_between(run):
    # given a run on documents that publishes every tenth step, and the last
    pretrain = {"kind": "pretrain", "tokens_per_update": 1024, "publish_every": 10}
    run.spec = run.spec.model_copy(update={"algorithm": Pretrain.model_validate(pretrain)})
    # when six versions are published
    publish_each(run, 0, 10, 20, 30, 40, 45)
    # then each has the one before as its base, and the fifth is whole, and the last with it
    assert forms(run, 0, 10, 20, 30, 40, 45) == {
        0: WHOLE,
        10: (0, False),
        20: (10, False),
        30: (20, False),
        40: (30, True),
        45: (40, True),
    }


@pytest.mark.parametrize(
    ("form", "lost"),
    [
        *(("full", lost) for lost in ("nothing", "store", "weights", "half an export")),
        *(("delta", lost) for lost in ("nothing", "weights", "base", "half a delta", "manifest")),
    ],
)
def test_a_publisher_killed_anywhere_goes_on(run, form, lost):
    # given a publisher that died with version 2 out, or in the middle of it
    with_broadcast(run, format=form)
    publish_each(run, 0, 1)
    announced = store(run) / latest_name(run.spec.name)
    before = announced.read_bytes()
    publish_each(run, 2)
    digest = latest(run).manifest_digest
    made = weights(run, 2)
    gone = {"store": store(run), "base": weights(run, 1), "weights": made, "half an export": made}
    if lost in gone:
        shutil.rmtree(gone[lost])
    half = {"half an export": ".tmp-0123-v2", "half a delta": "v2/.tmp-0123-delta"}
    if lost in half:
        (weights_folder(run.path) / half[lost]).mkdir()
    if lost == "manifest":  # a delta lies there, and nobody knows from which base
        (store(run) / manifest_name(run.spec.name, 2)).unlink()
        announced.write_bytes(before)
    # when another is started
    publisher = Publisher(run.path, run.spec, LOG)
    assert publisher.publish_new() == [2]
    # then the version has the manifest that it had, and the next one follows
    assert (latest(run).version, latest(run).manifest_digest) == (2, digest)
    add_version(run, 3)
    assert publisher.publish_new() == [3]
    assert manifest(run, 3).base == (2 if form == "delta" else None)
    assert not list(weights_folder(run.path).rglob(".tmp-*"))


def test_who_starts_again_announces_what_is_stored_and_serves_newer_roles(run):
    # given a publisher that died between a version's manifest and latest.json
    publish_each(run, 0)
    named = store(run) / latest_name("tiny")
    before = named.read_bytes()
    publish_each(run, 1)
    named.write_bytes(before)
    stored = signed(run, 1)
    # and roles that were signed again while it was down
    run.sign_roles()
    # when another starts, then it says what is newest, and changes nothing of it
    publisher = Publisher(run.path, run.spec, LOG)
    publisher.publish_new()
    first = latest(run)
    assert (newest_version(store(run), run="tiny"), signed(run, 1)) == (1, stored)
    # and while no version comes it signs that again, and serves the roles
    publisher.refresh()
    assert latest(run).issued > first.issued and latest(run).expires > first.expires
    assert latest(run).manifest_digest == first.manifest_digest
    served = store(run) / "tiny" / "roles.json"
    assert served.read_bytes() == (run.path / "keys" / "roles.json").read_bytes()


def test_a_version_is_never_published_with_other_bits(run):
    # given parameters of version 0 that are not those published
    publish_each(run, 0)
    shutil.rmtree(params_folder(run.path, run.spec) / "v0")
    shutil.rmtree(weights(run, 0))
    add_version(run, 0, seed=99)
    # when the publisher starts again, then it refuses
    with pytest.raises(UserError, match="published"):
        Publisher(run.path, run.spec, LOG).publish_new()


@pytest.mark.parametrize(
    ("form", "name", "damage"),
    [
        ("full", "model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("delta", "model.safetensors", lambda data: data[:100]),
        ("delta", "tensors.json", lambda data: b"{"),
    ],
)
def test_weights_damaged_before_they_were_published_are_exported_again(run, form, name, damage):
    # given a version that was exported and not published, and a file of it that is damaged
    publish_each(run, 0, 1)
    files = [weights(run, 1) / part for part in ("model.safetensors", "tensors.json")]
    sound = [file.read_bytes() for file in files]
    shutil.rmtree(store(run) / "tiny" / "versions" / "1")
    (store(run) / latest_name("tiny")).unlink()
    (weights(run, 1) / name).write_bytes(damage((weights(run, 1) / name).read_bytes()))
    # when the publisher starts
    with_broadcast(run, format=form)
    assert Publisher(run.path, run.spec, LOG).publish_new() == [1]
    # then it publishes what the learner saved
    assert sound == [file.read_bytes() for file in files]
    assert manifest(run, 1).base == (None if form == "full" else 0)


def test_with_a_damaged_base_or_none_a_version_goes_out_whole(run):
    publish_each(run, 0, 1)
    (weights(run, 1) / "model.safetensors").write_bytes(b"")
    publish_each(run, 2, 3)
    assert forms(run, 2, 3) == {2: WHOLE, 3: (2, False)}
    # given weights that are gone from this disk, for whatever reason, before an anchor
    shutil.rmtree(weights_folder(run.path))
    shutil.rmtree(params_folder(run.path, run.spec) / "v3")
    # then that is whole alone, and the next is a delta again
    publish_each(run, 5, 6)
    assert forms(run, 5, 6) == {5: WHOLE, 6: (5, False)}


def test_where_everything_changed_it_goes_out_whole(run):
    publish_each(run, 0)
    add_version(run, 1, share=1.0)
    Publisher(run.path, run.spec, LOG).publish_new()
    assert forms(run, 1) == {1: WHOLE}
    assert not (weights(run, 1) / "delta").exists()


def test_weights_of_before_a_rollback_are_no_base(run):
    # given a rollback to version 2: the store is gone, weights before it stay, the keys are new
    publish_each(run, 0, 1, 2)
    for gone in (store(run) / "tiny", weights(run, 2), run.path / "keys"):
        shutil.rmtree(gone)
    rolled_back = Run(run.path, run.spec)
    # when it goes on
    publish_each(rolled_back, 3)
    # then nobody needs what no store has: the first version is whole, the next a delta of it
    assert forms(rolled_back, 2, 3) == {2: WHOLE, 3: (2, False)}


def test_what_a_power_cut_took_of_a_published_version_is_put_back(run):
    # given a stored chunk that is not what it was: manifests are synced, chunks are not
    publish_each(run, 0, 1)
    (info,) = manifest(run, 1).delta.values()
    chunk = store(run) / chunk_name("tiny", info.chunks[0].blake3)
    delta, before = chunk.read_bytes(), signed(run, 1)
    chunk.write_bytes(b"")
    # when the publisher starts again, then the version can be had again, and is the same
    Publisher(run.path, run.spec, LOG).publish_new()
    assert (chunk.read_bytes(), signed(run, 1)) == (delta, before)


def test_a_renewed_key_goes_on_with_an_anchor(run):
    # given a publisher's key that was revoked for a new one, and so all that it had signed
    publish_each(run, 0, 1)
    before = signed(run, 1)
    shutil.rmtree(run.path / "keys")
    renewed = Run(run.path, run.spec, root=run.root)
    # when it goes on
    publish_each(renewed, 2, 3)
    # then the next version needs nothing of what nobody believes, and the old one is left alone
    assert forms(renewed, 2, 3) == {2: WHOLE, 3: (2, False)}
    assert signed(run, 1) == before


def test_the_loop_publishes_what_appears_and_ends_when_told(run):
    # given a publisher that waits
    stop = threading.Event()
    thread = threading.Thread(
        target=publish_versions, args=(Publisher(run.path, run.spec, LOG), stop)
    )
    thread.start()
    # when a version appears, then it is served soon
    add_version(run, 0)
    eventually(lambda: newest_version(store(run), run="tiny") == 0, "the version")
    stop.set()
    thread.join()
