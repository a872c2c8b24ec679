"""What is wrong with the weights or the choice of deltas is refused before a byte is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridge.delta import DamagedWeights, apply_deltas, delta_tensors, write_delta
from bridge.safetensors_io import INDEX_NAME, SINGLE_NAME, TENSORS_NAME, read_header
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from tests.bridge.delta.conftest import Copy
from tests.bridge.delta.weights import (
    BF16,
    F32,
    normal,
    records,
    weights_of,
    write_weights,
)


@pytest.fixture
def deltas(tmp_path: Path, versions: list[Path]) -> list[Path]:
    """From each version to the next."""
    made = [tmp_path / f"delta-{number}" for number in range(3)]
    for number, delta in enumerate(made):
        write_delta(versions[number], versions[number + 1], delta)
    return made


def list_tensors(directory: Path) -> None:
    (directory / TENSORS_NAME).write_bytes(canonical_json({"tensors": records(directory)}))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"a": ((4, 4), F32), "b": ((3,), BF16)}, id="type"),
        pytest.param({"a": ((2, 8), BF16), "b": ((3,), BF16)}, id="shape"),
        pytest.param({"a": ((4, 4), BF16), "c": ((3,), BF16)}, id="name"),
        pytest.param({"b": ((3,), BF16), "a": ((4, 4), BF16)}, id="order"),
        pytest.param({"a": ((4, 4), BF16)}, id="missing"),
    ],
)
def test_no_delta_between_layouts(tmp_path: Path, rng: np.random.Generator, other: dict) -> None:
    # Given
    old = {"a": normal(rng, (4, 4), BF16), "b": normal(rng, (3,), BF16)}
    before = write_weights(tmp_path / "old", old)
    new = {name: normal(rng, shape, dtype) for name, (shape, dtype) in other.items()}
    after = write_weights(tmp_path / "new", new)
    # When, then
    with pytest.raises(UserError, match=r"no delta from .*model\.safetensors\n.*anchor"):
        write_delta(before, after, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_no_delta_between_other_files(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {"a": normal(rng, (4, 4), BF16), "b": normal(rng, (3,), BF16)}
    before = write_weights(tmp_path / "old", tensors)
    after = write_weights(tmp_path / "new", tensors, files=2)
    with pytest.raises(UserError, match=r"its weights lie in model-00001"):
        write_delta(before, after, tmp_path / "delta")


def test_a_delta_is_never_written_over(tmp_path: Path, versions: list[Path]) -> None:
    write_delta(versions[0], versions[1], tmp_path / "delta")
    with pytest.raises(UserError, match="delta: exists already"):
        write_delta(versions[1], versions[2], tmp_path / "delta")


def test_no_delta_of_damaged_weights(tmp_path: Path, versions: list[Path]) -> None:
    # Given a newer version with a bit that is not what `tensors.json` was made of
    list_tensors(versions[1])
    file = versions[1] / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    # When, then: nobody could apply that
    said = r"v1/model-00002-of-00002\.safetensors: tensor head: its bits are not those"
    with pytest.raises(DamagedWeights, match=said):
        write_delta(versions[0], versions[1], tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_tensors_with_a_gap_between_them(tmp_path: Path, rng: np.random.Generator) -> None:
    """A byte that belongs to no tensor would be in no digest."""
    # Given
    directory = write_weights(tmp_path / "old", {"a": normal(rng, (4,), BF16)})
    file = directory / SINGLE_NAME
    file.write_bytes(file.read_bytes() + b"\0")
    # When, then
    with pytest.raises(UserError, match=r"model\.safetensors: .*one after the other"):
        write_delta(directory, directory, tmp_path / "delta")


@pytest.mark.parametrize("text", ["[]", "{}", '{"tensors": 1}', '{"tensors": {"a": {}}}', "\xff"])
def test_a_list_of_other_tensors(tmp_path: Path, versions: list[Path], text: str) -> None:
    (versions[1] / TENSORS_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=rf"{TENSORS_NAME}: not the tensors' records"):
        write_delta(versions[0], versions[1], tmp_path / "delta")


def sole(number: int) -> Callable[[list[Path]], list[Path]]:
    return lambda deltas: [deltas[number]]


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        pytest.param(sole(1), "made against another version than the one in", id="other base"),
        pytest.param(sole(0), "makes another version than the one asked for", id="other target"),
        pytest.param(lambda d: [d[0], d[2]], "not made against what .*delta-0", id="one left out"),
        pytest.param(lambda d: [d[1], d[0]], "not made against what .*delta-1", id="disorder"),
        pytest.param(lambda d: [d[0].parent / "not-there"], "No such file", id="absent"),
    ],
)
def test_the_wrong_deltas(
    versions: list[Path],
    deltas: list[Path],
    copy: Copy,
    choose: Callable[[list[Path]], list[Path]],
    reason: str,
) -> None:
    # Given a directory that says that it holds version 0
    target = copy(versions[0])
    list_tensors(target)
    # When version 2 is to be made of it by deltas that do not lead there
    with pytest.raises(UserError, match=reason):
        apply_deltas(target, choose(deltas), records(versions[2]))
    # Then nothing has been written
    assert weights_of(target) == weights_of(versions[0])


def test_a_delta_whose_records_are_not_of_its_target(
    versions: list[Path], deltas: list[Path]
) -> None:
    file = sorted(deltas[0].iterdir())[0]
    digest = records(versions[1])["embed"]["blake3"].encode()
    file.write_bytes(file.read_bytes().replace(digest, b"0" * 64))
    with pytest.raises(UserError, match="makes another version than"):
        delta_tensors(versions[0], deltas[0])


def test_weights_that_lie_otherwise(
    tmp_path: Path, versions: list[Path], deltas: list[Path], rng: np.random.Generator
) -> None:
    # Given the same tensors with a note in the files' headers
    directory = write_weights(tmp_path / "old", {"a": normal(rng, (4,), BF16)})
    write_delta(directory, directory, tmp_path / "delta")
    file = directory / SINGLE_NAME
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = file.read_bytes()[8 + length :]
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    before = weights_of(directory)
    # When, then
    for use in (
        lambda: apply_deltas(directory, [tmp_path / "delta"], records(directory)),
        lambda: delta_tensors(directory, tmp_path / "delta"),
    ):
        with pytest.raises(UserError, match=r"delta: made for weights that lie otherwise"):
            use()
    assert weights_of(directory) == before


def test_a_delta_of_other_tensors(
    tmp_path: Path, versions: list[Path], deltas: list[Path], copy: Copy
) -> None:
    # Given a delta whose file has the name of another one
    first, second = sorted(deltas[0].iterdir())
    first.write_bytes(second.read_bytes())
    # When, then
    target = copy(versions[0])
    with pytest.raises(UserError, match=r"model-00001-of-.*: a delta of other tensors: embed"):
        apply_deltas(target, deltas[:1], records(versions[1]))
    assert weights_of(target) == weights_of(versions[0])


def test_files_of_different_deltas(
    tmp_path: Path, versions: list[Path], deltas: list[Path], copy: Copy
) -> None:
    # Given two deltas that make version 2, and a folder with one file of each
    write_delta(versions[0], versions[2], tmp_path / "mixed")
    name = sorted(deltas[1].iterdir())[1].name
    (tmp_path / "mixed" / name).write_bytes((deltas[1] / name).read_bytes())
    # When, then
    target = copy(versions[0])
    with pytest.raises(UserError, match="mixed: its files are of different deltas"):
        apply_deltas(target, [tmp_path / "mixed"], records(versions[2]))
    assert weights_of(target) == weights_of(versions[0])


def test_a_version_of_other_tensors(versions: list[Path], deltas: list[Path], copy: Copy) -> None:
    target = copy(versions[0])
    wanted = records(versions[1])
    wanted["norm"] = {**wanted["norm"], "shape": [1, 7]}
    with pytest.raises(UserError, match=r"holds other tensors than the version"):
        apply_deltas(target, deltas[:1], wanted)


@pytest.mark.parametrize("name", ["embed", "norm", "scale", "head"])
def test_a_damaged_base(
    tmp_path: Path, versions: list[Path], deltas: list[Path], copy: Copy, name: str
) -> None:
    # Given a base in which one bit of one tensor has flipped where the delta does not write
    target = copy(versions[0])
    file = target / json.loads((target / INDEX_NAME).read_text())["weight_map"][name]
    (info,) = [info for info in read_header(file).values() if info.name == name]
    data = bytearray(file.read_bytes())
    after = (versions[1] / file.name).read_bytes()
    places = range(info.offset, info.offset + info.nbytes, info.dtype.itemsize)
    same = next(at for at in places if data[at : at + 4] == after[at : at + 4])
    data[same] ^= 4
    file.write_bytes(data)
    # When, then
    with pytest.raises(UserError, match=rf"{file.name}: tensor {name}: its bits are not those"):
        apply_deltas(target, deltas[:1], records(versions[1]))


def test_a_file_that_cannot_be_written(
    versions: list[Path], deltas: list[Path], copy: Copy
) -> None:
    target = copy(versions[0])
    file = sorted(target.glob("*.safetensors"))[0]
    file.unlink()
    file.symlink_to("/proc/version")
    with pytest.raises(UserError, match=file.name):
        apply_deltas(target, deltas[:1], records(versions[1]))
