"""Checkpoints: what comes back is what was written, onto any mesh, or an error that names it."""

from __future__ import annotations

import gc
import json
import logging
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bridge.orbax_io import open_leaves
from learner_jax import checkpoint
from learner_jax.checkpoint import (
    StateInfo,
    check_state,
    load_beside,
    load_params,
    load_state,
    save_params,
    save_state,
    state_steps,
)
from runspec.core.errors import UserError
from runspec.core.run_files import clear_unfinished, versions_in
from tests.waiting import eventually


def save(
    folder: Path,
    step: int,
    state: Any,
    *,
    keep: int = 3,
    beside: dict[str, np.ndarray] | None = None,
) -> None:
    """A full state, both parts of its save."""
    info = StateInfo(step, "cd" * 32, 7, "ab" * 32, published=True, fingerprint={"mesh": "fsdp=2"})
    save_state(folder, info, state, keep=keep, beside=beside)()


def load(folder: Path, step: int, target: Any) -> Any:
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


def like(value: dict[str, Any], mesh: Mesh) -> Any:
    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(None, "fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(described, value)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_state_comes_back_bit_for_bit_onto_another_mesh(tmp_path: Path, devices: int) -> None:
    # given a state written by two devices
    written = tree(mesh_of(2))
    save(tmp_path, 10, written, keep=3)
    # when a mesh of another size restores it
    target = like(written, mesh_of(devices))
    read = load(tmp_path, 10, target)
    # then every bit is there, and lies where the target says
    for a, b, t in zip(*map(jax.tree.leaves, (read, written, target)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(t.sharding, a.ndim)


def test_parameters_keep_their_type_and_lie_beside_their_probe(tmp_path: Path) -> None:
    written = tree(mesh_of(2), jnp.bfloat16)
    save_params(tmp_path, 4, written, {"sequences": [[1]], "logprobs": [[]]})()
    read = load_params(tmp_path, 4, like(written, mesh_of(1)))
    assert read["layers"]["q"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(read["layers"]["q"]), np.asarray(written["layers"]["q"])
    )
    assert json.loads((tmp_path / "v4" / "probe.json").read_bytes())["sequences"] == [[1]]
    assert versions_in(tmp_path) == [4]


def test_one_layer_of_a_stacked_leaf_can_be_read_alone(tmp_path: Path) -> None:
    # given a version of two devices
    written = tree(mesh_of(2))
    save_params(tmp_path, 4, written, {})()
    # then each stored chunk of a stacked leaf is of one layer, of one device
    stores = open_leaves(tmp_path / "v4" / "params", {("layers", "q"): (3, 8)}, among_others=True)
    assert stores["layers", "q"].chunk_layout.read_chunk.shape == (1, 4)
    # and a layer read alone has the numbers of that layer
    for layer, values in enumerate(np.asarray(written["layers"]["q"])):
        np.testing.assert_array_equal(stores["layers", "q"][layer].read().result(), values)


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    for step in (1, 9, 10, 11):
        save(tmp_path, step, tree(mesh_of(1)), keep=2)
    assert state_steps(tmp_path) == [10, 11]


def test_training_goes_on_while_a_state_is_written(tmp_path: Path) -> None:
    # given states of a few megabytes, and a step that reuses their memory
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


def test_unfinished_checkpoints_are_not_seen_and_are_cleared(tmp_path: Path) -> None:
    # given what a killed learner leaves: a directory under a temporary name
    save(tmp_path, 2, tree(mesh_of(1)), keep=2)
    (tmp_path / ".tmp-0123-step_4" / "state").mkdir(parents=True)
    assert state_steps(tmp_path) == [2]
    # when the learner starts again, then it is gone
    clear_unfinished(tmp_path, logging.getLogger("test"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_2"]


def damage_every_file(state: Path) -> list[Path]:
    return sorted(path for path in state.rglob("*") if path.is_file() and path.stat().st_size)


def test_a_flipped_bit_anywhere_in_a_state_is_found_and_named(tmp_path: Path) -> None:
    written = tree(mesh_of(2))
    save(tmp_path, 10, written, keep=3)
    target = like(written, mesh_of(2))
    for path in damage_every_file(tmp_path / "step_10"):
        # given one bit of one file flipped
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        # when the state is read, then the error names the checkpoint and what to do
        with pytest.raises(UserError, match="unreadable checkpoint") as caught:
            load(tmp_path, 10, target)
        assert "step_10" in caught.value.place and "put" in caught.value.remedy
        path.write_bytes(whole)
    load(tmp_path, 10, target)


# Orbax closes its event loop once one write has failed, whatever others still report to it.
@pytest.mark.filterwarnings(
    r"ignore:(?s)Exception ignored in. None.*Event loop is closed"
    ":pytest.PytestUnraisableExceptionWarning"
)
def test_a_full_disk_is_an_error_by_name_and_leaves_no_state(tmp_path: Path) -> None:
    # given a disk that takes no file of more than a few bytes
    state = tree(mesh_of(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        # when a state is saved, then the error says what to do
        with pytest.raises(UserError, match="cannot write a checkpoint") as caught:
            save(tmp_path, 1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "disk" in caught.value.remedy
    # and nothing looks like one
    assert state_steps(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_may_take_as_long_as_its_saver_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given no time at all
    monkeypatch.setattr(checkpoint, "DEADLINE_S", 0.0)
    # when a state is saved, then Orbax gives up by that deadline, not by one of its own
    with pytest.raises(UserError, match=r"cannot write a checkpoint: .*timeout"):
        save(tmp_path, 1, tree(mesh_of(2)))
    assert state_steps(tmp_path) == []
    # Orbax writes on, into a folder that is gone: its errors must not be the next test's
    writing = [t for t in threading.enumerate() if type(t).__name__ == "_SignalingThread"]
    eventually(lambda: not any(thread.is_alive() for thread in writing), "Orbax's end")
    gc.collect()


def test_a_missing_file_is_an_error_not_zeros(tmp_path: Path) -> None:
    written = tree(mesh_of(1))
    save(tmp_path, 1, written, keep=3)
    damage_every_file(tmp_path / "step_1" / "state")[-1].unlink()
    with pytest.raises(UserError, match="unreadable checkpoint"):
        load(tmp_path, 1, like(written, mesh_of(1)))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":1,"step":1}', b"[]"])
def test_a_torn_or_foreign_state_file_is_named(tmp_path: Path, damage: bytes) -> None:
    save(tmp_path, 1, tree(mesh_of(1)))
    (tmp_path / "step_1" / "state.json").write_bytes(damage)
    with pytest.raises(UserError, match="unreadable checkpoint") as caught:
        check_state(tmp_path, 1)
    assert caught.value.place.endswith("step_1/state.json")


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    written = tree(mesh_of(1))
    save(tmp_path, 1, written, keep=3)
    larger = {"layers": {"q": jnp.zeros((3, 16))}, "updates": jnp.zeros((), jnp.int32)}
    with pytest.raises(UserError, match="unreadable checkpoint"):
        load(tmp_path, 1, like(larger, mesh_of(1)))


def outer_state() -> dict[str, np.ndarray]:
    """Arrays of an island; the first is cut into three chunks in an object store."""
    theta = np.random.default_rng(1).normal(size=5_000_001).astype(np.float32)
    return {"theta": theta, "pending": np.arange(3)}


def test_arrays_beside_a_state_come_back_and_a_flipped_bit_is_named(tmp_path: Path) -> None:
    # given a state with arrays beside it
    beside = outer_state()
    save(tmp_path, 2, tree(mesh_of(1)), beside=beside)
    info = check_state(tmp_path, 2)
    # then they come back bit for bit
    read = load_beside(tmp_path, info)
    for name, array in beside.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    # and one that is not there, or is of another kind, is an error by name
    for name, shape, said in (("momentum", (3,), "momentum"), ("pending", (4,), r"int64\(3,\)")):
        with pytest.raises(UserError, match=f"unreadable checkpoint: .*{said}") as caught:
            load_beside(tmp_path, replace(info, beside={name: ["int64", list(shape)]}))
        assert "step_2/beside" in caught.value.place
    # and a flipped bit is found before anything is read, as in the state itself
    path = tmp_path / "step_2" / "beside" / "theta.npy"
    flip = bytearray(path.read_bytes())
    flip[-1] ^= 1
    path.write_bytes(flip)
    with pytest.raises(UserError, match=r"beside/theta.npy is missing or not what was written"):
        check_state(tmp_path, 2)
    path.unlink()
    with pytest.raises(UserError, match=r"beside/theta.npy is missing or not what was written"):
        check_state(tmp_path, 2)


def test_a_state_without_arrays_beside_it_is_as_before(tmp_path: Path) -> None:
    save(tmp_path, 2, tree(mesh_of(1)))
    assert sorted(p.name for p in (tmp_path / "step_2").iterdir()) == ["state", "state.json"]
    record = json.loads((tmp_path / "step_2" / "state.json").read_bytes())
    assert not any(name.startswith("beside") for name in record["files"])
