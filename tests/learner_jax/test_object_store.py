"""Checkpoints in an object store: whole by their marker, the same bits, or an error by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from bridge.orbax_io import open_leaves, read_leaf
from learner_jax.checkpoint import (
    check_state,
    load_beside,
    load_params,
    save_params,
    state_steps,
)
from learner_jax.step import TrainState
from runspec.core import object_store
from runspec.core.errors import UserError
from runspec.core.object_store import ObjectPath, folder_at
from runspec.core.run_files import clear_unfinished, versions_in
from runspec.core.spec.resolved import dump_resolved
from tests.learner_jax.conftest import Run, changed, write_initial_model
from tests.learner_jax.test_checkpoint import (
    like,
    load,
    mesh_of,
    outer_state,
    save,
    sharded,
    tree,
)
from tests.learner_jax.test_runner import train_to_the_end
from tests.object_store import BUCKET, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def store(
    server: dict[str, str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> ObjectPath:
    """An empty folder."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    folder = folder_at(f"s3://{BUCKET}/{request.node.name}")
    assert isinstance(folder, ObjectPath)
    return folder


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_state_comes_back_bit_for_bit_onto_another_mesh(store: ObjectPath, devices: int) -> None:
    # given a state written by two devices, with leaves in a dict, a tuple and a dataclass
    values = tree(mesh_of(2))
    written = TrainState(values, (values, tree(mesh_of(2), jnp.bfloat16)), jnp.int32(3))
    save(store, 10, written)
    # when a mesh of another size restores it
    target = jax.tree.map(lambda leaf: like({"x": leaf}, mesh_of(devices))["x"], written)
    read = load(store, 10, target)
    # then every bit is there, and lies where the target says
    for a, b, t in zip(*map(jax.tree.leaves, (read, written, target)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(t.sharding, a.ndim)


def test_a_copy_on_a_disk_is_an_orbax_checkpoint(store: ObjectPath, tmp_path: Path) -> None:
    # given the parameters of a version in a store
    written = tree(mesh_of(2), jnp.bfloat16)
    save_params(store, 4, written, {"sequences": [[1]]})()
    assert versions_in(store) == [4]
    assert json.loads((store / "v4").marker.read(1000))["sequences"] == [[1]]
    # when its objects are copied to a disk
    folder = store / "v4" / "params"
    for name in folder.names():
        path = tmp_path / "params" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / name).read(1 << 20))
    # then Orbax reads them
    read = ocp.load(tmp_path / "params", like(written, mesh_of(1)))
    for a, b in zip(*map(jax.tree.leaves, (read, written)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    # and the bridge reads those in the store
    path = ("layers", "q")
    leaf = read_leaf(
        open_leaves(folder, {path: (3, 8)}, among_others=True)[path], path, place=folder
    )
    np.testing.assert_array_equal(leaf, np.asarray(written["layers"]["q"]))


def test_only_whole_states_are_seen_and_the_newest_kept(store: ObjectPath) -> None:
    # given what a killed learner leaves: objects of a state without its marker
    for step in (1, 9, 10):
        save(store, step, tree(mesh_of(1)), keep=2)
    (store / "step_11" / "state" / "half").write(b"")
    assert state_steps(store) == [9, 10]
    # when the learner starts again, then nothing of it is left, nor of what was dropped
    clear_unfinished(store, logging.getLogger("test"))
    assert {name.split("/")[0] for name in store.names()} == {"step_9", "step_10", "whole"}


def test_a_damaged_or_missing_object_is_named(store: ObjectPath) -> None:
    values = tree(mesh_of(2))
    save(store, 1, values)
    folder, target = store / "step_1" / "state", like(values, mesh_of(2))
    for name in folder.names():
        whole = (folder / name).read(1 << 20)
        if not whole:
            continue
        # given one bit of one object flipped, or the object gone
        (folder / name).write(bytes([whole[0] ^ 1]) + whole[1:])
        if name != "_CHECKPOINT_METADATA":  # which nobody reads
            with pytest.raises(UserError, match=r"unreadable checkpoint|cannot read"):
                load(store, 1, target)
        (folder / name).unlink()
        # when the state is read, then the error names the state
        with pytest.raises(UserError, match=r"unreadable checkpoint: .* is missing") as caught:
            load(store, 1, target)
        assert str(caught.value.place).endswith("step_1")
        (folder / name).write(whole)
    load(store, 1, target)


def test_arrays_beside_a_state_come_back_and_lost_ones_are_named(store: ObjectPath) -> None:
    # given a state with arrays beside it
    beside = outer_state()
    save(store, 2, tree(mesh_of(1)), beside=beside)
    info = check_state(store, 2)
    # then they come back bit for bit, cut into objects that any store takes
    read = load_beside(store, info)
    for name, array in beside.items():
        np.testing.assert_array_equal(read[name], array)
    chunks = [name for name in (store / "step_2" / "beside").names() if "theta/c/" in name]
    assert len(chunks) == 3
    with pytest.raises(UserError, match=r"pending is int64\(3,\) there"):
        load_beside(store, replace(info, beside={"pending": ["int64", [4]]}))
    # and a damaged object is found when it is read, a lost one at once
    lost = store / "step_2" / "beside" / chunks[1]
    whole = lost.read(1 << 24)
    lost.write(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match="unreadable checkpoint"):
        load_beside(store, info)
    lost.unlink()
    with pytest.raises(UserError, match=r"beside/.*theta/c/1 is missing"):
        check_state(store, 2)


def test_a_state_of_another_shape_is_refused(store: ObjectPath) -> None:
    save(store, 1, tree(mesh_of(1)))
    for other in (
        {"layers": {"q": jnp.zeros((3, 16))}, "updates": jnp.int32(0)},
        tree(mesh_of(1))["layers"],
    ):
        with pytest.raises(UserError, match="unreadable checkpoint"):
            load(store, 1, like(other, mesh_of(1)))


def test_arrays_larger_than_a_chunk_are_cut(
    store: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner_jax.object_arrays.CHUNK_BYTES", 64)
    mesh = mesh_of(2)
    values = {"embedding": sharded(np.arange(24 * 16, dtype=np.float32).reshape(24, 16), mesh)}
    save_params(store, 1, values, {})()
    chunks = [name for name in (store / "v1").names() if "/c/" in name]
    assert len(chunks) > 2
    read = load_params(store, 1, like(values, mesh))
    np.testing.assert_array_equal(np.asarray(read["embedding"]), np.asarray(values["embedding"]))


def test_a_learner_whose_store_cannot_be_reached_says_so(
    store: ObjectPath, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run whose checkpoints lie behind a closed port
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(object_store.RETRIES, "max_retries", 1)
    run.spec = changed(run.spec, checkpoints={"dir": str(store)})
    (run.path / "spec.json").write_bytes(dump_resolved(run.spec))
    write_initial_model(run)
    # when the learner starts, then it ends by name
    with pytest.raises(UserError, match=r"the object store fails at .*Could not connect") as caught:
        train_to_the_end(run)
    assert caught.value.place == "checkpoints.dir"


@pytest.mark.parametrize("url", ["az://bucket/x", "s3://", "gs:///x"])
def test_a_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="no folder of an object store"):
        folder_at(url)
