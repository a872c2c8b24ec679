"""Whatever a delta's bytes are: a UserError that names file and tensor, a bounded allocation, and
nothing written outside the tensor."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bridge.delta import apply_deltas, write_delta
from bridge.delta.container import MAGIC, SUFFIX
from bridge.delta.segments import (
    SEGMENT_ELEMENTS,
    UNCHANGED,
    MalformedSegment,
    encode,
    overwrite,
)
from bridge.safetensors_io import SINGLE_NAME, read_header
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from tests.bridge.delta.conftest import Copy
from tests.bridge.delta.hostile import full, packed, raw, sparse, u32, write_blocks
from tests.bridge.delta.weights import BF16, F32, normal, nudged, records, write_weights

N = 600
"""Elements of the tensor that the hostile blocks are for, of two bytes."""
SAME = bytes([UNCHANGED])
ZEROS = raw(bytes(N))


@pytest.fixture
def pair(tmp_path: Path, rng: np.random.Generator) -> tuple[Path, Path]:
    """Base and target of three tensors, the middle one of N elements."""
    old = {"a": normal(rng, (5,), BF16), "b": normal(rng, (N,), BF16), "c": normal(rng, (5,), F32)}
    base = write_weights(tmp_path / "old", old)
    return base, write_weights(tmp_path / "new", nudged(rng, old, 0.05))


BLOCKS = {
    "nothing": b"",
    "unknown kind": b"\x03",
    "bytes after it": SAME + SAME,
    "no counts": b"\x01",
    "cut off in the counts": sparse(1, 1, 0)[:-1],
    "no changes": sparse(0, 0, 0, raw(b""), raw(b""), raw(b"")),
    "more changes than elements": sparse(N + 1, N + 1, 0, *[raw(bytes(N + 1))] * 3),
    "a billion changes": sparse(2**32 - 1, 2**32 - 1, 0, *[raw(b"x")] * 3),
    "fewer gaps than changes": sparse(2, 1, 0, raw(b"\0"), raw(b"xx"), raw(b"xx")),
    "more gaps than could be": sparse(1, 4, 0, raw(b"\xff\xff\xff\0"), raw(b"x"), raw(b"x")),
    "a gap that ends nowhere": sparse(1, 2, 0, raw(b"\0\xff"), raw(b"x"), raw(b"x")),
    "gaps of more changes": sparse(1, 2, 0, raw(b"\0\0"), raw(b"x"), raw(b"x")),
    "gaps of fewer changes": sparse(2, 2, 0, raw(b"\xff\0"), raw(b"xx"), raw(b"xx")),
    "the element after the last": sparse(
        1, 3, 0, raw(bytes([255, 255, N - 510])), raw(b"x"), raw(b"x")
    ),
    "elements beyond by a sum": sparse(3, 3, 0, raw(b"\xfe" * 3), raw(b"xxx"), raw(b"xxx")),
    "a shift that is none": sparse(1, 1, 9, raw(b"\0"), raw(b"\0"), raw(b"x"), raw(b"x")),
    "an element beyond by the shift": sparse(
        1, 1, 8, raw(b"\x03"), raw(b"\0"), raw(b"x"), raw(b"x")
    ),
    "low bits that are high": sparse(1, 1, 1, raw(b"\0"), raw(b"\x02"), raw(b"x"), raw(b"x")),
    "no values": sparse(1, 1, 0, raw(b"\0"), raw(b"x")),
    "a stream that is cut off": sparse(1, 1, 0, raw(b"\0"), raw(b"x"), u32(1)),
    "a stream that is too long": sparse(1, 1, 0, raw(b"\0"), raw(b"xx"), raw(b"x")),
    "a stream longer than the file": sparse(1, 1, 0, u32(2**32 - 1)),
    "no stream": sparse(2, 2, 0, raw(b""), raw(b"xx"), raw(b"xx")),
    "no frame": full(raw(b"x" * 20), ZEROS),
    "a frame of fewer bytes": full(packed(bytes(N - 1)), ZEROS),
    "a frame of more bytes": full(packed(bytes(N + 1)), ZEROS),
    "a frame that fills the memory": full(packed(bytes(2**26)), ZEROS),
    "a frame without its size": full(packed(bytes(N), write_content_size=False), ZEROS),
    "a frame that is cut off": full(raw(packed(bytes(N))[4:-1]), ZEROS),
    "a frame and a byte": full(raw(packed(bytes(N))[4:] + b"x"), ZEROS),
    "two frames": full(raw(packed(bytes(N))[4:] * 2), ZEROS),
    "a damaged frame": full(raw(packed(bytes(N), write_checksum=True)[4:-1] + b"\xff"), ZEROS),
    "a frame to be skipped": full(raw(b"\x50\x2a\x4d\x18" + u32(N - 100) + bytes(N - 100)), ZEROS),
    "one plane": full(ZEROS),
    "a plane too many": full(ZEROS, ZEROS, ZEROS),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_malformed_block(
    tmp_path: Path, pair: tuple[Path, Path], copy: Copy, block: bytes
) -> None:
    # Given a delta whose second tensor's block is malformed
    base, after = pair
    target = copy(base)
    blocks = {"a": SAME, "b": block, "c": SAME}
    delta = write_blocks(tmp_path / "delta", base, after, blocks)
    # When it is applied, then it is refused by name
    tracemalloc.start()
    try:
        with pytest.raises(
            UserError, match=rf"delta/{SINGLE_NAME}{SUFFIX}: tensor b: malformed delta: .+"
        ):
            apply_deltas(target, [delta], records(after))
        # And has taken no memory for what it says of itself
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    # And nothing outside the tensor has been written
    info = read_header(base / SINGLE_NAME)["b"]
    before, now = ((folder / SINGLE_NAME).read_bytes() for folder in (base, target))
    assert now[: info.offset] == before[: info.offset]
    assert now[info.offset + info.nbytes :] == before[info.offset + info.nbytes :]


def test_a_full_segment_may_lie_anyhow(tmp_path: Path, pair: tuple[Path, Path], copy: Copy) -> None:
    """The cases above fail for what is wrong with them: the same made well is right."""
    base, _ = pair
    data = np.arange(N, dtype=np.uint16)
    after = copy(base)
    info = read_header(after / SINGLE_NAME)["b"]
    whole = bytearray((after / SINGLE_NAME).read_bytes())
    whole[info.offset : info.offset + info.nbytes] = data.tobytes()
    (after / SINGLE_NAME).write_bytes(whole)
    planes = [(data >> 8).astype(np.uint8).tobytes(), data.astype(np.uint8).tobytes()]
    for number, form in enumerate([(raw, raw), (packed, raw), (packed, packed)]):
        block = full(*(make(plane) for make, plane in zip(form, planes, strict=True)))
        delta = write_blocks(
            tmp_path / f"delta-{number}", base, after, {"a": SAME, "b": block, "c": SAME}
        )
        target = tmp_path / f"target-{number}"
        write_weights(target, {"a": np.zeros(0, BF16)})
        (target / SINGLE_NAME).write_bytes((base / SINGLE_NAME).read_bytes())
        apply_deltas(target, [delta], records(after))
        assert (target / SINGLE_NAME).read_bytes() == whole


HEADERS = {
    "no object": b"[]",
    "no fields": b"{}",
    "a field too many": lambda fields: {**fields, "more": 1},
    "no digest": lambda fields: {**fields, "base": "0"},
    "no tensors": lambda fields: {**fields, "tensors": None},
    "no record": lambda fields: {**fields, "tensors": {**fields["tensors"], "a": 1}},
    "a record of less": lambda fields: {**fields, "tensors": {**fields["tensors"], "a": {}}},
    "less than nothing": lambda fields: sized(fields, -1),
    "a huge size": lambda fields: sized(fields, 2**48),
    "a size that is no number": lambda fields: sized(fields, True),
    "a size beyond the file": lambda fields: sized(fields, 10**6),
    "a size within the file": lambda fields: sized(fields, 0),
    "another tensor": lambda fields: {
        **fields,
        "tensors": {name.replace("a", "d"): record for name, record in fields["tensors"].items()},
    },
    "a very long name": lambda fields: {
        **fields,
        "tensors": {**fields["tensors"], "n" * 10**6: fields["tensors"]["a"]},
    },
}


def sized(fields: dict, size: object) -> dict:
    record = {**fields["tensors"]["b"], "bytes": size}
    return {**fields, "tensors": {**fields["tensors"], "b": record}}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_malformed_header(tmp_path: Path, pair: tuple[Path, Path], copy: Copy, header) -> None:
    # Given a delta with another header
    base, after = pair
    write_delta(base, after, tmp_path / "delta")
    file = tmp_path / "delta" / (SINGLE_NAME + SUFFIX)
    fields, blocks = split(file.read_bytes())
    text = header if isinstance(header, bytes) else canonical_json(header(fields))
    file.write_bytes(MAGIC + u32(len(text)) + text + blocks)
    # When, then
    target = copy(base)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"{SINGLE_NAME}{SUFFIX}: .*delta") as caught:
            apply_deltas(target, [tmp_path / "delta"], records(after))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
    assert (target / SINGLE_NAME).read_bytes() == (base / SINGLE_NAME).read_bytes()


def split(data: bytes) -> tuple[dict, bytes]:
    start = len(MAGIC) + 4
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    return json.loads(data[start : start + length]), data[start + length :]


def test_a_header_that_is_spelt_otherwise(
    tmp_path: Path, pair: tuple[Path, Path], copy: Copy
) -> None:
    base, after = pair
    write_delta(base, after, tmp_path / "delta")
    file = tmp_path / "delta" / (SINGLE_NAME + SUFFIX)
    data = file.read_bytes()
    text = data[len(MAGIC) + 4 :].replace(b'"base":', b'"base": ', 1)
    length = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little") + 1
    file.write_bytes(MAGIC + u32(length) + text)
    with pytest.raises(UserError, match="not in canonical form"):
        apply_deltas(copy(base), [tmp_path / "delta"], records(after))


def test_a_file_cut_off_anywhere(tmp_path: Path, pair: tuple[Path, Path], copy: Copy) -> None:
    base, after = pair
    write_delta(base, after, tmp_path / "delta")
    file = tmp_path / "delta" / (SINGLE_NAME + SUFFIX)
    data = file.read_bytes()
    target, wanted = copy(base), records(after)
    for end in range(len(data)):
        file.write_bytes(data[:end])
        with pytest.raises(UserError, match=SUFFIX):
            apply_deltas(target, [tmp_path / "delta"], wanted)
    assert (target / SINGLE_NAME).read_bytes() == (base / SINGLE_NAME).read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("form", ["all changed", "all skipped", "full"])
def test_memory_is_bounded_by_the_segment(rng: np.random.Generator, dtype: type, form: str) -> None:
    """At the largest segment and the forms that take most of it, for coding and decoding."""
    # Given
    new = rng.integers(0, 2**16, SEGMENT_ELEMENTS).astype(dtype)
    limit = 32 * SEGMENT_ELEMENTS
    where = np.arange(SEGMENT_ELEMENTS)
    planes = [packed(bytes(SEGMENT_ELEMENTS))] * new.itemsize
    gaps = packed(bytes(SEGMENT_ELEMENTS))
    coded = {
        "all changed": sparse(SEGMENT_ELEMENTS, SEGMENT_ELEMENTS, 8, gaps, gaps, *planes),
        "all skipped": sparse(
            SEGMENT_ELEMENTS,
            SEGMENT_ELEMENTS + SEGMENT_ELEMENTS // 255,
            0,
            packed(b"\xff" * (SEGMENT_ELEMENTS + SEGMENT_ELEMENTS // 255)),
            *planes,
        ),
        "full": full(*planes),
    }[form]
    # When it is decoded and coded, then
    tracemalloc.start()
    try:
        if form == "all skipped":
            with pytest.raises(MalformedSegment):
                overwrite(new, memoryview(coded))
        else:
            assert overwrite(new, memoryview(coded)) == len(coded)
        assert tracemalloc.get_traced_memory()[1] < limit
        tracemalloc.reset_peak()
        encode(new, where)
        assert tracemalloc.get_traced_memory()[1] < 2 * limit
    finally:
        tracemalloc.stop()
