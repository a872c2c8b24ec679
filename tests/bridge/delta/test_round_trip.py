"""What a delta makes of its base is the new version, bit by bit."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bridge.delta import apply_deltas, write_delta
from bridge.delta.segments import SEGMENT_ELEMENTS
from bridge.safetensors_io import TENSORS_NAME
from bridge.versions import differences
from runspec.core.canonical import canonical_json
from tests.bridge.delta.conftest import Copy
from tests.bridge.delta.weights import (
    BF16,
    F32,
    bits,
    normal,
    nudged,
    records,
    weights_of,
    write_weights,
)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bfloat16", "float32"])
def test_any_share_of_changes(
    tmp_path: Path, rng: np.random.Generator, copy: Copy, dtype: np.dtype, share: float
) -> None:
    # Given two versions, one tensor longer than a segment
    old = {
        "a": normal(rng, (SEGMENT_ELEMENTS // 1000 + 1, 1003), dtype),
        "b": normal(rng, (5,), dtype),
    }
    new = nudged(rng, old, share)
    before = write_weights(tmp_path / "old", old)
    after = write_weights(tmp_path / "new", new)
    # When the delta between them is written and applied to a copy of the older
    summary = write_delta(before, after, tmp_path / "delta")
    target = copy(before)
    apply_deltas(target, [tmp_path / "delta"], records(after))
    # Then the copy is the newer, and the summary counted what changed
    assert weights_of(target) == weights_of(after)
    counts = {name: int((bits(old[name]) != bits(new[name])).sum()) for name in old}
    assert {tensor.name: tensor.changed for tensor in summary.tensors} == counts
    assert summary.elements == sum(tensor.size for tensor in old.values())
    assert summary.changed == sum(counts.values())
    files = list((tmp_path / "delta").iterdir())
    assert [file.name for file in files] == ["model.safetensors.delta"]
    assert summary.delta_bytes == files[0].stat().st_size
    assert sum(tensor.nbytes for tensor in summary.tensors) < summary.delta_bytes
    assert summary.weights_bytes == sum(tensor.nbytes for tensor in old.values())


def test_bits_count_not_numbers(tmp_path: Path, copy: Copy) -> None:
    # Given numbers that are equal and differ in bits, and NaNs that are unequal and do not
    old = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    new = np.array([-0.0, np.nan, np.nan, 1.0], np.float32)
    new.view(np.uint32)[1] |= 1
    before = write_weights(tmp_path / "old", {"a": old})
    after = write_weights(tmp_path / "new", {"a": new})
    # When
    summary = write_delta(before, after, tmp_path / "delta")
    target = copy(before)
    apply_deltas(target, [tmp_path / "delta"], records(after))
    # Then
    assert summary.changed == 2
    assert weights_of(target) == weights_of(after)


def test_one_after_the_other_is_the_direct_one(
    tmp_path: Path, versions: list[Path], copy: Copy
) -> None:
    # Given the deltas of three steps, and one of all three
    steps = [tmp_path / f"delta-{number}" for number in range(3)]
    for number, delta in enumerate(steps):
        write_delta(versions[number], versions[number + 1], delta)
    write_delta(versions[0], versions[3], tmp_path / "direct")
    # When both ways are gone
    for deltas in (steps, [tmp_path / "direct"]):
        target = copy(versions[0])
        apply_deltas(target, deltas, records(versions[3]))
        # Then both arrive
        assert weights_of(target) == weights_of(versions[3])


def test_applying_again_does_no_harm(tmp_path: Path, versions: list[Path], copy: Copy) -> None:
    """Whatever part of the files a crash left as they were: base, target, or something between."""
    deltas = [tmp_path / "delta-0", tmp_path / "delta-1"]
    write_delta(versions[0], versions[1], deltas[0])
    write_delta(versions[1], versions[2], deltas[1])
    for halves in [(0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]:
        # Given files of which one half is of one version and the other of another
        target = copy(versions[0])
        for name in weights_of(target):
            first, second = (weights_of(versions[v])[name] for v in halves)
            (target / name).write_bytes(first[: len(first) // 2] + second[len(first) // 2 :])
        # When
        apply_deltas(target, deltas, records(versions[2]))
        # Then
        assert weights_of(target) == weights_of(versions[2])


def test_the_bytes_follow_from_the_weights_alone(
    tmp_path: Path, rng: np.random.Generator, versions: list[Path]
) -> None:
    # Given versions with and without a list of digests, and several segments
    old = {"a": normal(rng, (3, SEGMENT_ELEMENTS), BF16)}
    write_weights(tmp_path / "old", old)
    after = write_weights(tmp_path / "new", nudged(rng, old, 0.01))
    # When the delta is written by one thread, by four, and with the digests given
    write_delta(tmp_path / "old", after, tmp_path / "one")
    write_delta(tmp_path / "old", after, tmp_path / "four", threads=4)
    for directory in (tmp_path / "old", after):
        listing = {"tensors": records(directory), "model_digest": "not read", "files": []}
        (directory / TENSORS_NAME).write_bytes(canonical_json(listing))
    write_delta(tmp_path / "old", after, tmp_path / "given")
    # Then
    one, four, given = (
        (tmp_path / name / "model.safetensors.delta").read_bytes()
        for name in ("one", "four", "given")
    )
    assert one == four == given


def test_no_tensor_is_read_whole(tmp_path: Path, rng: np.random.Generator) -> None:
    # Given a tensor of 32 MB, a bit of it changed, and no list of digests
    old = {"a": normal(rng, (8192, 1024), F32)}
    before = write_weights(tmp_path / "old", old)
    bits(old["a"])[-1] ^= 1
    after = write_weights(tmp_path / "new", old)
    # When the versions are compared, both ways
    tracemalloc.start()
    try:
        write_delta(before, after, tmp_path / "delta")
        (line,) = differences(before, after)
        # Then
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert line.startswith("a: blake3 ")


@pytest.mark.parametrize(
    ("new", "bytes_at_most"),
    [
        pytest.param(lambda rng, n: np.zeros(n, np.uint16), 200, id="constant"),
        pytest.param(
            lambda rng, n: rng.integers(0, 2**16, n, dtype=np.uint16), 2 * 2**18 + 64, id="noise"
        ),
        pytest.param(lambda rng, n: bits(normal(rng, (n,), BF16)), 1.4 * 2**18, id="weights"),
    ],
)
def test_a_tensor_that_changed_everywhere_is_written_whole(
    tmp_path: Path, rng: np.random.Generator, copy: Copy, new, bytes_at_most: float
) -> None:
    # Given
    old = {"a": normal(rng, (2**18,), BF16)}
    before = write_weights(tmp_path / "old", old)
    after = write_weights(tmp_path / "new", {"a": new(rng, 2**18).view(BF16)})
    # When
    summary = write_delta(before, after, tmp_path / "delta")
    target = copy(before)
    apply_deltas(target, [tmp_path / "delta"], records(after))
    # Then it costs no more than its bytes, compressed where they can be
    assert summary.tensors[0].nbytes <= bytes_at_most
    assert weights_of(target) == weights_of(after)
