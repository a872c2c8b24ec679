"""What a delta makes of its base is the new version, bit by bit; a wrong choice of weights or of
deltas is refused before a byte is written; and whatever its bytes are: a UserError that names file
and tensor, a bounded allocation, and nothing written outside the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.conversion import differences
from bridge.delta import DamagedWeights, Records, apply_deltas, delta_tensors, write_delta
from bridge.delta_file import (
    MAGIC,
    SEGMENT_ELEMENTS,
    SUFFIX,
    UNCHANGED,
    MalformedSegment,
    encode,
    overwrite,
)
from bridge.safetensors_io import INDEX_NAME, SINGLE_NAME, read_header
from broadcast.layout import TENSORS_NAME
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from tests.bridge.delta.weights import (
    BF16,
    F32,
    bits,
    full,
    normal,
    nudged,
    packed,
    raw,
    records,
    sparse,
    u32,
    weights_of,
    write_blocks,
    write_weights,
)
from tests.fuzz.bounds import bounded

TYPES = st.sampled_from([np.uint16, np.uint32])
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def versions(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    """Four versions of a model of odd shapes and both types, in two files."""
    tensors = {
        "embed": normal(rng, (31, 17), BF16),
        "norm": normal(rng, (7,), BF16),
        "scale": normal(rng, (13, 3), F32),  # at an offset that is no multiple of four
        "empty": normal(rng, (0, 4), BF16),
        "head": normal(rng, (17, 31), F32),
    }
    made = []
    for number in range(4):
        made.append(write_weights(tmp_path / f"v{number}", tensors, files=2))
        tensors = nudged(rng, tensors, 0.05)
    return made


@pytest.fixture
def deltas(tmp_path: Path, versions: list[Path]) -> list[Path]:
    """From each version to the next."""
    made = [tmp_path / f"delta-{number}" for number in range(3)]
    for number, delta in enumerate(made):
        write_delta(versions[number], versions[number + 1], delta)
    return made


def copy(directory: Path) -> Path:
    """A copy beside a directory of weights, for a delta to be applied to."""
    target = directory.with_name(f"copy-of-{directory.name}")
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(directory, target))


def list_tensors(directory: Path) -> None:
    (directory / TENSORS_NAME).write_bytes(canonical_json({"tensors": records(directory)}))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


WIDE, LONG = 2**18, (SEGMENT_ELEMENTS // 1000 + 1, 1003)


def same(rng: np.random.Generator) -> np.ndarray:
    return np.zeros(WIDE, np.uint16)


def random(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2**16, WIDE, np.uint16)


def weights(rng: np.random.Generator) -> np.ndarray:
    return bits(normal(rng, (WIDE,), BF16))


@pytest.mark.parametrize(
    ("dtype", "shape", "change", "bytes_at_most"),
    [
        # any share of changes, of a tensor longer than a segment
        *((BF16, LONG, share, None) for share in (0.0, 0.001, 0.3)),
        *((F32, LONG, share, None) for share in (0.01, 1.0)),
        # what changed everywhere costs no more than its bytes, compressed where they can be
        *((BF16, (WIDE,), same, 200), (BF16, (WIDE,), random, 2 * WIDE + 64)),
        (BF16, (WIDE,), weights, 1.4 * WIDE),
    ],
)
def test_the_delta_between_two_versions_makes_the_newer_of_the_older(
    tmp_path, rng, dtype, shape, change, bytes_at_most
):
    # given two versions
    old = {"a": normal(rng, shape, dtype), "b": normal(rng, (5,), dtype)}
    new = {**old, "a": change(rng).view(dtype)} if callable(change) else nudged(rng, old, change)
    before, after = write_weights(tmp_path / "old", old), write_weights(tmp_path / "new", new)
    # when the delta between them is written and applied to a copy of the older
    summary = write_delta(before, after, tmp_path / "delta")
    target = copy(before)
    apply_deltas(target, [tmp_path / "delta"], records(after))
    # then the copy is the newer, and the summary counted what changed
    assert weights_of(target) == weights_of(after)
    counts = {name: int((bits(old[name]) != bits(new[name])).sum()) for name in old}
    assert {tensor.name: tensor.changed for tensor in summary.tensors} == counts
    [file] = (tmp_path / "delta").iterdir()
    assert (file.name, file.stat().st_size) == ("model.safetensors.delta", summary.delta_bytes)
    assert summary.weights_bytes == sum(tensor.nbytes for tensor in old.values())
    assert bytes_at_most is None or summary.tensors[0].nbytes <= bytes_at_most


def test_bits_count_not_numbers(tmp_path):
    # given numbers that are equal and differ in bits, and NaNs that are unequal and do not
    old = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    new = np.array([-0.0, np.nan, np.nan, 1.0], np.float32)
    new.view(np.uint32)[1] |= 1
    before = write_weights(tmp_path / "old", {"a": old})
    after = write_weights(tmp_path / "new", {"a": new})
    assert write_delta(before, after, tmp_path / "delta").changed == 2
    apply_deltas(before, [tmp_path / "delta"], records(after))
    assert weights_of(before) == weights_of(after)


def test_applying_again_does_no_harm(versions, deltas):
    """Whatever part of the files a crash left as they were: base, target, or something between."""
    for halves in [(0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]:
        # given files of which one half is of one version and the other of another
        target = copy(versions[0])
        list_tensors(target)
        for name in weights_of(target):
            first, second = (weights_of(versions[v])[name] for v in halves)
            (target / name).write_bytes(first[: len(first) // 2] + second[len(first) // 2 :])
        # when deltas are applied, then they are of the newest
        apply_deltas(target, deltas[:2], records(versions[2]))
        assert weights_of(target) == weights_of(versions[2])


def test_the_bytes_follow_from_the_weights_alone(tmp_path, rng):
    # given versions with and without a list of digests, and several segments
    old = {"a": normal(rng, (3, SEGMENT_ELEMENTS), BF16)}
    before = write_weights(tmp_path / "old", old)
    after = write_weights(tmp_path / "new", nudged(rng, old, 0.01))
    # when the delta is written by one thread, by four, and with the digests given
    write_delta(before, after, tmp_path / "one")
    write_delta(before, after, tmp_path / "four", threads=4)
    for directory in (before, after):
        list_tensors(directory)
    write_delta(before, after, tmp_path / "given")
    # then they are the same
    files = [tmp_path / name / "model.safetensors.delta" for name in ("one", "four", "given")]
    assert len({file.read_bytes() for file in files}) == 1


def test_no_tensor_is_read_whole(tmp_path, rng):
    # given a tensor of 32 MB, a bit of it changed, and no list of digests
    old = {"a": normal(rng, (8192, 1024), F32)}
    before = write_weights(tmp_path / "old", old)
    bits(old["a"])[-1] ^= 1
    after = write_weights(tmp_path / "new", old)
    # when the versions are compared, both ways
    with bounded(8 * 2**20):
        write_delta(before, after, tmp_path / "delta")
        (line,) = differences(before, after)
    assert line.startswith("a: blake3 ")


GAPS = st.integers(0, 5) | st.sampled_from([253, 254, 255, 256, 509, 510, 511, 2000])


@settings(derandomize=True)
@given(
    dtype=TYPES,
    gaps=st.lists(GAPS, max_size=60),
    after=st.integers(0, 600),
    seed=st.integers(0, 2**32),
)
def test_any_gaps(dtype, gaps, after, seed):
    # given changes after gaps around the length that one byte can say
    rng = np.random.default_rng(seed)
    where = np.cumsum([gap + 1 for gap in gaps], dtype=np.intp) - 1
    old = rng.integers(0, 2**16, sum(gaps) + len(gaps) + after).astype(dtype)
    new = old.copy()
    new[where] = ~new[where]
    # when coded and read, then it is the new
    coded = encode(new, where)
    read = overwrite(old, memoryview(coded + b"what follows"))
    assert np.array_equal(old, new)
    assert read == len(coded)


A, B = ((4, 4), BF16), ((3,), BF16)


@pytest.mark.parametrize(
    ("other", "files", "message"),
    [
        *(
            (other, 1, "anchor")
            for other in ({"a": ((4, 4), F32), "b": B}, {"a": ((2, 8), BF16), "b": B})
        ),
        *((other, 1, "anchor") for other in ({"a": A, "c": B}, {"b": B, "a": A}, {"a": A})),
        ({"a": A, "b": B}, 2, "its weights lie in model-00001"),
    ],
    ids=["type", "shape", "name", "order", "missing", "files"],
)
def test_no_delta_between_layouts(tmp_path, rng, other, files, message):
    first, second = (
        {name: normal(rng, shape, dtype) for name, (shape, dtype) in layout.items()}
        for layout in ({"a": A, "b": B}, other)
    )
    before = write_weights(tmp_path / "old", first)
    after = write_weights(tmp_path / "new", second, files)
    with pytest.raises(UserError, match=message) as error:
        write_delta(before, after, tmp_path / "delta")
    assert files == 2 or "no delta from" in str(error.value)
    assert not (tmp_path / "delta").exists()


def test_no_delta_of_damaged_weights(tmp_path, versions):
    # given a newer version with a bit that is not what `tensors.json` was made of
    list_tensors(versions[1])
    flip(versions[1] / SECOND, -1)
    # then nothing is written: nobody could apply that
    said = rf"v1/{SECOND}: tensor head: its bits are not those"
    with pytest.raises(DamagedWeights, match=said):
        write_delta(versions[0], versions[1], tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    # and a byte that belongs to no tensor would be in no digest
    (versions[1] / SECOND).write_bytes((versions[2] / SECOND).read_bytes() + b"\0")
    with pytest.raises(UserError, match=rf"{SECOND}: .*one after the other"):
        write_delta(versions[0], versions[1], tmp_path / "delta")
    # and a list of other tensors is none, and no delta is written over
    (versions[2] / TENSORS_NAME).write_text('{"tensors": {"a": {}}}')
    with pytest.raises(UserError, match=rf"{TENSORS_NAME}: not the tensors' records"):
        write_delta(versions[0], versions[2], tmp_path / "delta")
    (tmp_path / "delta").mkdir()
    with pytest.raises(UserError, match="delta: exists already"):
        write_delta(versions[0], versions[3], tmp_path / "delta")


def refused(base: Path, chosen: list[Path], wanted: Records, message: str) -> None:
    """The deltas are not applied to a copy of the base, of which nothing is written."""
    target = copy(base)
    list_tensors(target)
    with pytest.raises(UserError, match=message):
        apply_deltas(target, chosen, wanted)
    assert weights_of(target) == weights_of(base)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        pytest.param([1], "made against another version than the one in", id="other base"),
        pytest.param([0], "makes another version than the one asked for", id="other target"),
        pytest.param([0, 2], "not made against what .*delta-0", id="one left out"),
        pytest.param([1, 0], "not made against what .*delta-1", id="disorder"),
        pytest.param([9], "No such file", id="absent"),
    ],
)
def test_deltas_that_do_not_lead_there(versions, deltas, chosen, message):
    folders = [versions[0].with_name(f"delta-{number}") for number in chosen]
    refused(versions[0], folders, records(versions[2]), message)


def test_a_delta_of_other_tensors_or_of_several(tmp_path, versions, deltas):
    # given two deltas that make version 2, and a folder with one file of each
    write_delta(versions[0], versions[2], tmp_path / "mixed")
    first, second = sorted(path.name for path in deltas[1].iterdir())
    (tmp_path / "mixed" / second).write_bytes((deltas[1] / second).read_bytes())
    said = "mixed: its files are of different deltas"
    refused(versions[0], [tmp_path / "mixed"], records(versions[2]), said)
    # given a version of other tensors
    wanted = records(versions[1])
    other = {**wanted, "norm": {**wanted["norm"], "shape": [1, 7]}}
    refused(versions[0], deltas[:1], other, "holds other tensors than the version")
    # given records that are not of the delta's target
    file = deltas[2] / first
    digest = records(versions[3])["embed"]["blake3"].encode()
    file.write_bytes(file.read_bytes().replace(digest, b"0" * 64))
    with pytest.raises(UserError, match="makes another version than"):
        delta_tensors(versions[2], deltas[2])
    # given a delta whose file has the name of another one
    (deltas[0] / first).write_bytes((deltas[0] / second).read_bytes())
    said = r"model-00001-of-.*: a delta of other tensors: embed"
    refused(versions[0], deltas[:1], wanted, said)


def test_weights_that_lie_otherwise(tmp_path, rng):
    # given the same tensors with a note in the file's header
    directory = write_weights(tmp_path / "old", {"a": normal(rng, (4,), BF16)})
    write_delta(directory, directory, tmp_path / "delta")
    file = directory / SINGLE_NAME
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = {"__metadata__": {"format": "pt"}, **json.loads(data[8 : 8 + length])}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    # then the delta is not for them
    said = "delta: made for weights that lie otherwise"
    refused(directory, [tmp_path / "delta"], records(directory), said)
    with pytest.raises(UserError, match=said):
        delta_tensors(directory, tmp_path / "delta")


@pytest.mark.parametrize("name", ["embed", "norm", "scale", "head"])
def test_a_damaged_base(versions, deltas, name):
    # given a base in which one bit of one tensor has flipped where the delta does not write
    file = versions[0] / json.loads((versions[0] / INDEX_NAME).read_text())["weight_map"][name]
    info, data = read_header(file)[name], file.read_bytes()
    after = (versions[1] / file.name).read_bytes()
    places = range(info.offset, info.offset + info.nbytes, info.dtype.itemsize)
    flip(file, next(at for at in places if data[at : at + 4] == after[at : at + 4]))
    # then the tensor is named
    with pytest.raises(UserError, match=rf"{file.name}: tensor {name}: its bits are not those"):
        apply_deltas(versions[0], deltas[:1], records(versions[1]))


N = 600
"""Elements of the tensor that the hostile blocks are for, of two bytes."""
SAME = bytes([UNCHANGED])
ZEROS = raw(bytes(N))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Base and target of three tensors, the middle one of N elements; and a copy of the base."""
    rng = np.random.default_rng(0)
    old = {"a": normal(rng, (5,), BF16), "b": normal(rng, (N,), BF16), "c": normal(rng, (5,), F32)}
    base = write_weights(tmp_path / "old", old)
    after = write_weights(tmp_path / "new", nudged(rng, old, 0.05))
    return base, after, Path(shutil.copytree(base, tmp_path / "copy"))


BLOCKS = {
    "nothing": b"",
    "unknown kind": b"\x03",
    "bytes after it": SAME + SAME,
    "no counts": b"\x01",
    "no changes": sparse(0, 0, 0, raw(b""), raw(b""), raw(b"")),
    "more changes than elements": sparse(N + 1, N + 1, 0, *[raw(bytes(N + 1))] * 3),
    "a billion changes": sparse(2**32 - 1, 2**32 - 1, 0, *[raw(b"x")] * 3),
    "fewer gaps than changes": sparse(2, 1, 0, raw(b"\0"), raw(b"xx"), raw(b"xx")),
    "a gap that ends nowhere": sparse(1, 2, 0, raw(b"\0\xff"), raw(b"x"), raw(b"x")),
    "gaps of fewer changes": sparse(2, 2, 0, raw(b"\xff\0"), raw(b"xx"), raw(b"xx")),
    "the element after the last": sparse(
        1, 3, 0, raw(bytes([255, 255, N - 510])), raw(b"x"), raw(b"x")
    ),
    "elements beyond by a sum": sparse(3, 3, 0, raw(b"\xfe" * 3), raw(b"xxx"), raw(b"xxx")),
    "a shift that is none": sparse(1, 1, 9, raw(b"\0"), raw(b"\0"), raw(b"x"), raw(b"x")),
    "beyond by the shift": sparse(1, 1, 8, raw(b"\x03"), raw(b"\0"), raw(b"x"), raw(b"x")),
    "low bits that are high": sparse(1, 1, 1, raw(b"\0"), raw(b"\x02"), raw(b"x"), raw(b"x")),
    "a stream that is cut off": sparse(1, 1, 0, raw(b"\0"), raw(b"x"), u32(1)),
    "a stream that is too long": sparse(1, 1, 0, raw(b"\0"), raw(b"xx"), raw(b"x")),
    "a stream longer than the file": sparse(1, 1, 0, u32(2**32 - 1)),
    "no frame": full(raw(b"x" * 20), ZEROS),
    "a frame of fewer bytes": full(packed(bytes(N - 1)), ZEROS),
    "a frame that fills the memory": full(packed(bytes(2**26)), ZEROS),
    "a frame without its size": full(packed(bytes(N), write_content_size=False), ZEROS),
    "a frame and a byte": full(raw(packed(bytes(N))[4:] + b"x"), ZEROS),
    "a damaged frame": full(raw(packed(bytes(N), write_checksum=True)[4:-1] + b"\xff"), ZEROS),
    "a frame to be skipped": full(raw(b"\x50\x2a\x4d\x18" + u32(N - 100) + bytes(N - 100)), ZEROS),
    "one plane": full(ZEROS),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_malformed_block(tmp_path, pair, block):
    # given a delta whose second tensor's block is malformed
    base, after, target = pair
    delta = write_blocks(tmp_path / "delta", base, after, {"a": SAME, "b": block, "c": SAME})
    # when it is applied, then it is refused by name, and takes no memory for what it says of itself
    said = rf"delta/{SINGLE_NAME}{SUFFIX}: tensor b: malformed delta: .+"
    with bounded(2**20), pytest.raises(UserError, match=said):
        apply_deltas(target, [delta], records(after))
    # and nothing outside the tensor has been written
    info = read_header(base / SINGLE_NAME)["b"]
    before, now = ((folder / SINGLE_NAME).read_bytes() for folder in (base, target))
    end = info.offset + info.nbytes
    assert (now[: info.offset], now[end:]) == (before[: info.offset], before[end:])


Fields = dict[str, Any]


def tensors(**changes: object) -> Callable[[Fields], Fields]:
    return lambda fields: {**fields, "tensors": {**fields["tensors"], **changes}}


def sized(size: object) -> Callable[[Fields], Fields]:
    return lambda fields: tensors(b={**fields["tensors"]["b"], "bytes": size})(fields)


def renamed(fields: Fields) -> Fields:
    first, *others = fields["tensors"].items()
    return {**fields, "tensors": dict([("d", first[1]), *others])}


HEADERS: dict[str, Callable[[Fields], object]] = {
    "no object": lambda fields: [],
    "a field too many": lambda fields: {**fields, "more": 1},
    "no tensors": lambda fields: {**fields, "tensors": None},
    "no record": tensors(a=1),
    "less than nothing": sized(-1),
    "a size beyond the file": sized(10**6),
    "a size within the file": sized(0),
    "another tensor": renamed,
    "a very long name": lambda fields: tensors(**{"n" * 10**6: fields["tensors"]["a"]})(fields),
}
START = len(MAGIC) + 4


@pytest.fixture
def sound(tmp_path: Path, pair: tuple[Path, Path, Path]) -> tuple[Path, bytes, bytes]:
    """The file of a delta, its header and its blocks."""
    write_delta(*pair[:2], tmp_path / "delta")
    file = tmp_path / "delta" / (SINGLE_NAME + SUFFIX)
    data = file.read_bytes()
    end = START + int.from_bytes(data[len(MAGIC) : START], "little")
    return file, data[START:end], data[end:]


@pytest.mark.parametrize("change", [*HEADERS.values(), None], ids=[*HEADERS, "spelt otherwise"])
def test_a_malformed_header(pair, sound, change):
    # given a delta with another header
    (base, after, target), (file, text, blocks) = pair, sound
    if change is None:
        text, said = text.replace(b'"base":', b'"base": ', 1), "not in canonical form"
    else:
        text, said = canonical_json(change(json.loads(text))), f"{SINGLE_NAME}{SUFFIX}: .*delta"
    file.write_bytes(MAGIC + u32(len(text)) + text + blocks)
    # then it is refused, in few words and little memory, and nothing is written
    with bounded(2**20), pytest.raises(UserError, match=said) as caught:
        apply_deltas(target, [file.parent], records(after))
    assert len(str(caught.value)) < 2000
    assert (target / SINGLE_NAME).read_bytes() == (base / SINGLE_NAME).read_bytes()


def test_a_file_cut_off_anywhere(pair, sound):
    (base, after, target), file = pair, sound[0]
    data, wanted = file.read_bytes(), records(after)
    for end in range(len(data)):
        file.write_bytes(data[:end])
        with pytest.raises(UserError, match=SUFFIX):
            apply_deltas(target, [file.parent], wanted)
    assert (target / SINGLE_NAME).read_bytes() == (base / SINGLE_NAME).read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("form", ["all changed", "all skipped", "full"])
def test_memory_is_bounded_by_the_segment(dtype, form):
    """At the largest segment and the forms that take most of it, for coding and decoding."""
    # given
    n, limit = SEGMENT_ELEMENTS, 32 * SEGMENT_ELEMENTS
    new, where = np.random.default_rng(0).integers(0, 2**16, n).astype(dtype), np.arange(n)
    planes, skips = [packed(bytes(n))] * new.itemsize, n + n // 255
    coded = {
        "all changed": sparse(n, n, 8, packed(bytes(n)), packed(bytes(n)), *planes),
        "all skipped": sparse(n, skips, 0, packed(b"\xff" * skips), *planes),
        "full": full(*planes),
    }[form]
    # when it is decoded and coded, then
    with bounded(limit):
        if form == "all skipped":
            with pytest.raises(MalformedSegment):
                overwrite(new, memoryview(coded))
        else:
            assert overwrite(new, memoryview(coded)) == len(coded)
    with bounded(2 * limit):
        encode(new, where)
