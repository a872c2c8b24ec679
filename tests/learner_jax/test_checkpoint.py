"""Checkpoints on a disk and in an object store: what was written comes back, or an error names it.

And saves in the background: one at a time, waited for, and never failing in silence.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from bridge.orbax_io import open_leaves, read_leaf
from learner_jax import checkpoint as checkpoint_module
from learner_jax.checkpoint import (
    Saver,
    StateInfo,
    check_state,
    load_beside,
    load_params,
    load_state,
    save_params,
    save_state,
    state_steps,
)
from learner_jax.step import TrainState
from runspec.core import files
from runspec.core.errors import UserError
from runspec.core.files import Folder, ObjectPath, folder_at, last_file
from runspec.core.run_files import clear_unfinished, versions_in
from runspec.core.schema.load import dump_resolved
from tests.learner_jax.conftest import changed, write_initial_model
from tests.learner_jax.test_runner import train_to_the_end
from tests.object_store import BUCKET, s3_server

pytestmark = pytest.mark.slow  # a server of objects, and Orbax
LOG = logging.getLogger("test")


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["disk", "s3"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    """An empty folder."""
    if request.param == "disk":
        return tmp_path
    for name, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(name, value)
    return folder_at(f"s3://{BUCKET}/{request.node.name}")


def contents(folder: Folder) -> dict[str, bytes]:
    """Every file below a folder that holds anything."""
    if isinstance(folder, ObjectPath):
        found = {name: (folder / name).read(1 << 24) for name in folder.names()}
    else:
        files = (path for path in folder.rglob("*") if path.is_file())
        found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if data}


def write(path: Folder, data: bytes) -> None:
    path.write(data) if isinstance(path, ObjectPath) else path.write_bytes(data)


def save(folder: Folder, step: int, state: Any, *, keep: int = 3, beside: Any = None) -> None:
    """A full state, both parts of its save."""
    info = StateInfo(step, "cd" * 32, 7, "ab" * 32, published=True, fingerprint={"mesh": "fsdp=2"})
    save_state(folder, info, state, keep=keep, beside=beside)()


def load(folder: Folder, step: int, target: Any) -> Any:
    check_state(folder, step)
    return load_state(folder, step, target)


def mesh_of(count: int) -> Mesh:
    return jax.make_mesh((count,), ("fsdp",), devices=jax.devices()[:count])


def sharded(array: Any, mesh: Mesh) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(None, "fsdp")))


def tree(mesh: Mesh, dtype: Any = jnp.float32) -> dict[str, Any]:
    values = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    return {
        "layers": {"q": sharded(jnp.asarray(values, dtype), mesh)},
        "updates": jnp.asarray(5, jnp.int32),
    }


def like(value: Any, mesh: Mesh) -> Any:
    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, "fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(described, value)


def assert_same(read: Any, written: Any) -> None:
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype


@pytest.mark.parametrize("devices", [1, 4])
def test_a_state_comes_back_bit_for_bit_onto_another_mesh(folder, devices):
    # given a state written by two devices, with leaves in a dict, a tuple and a dataclass
    values = tree(mesh_of(2))
    written = TrainState(values, (values, tree(mesh_of(2), jnp.bfloat16)), jnp.int32(3))
    save(folder, 10, written)
    # when a mesh of another size restores it, then every bit is there, and lies where it says
    target = like(written, mesh_of(devices))
    read = load(folder, 10, target)
    assert_same(read, written)
    for leaf, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_a_version_is_an_orbax_checkpoint_beside_its_probe(folder, tmp_path, monkeypatch):
    # given the parameters of a version
    written = tree(mesh_of(2), jnp.bfloat16)
    save_params(folder, 4, written, {"sequences": [[1]]})()
    assert versions_in(folder) == [4]
    probe = contents(folder)[str(last_file(folder / "v4", "probe.json"))[len(str(folder)) + 1 :]]
    assert json.loads(probe)["sequences"] == [[1]]
    # then they come back, also by Orbax from a copy on a disk
    assert_same(load_params(folder, 4, like(written, mesh_of(1))), written)
    params = folder / "v4" / "params"
    for name, data in contents(params).items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert_same(ocp.load(tmp_path / "copy", like(written, mesh_of(1))), written)
    # and each stored chunk of a stacked leaf is of one layer, of one device, and is read alone
    path, values = ("layers", "q"), np.asarray(written["layers"]["q"])
    store = open_leaves(params, {path: (3, 8)}, among_others=True)[path]
    assert store.chunk_layout.read_chunk.shape == (1, 4)
    for layer in range(3):
        np.testing.assert_array_equal(store[layer].read().result(), values[layer])
    np.testing.assert_array_equal(read_leaf(store, path, place=params), values)


def test_only_whole_states_are_seen_and_the_newest_kept(folder):
    # given what a killed learner leaves: a directory under a temporary name, or no marker
    for step in (1, 9, 10, 11):
        save(folder, step, tree(mesh_of(1)), keep=2)
    if isinstance(folder, ObjectPath):
        (folder / "step_12" / "state" / "half").write(b"")
    else:
        (folder / ".tmp-0123-step_12" / "state").mkdir(parents=True)
    assert state_steps(folder) == [10, 11]
    # when the learner starts again, then nothing of it is left, nor of what was dropped
    clear_unfinished(folder, LOG)
    assert {name.split("/")[0] for name in contents(folder)} - {"whole"} == {"step_10", "step_11"}
    assert isinstance(folder, ObjectPath) or len(list(folder.iterdir())) == 2


def test_a_damaged_or_missing_file_is_named(folder):
    values = tree(mesh_of(2))
    save(folder, 10, values)
    state, target = folder / "step_10", like(values, mesh_of(2))
    for name, whole in contents(state).items():
        # given one bit of one file flipped, or the file gone
        write(state / name, bytes([whole[0] ^ 1]) + whole[1:])
        if isinstance(folder, Path) or not name.endswith("_CHECKPOINT_METADATA"):  # nobody reads it
            with pytest.raises(UserError, match=r"unreadable checkpoint|cannot read"):
                load(folder, 10, target)
        (state / name).unlink()
        # when the state is read, then the error names it and what to do
        with pytest.raises(UserError, match="unreadable checkpoint") as caught:
            load(folder, 10, target)
        assert "step_10" in str(caught.value.place) and "put" in str(caught.value.remedy)
        write(state / name, whole)
    load(folder, 10, target)
    # given another shape, or another tree
    wider = {"layers": {"q": jnp.zeros((3, 16))}, "updates": jnp.int32(0)}
    for other in (wider, values["layers"]):
        with pytest.raises(UserError, match="unreadable checkpoint"):
            load(folder, 10, like(other, mesh_of(1)))
    # given a record that is torn or foreign
    record = last_file(state, "state.json")
    for damage in (b"", b"{", b'{"format":1,"step":1}', b"[]"):
        write(record, damage)
        with pytest.raises(UserError, match="unreadable checkpoint") as caught:
            check_state(folder, 10)
        assert caught.value.place == str(record)


def test_arrays_beside_a_state_come_back_and_lost_ones_are_named(folder, monkeypatch):
    # given a state with arrays of an island beside it, one of which an object store takes in parts
    monkeypatch.setattr("learner_jax.leaves.CHUNK_BYTES", 96)
    beside = {"theta": np.linspace(0, 1, 61, dtype=np.float32), "pending": np.arange(3)}
    save(folder, 1, tree(mesh_of(1)))
    save(folder, 2, tree(mesh_of(1)), beside=beside)
    assert not any(name.startswith("step_1/beside") for name in contents(folder))
    info = check_state(folder, 2)
    # then they come back bit for bit
    read = load_beside(folder, info)
    assert read.keys() == beside.keys()
    assert_same(read, beside)
    # and one that is not there, or is of another kind, is an error by name
    for name, shape, said in (("momentum", (3,), "momentum"), ("pending", (4,), r"int64\(3,\)")):
        with pytest.raises(UserError, match=f"unreadable checkpoint: .*{said}") as caught:
            load_beside(folder, replace(info, beside={name: ["int64", list(shape)]}))
        assert "step_2/beside" in str(caught.value.place)
    # and a damaged one is found when it is checked or read, a lost one at once
    stored = {name: data for name, data in contents(folder / "step_2").items() if "theta" in name}
    parts = [name for name in stored if "/c/" in name]
    assert len(parts) == (3 if isinstance(folder, ObjectPath) else 0)
    name = (parts or list(stored))[-1]
    lost = folder / "step_2" / name
    write(lost, stored[name][:-1] + bytes([stored[name][-1] ^ 1]))
    with pytest.raises(UserError, match="unreadable checkpoint"):
        load_beside(folder, check_state(folder, 2))
    lost.unlink()
    with pytest.raises(UserError, match=rf"unreadable checkpoint: .*{name[-9:]} is missing"):
        check_state(folder, 2)


@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_arrays_larger_than_a_chunk_are_cut(folder, monkeypatch):
    monkeypatch.setattr("learner_jax.leaves.CHUNK_BYTES", 64)
    mesh = mesh_of(2)
    values = {"embedding": sharded(np.arange(24 * 16, dtype=np.float32).reshape(24, 16), mesh)}
    save_params(folder, 1, values, {})()
    assert len([name for name in contents(folder / "v1") if "/c/" in name]) > 2
    assert_same(load_params(folder, 1, like(values, mesh)), values)


@pytest.mark.parametrize("folder", ["s3"], indirect=True)
def test_a_learner_whose_store_cannot_be_reached_says_so(folder, run, monkeypatch):
    # given a run whose checkpoints lie behind a closed port
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(files.RETRIES, "max_retries", 1)
    run.spec = changed(run.spec, checkpoints={"dir": str(folder)})
    (run.path / "spec.json").write_bytes(dump_resolved(run.spec))
    write_initial_model(run)
    # when the learner starts, then it ends by name
    with pytest.raises(UserError, match=r"the object store fails at .*Could not connect") as caught:
        train_to_the_end(run)
    assert caught.value.place == "checkpoints.dir"


@pytest.mark.parametrize("url", ["az://bucket/x", "s3://", "gs:///x"])
def test_a_url_of_no_store_is_refused(url):
    with pytest.raises(UserError, match="no folder of an object store"):
        folder_at(url)


def test_training_goes_on_while_a_state_is_written(tmp_path):
    # given states of some size, and a step that reuses their memory
    mesh, step = mesh_of(4), jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    state = {
        "layers": {"q": sharded(jnp.zeros((512, 2048)), mesh)},
        "updates": jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec())),
    }
    target = like(state, mesh)
    for number in range(3):
        # when a save has begun, and the steps after it change everything before it is written
        info = StateInfo(number, None, 7, "ab" * 32, published=True, fingerprint={})
        finish = save_state(tmp_path, info, state, keep=9)
        for _ in range(4):
            state = step(state)
        jax.block_until_ready(state)
        assert state_steps(tmp_path) == list(range(number))
        finish()
    # then each holds what was there when it began
    for number in range(3):
        read = load(tmp_path, number, target)
        assert (np.asarray(read["layers"]["q"]) == 4 * number).all()
        assert int(read["updates"]) == 4 * number


def test_a_full_disk_is_an_error_by_name_and_leaves_no_state(tmp_path, monkeypatch):
    # given a disk that takes no file of more than a few bytes
    state, removed = tree(mesh_of(2)), list[Path]()

    def remove(folder: Path, *, ignore_errors: bool) -> None:
        mark = folder / "mark"
        mark.touch()
        shutil.rmtree(folder, ignore_errors=ignore_errors)
        removed.extend([folder] * (not mark.exists()))

    monkeypatch.setattr(checkpoint_module, "shutil", Mock(rmtree=remove))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        # when a state is saved, then the error says what to do
        with pytest.raises(UserError, match="cannot write a checkpoint") as caught:
            save(tmp_path, 1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "disk" in str(caught.value.remedy)
    # and nothing looks like one; the folder is removed, but a late write may make it again
    assert state_steps(tmp_path) == []
    assert removed == [tmp_path / ".tmp-step_1"]


def test_the_next_save_begins_when_the_one_before_is_written():
    written: list[str] = []
    allowed = threading.Event()

    def begin(name: str) -> Callable[[], None]:
        written.append(f"begin {name}")

        def finish() -> None:
            allowed.wait()
            written.append(f"finish {name}")

        return finish

    with Saver(LOG) as saver:
        # given a save that is being written
        saver.run("a", lambda: begin("a"))
        assert written == ["begin a"]
        # when another is asked for, then it begins after the first
        allowed.set()
        saver.run("b", lambda: begin("b"))
    # and leaving waits for it
    assert written == ["begin a", "finish a", "begin b", "finish b"]


def test_a_failed_save_is_raised_once_and_hides_no_other_error(caplog):
    def failing() -> None:
        raise UserError("cannot write a checkpoint: disk full", place="step_2")

    # given a save that fails, then the next wait says so, once
    with Saver(LOG) as saver:
        saver.run("a state", lambda: failing)
        with pytest.raises(UserError, match="disk full"):
            saver.wait()
        saver.wait()
    # or the end of the block
    with pytest.raises(UserError, match="disk full"), Saver(LOG) as saver:
        saver.run("a state", lambda: failing)
    # or the log, where another error ends it
    with pytest.raises(UserError, match="no batch"), Saver(LOG) as saver:
        saver.run("a state", lambda: failing)
        raise UserError("no batch")
    assert "disk full" in caplog.text


def test_a_save_past_its_deadline_is_named_and_not_waited_for_again(monkeypatch):
    # given a save that does not end, and little patience
    monkeypatch.setattr(checkpoint_module, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(checkpoint_module, "DEADLINE_S", 0.02)
    ended = threading.Event()
    try:
        # when it is waited for, then the error names it, and leaving does not wait once more
        with pytest.raises(UserError, match="a state is not written after"), Saver(LOG) as saver:
            saver.run("a state", lambda: ended.wait)
            saver.wait()
        saver.wait()
    finally:
        ended.set()
