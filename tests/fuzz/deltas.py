"""Lane: deltas. The version that was asked for or a UserError, bounded memory, and no byte written
outside the tensors."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from bridge.delta import apply_deltas, write_delta
from bridge.delta.container import SUFFIX
from bridge.delta.layout import Records
from bridge.safetensors_io import SINGLE_NAME, read_header
from runspec.core.errors import UserError
from tests.bridge.delta.hostile import full, packed, raw, sparse, u32, write_blocks
from tests.bridge.delta.weights import BF16, F32, normal, nudged, records, write_weights
from tests.fuzz.bounds import OPEN, bounded

SHAPES = {"a": ((3,), F32), "b": ((700,), BF16), "c": ((2, 150), F32), "d": ((5,), BF16)}
PIECES = [
    *(b"", b"\0", b"\x01", b"\x02", b"\x03", b"\xff" * 4, b"\x7f" * 3, b"\0" * 12),
    *(u32(number) for number in (0, 1, 254, 255, 256, 700, 701, 2**16, 2**31, 2**32 - 1)),
    *(zstandard.ZstdCompressor().compress(bytes(size)) for size in (0, 1, 700, 701, 2**22)),
    *(raw(bytes(700)), packed(bytes(700)), packed(bytes(2**22)), b'{"bytes":0}', b"e308", b"-"),
]


@dataclass(frozen=True)
class Step:
    """A valid delta, and the version that it makes of the base."""

    target: Path
    records: Records
    weights: bytes
    delta: bytes


@dataclass(frozen=True)
class Setting:
    base: Path
    steps: list[Step]
    """Of few, many and nearly all elements changed."""
    folder: Path
    """Of the delta under test."""
    limit: int
    """Bytes that applying one may take: what decoding does, and the objects around it."""


def make_setting(place: Path) -> Setting:
    """Weights, deltas of them, and a folder for those under test."""
    rng = np.random.default_rng(0)
    old = {name: normal(rng, shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    base = write_weights(place / "base", old)
    steps = []
    for share in (0.01, 0.2, 0.95):
        target = write_weights(place / f"to-{share}", nudged(rng, old, share))
        write_delta(base, target, target / "delta")
        delta = (target / "delta" / (SINGLE_NAME + SUFFIX)).read_bytes()
        weights = (target / SINGLE_NAME).read_bytes()
        steps.append(Step(target, records(target), weights, delta))
    (place / "under-test").mkdir()
    limit = 32 * sum(tensor.size for tensor in old.values()) + 2**20
    return Setting(base, steps, place / "under-test", limit)


def try_it(setting: Setting, step: Step) -> bool:
    """Applies the delta in the folder to the base and looks at what that did: whether it is the
    target's."""
    weights = setting.base / SINGLE_NAME
    before = weights.read_bytes()
    with bounded(setting.limit):
        make_or_refuse(setting, step)
    after = weights.read_bytes()
    start = min(info.offset for info in read_header(weights).values())
    assert len(after) == len(before)
    assert after[:start] == before[:start]
    if after != before:
        weights.write_bytes(before)
    return after == step.weights


def make_or_refuse(setting: Setting, step: Step) -> None:
    """The target, or an error that says where."""
    try:
        apply_deltas(setting.base, [setting.folder], step.records)
    except UserError as error:
        assert SINGLE_NAME in str(error)
        assert len(str(error)) < 3000
    else:
        assert (setting.base / SINGLE_NAME).read_bytes() == step.weights


def changed(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A few changes of a valid delta: flips, cuts, repetitions, and pieces of others."""
    length = len(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:  # behind the header, which is most of the file
            at = min(len(data), data.rfind(b"}}") + 3 + rng.randrange(200))
        to = min(len(data), at + rng.randrange(1, 20))
        other, start = rng.choice(others), rng.randrange(length)
        instead = [
            bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 : to],
            rng.choice(PIECES),
            data[at:to] * rng.randrange(3),
            other[start : start + rng.randrange(40)],
        ]
        data = data[:at] + rng.choice(instead) + data[to if rng.random() < 0.8 else at :]
    # Another length than the header's is seen before any block is: mostly the old one is restored.
    return data if rng.random() < 0.2 else (data + bytes(length))[:length]


def try_changed(setting: Setting, rng: random.Random) -> bool:
    step = rng.choice(setting.steps)
    data = changed(step.delta, rng, [other.delta for other in setting.steps])
    (setting.folder / (SINGLE_NAME + SUFFIX)).write_bytes(data)
    return try_it(setting, step)


def stream(rng: random.Random, size: int) -> bytes:
    """Of so many bytes, or nearly so many; as it is or in a frame; now and then damaged."""
    size = max(0, size + rng.choice([0, 0, 0, 0, 0, 0, -1, 1, 5]))
    data = rng.choice([bytes(size), rng.randbytes(size), bytes(rng.choices(b"\0\1\xff", k=size))])
    coded = packed(data) if rng.random() < 0.4 else raw(data)
    if rng.random() < 0.1:
        at = rng.randrange(len(coded))
        coded = coded[:at] + rng.choice(PIECES) + coded[at + rng.randrange(4) :]
    return coded


def segment(rng: random.Random, elements: int, itemsize: int) -> bytes:
    """Any kind; a sparse one with counts that agree with its streams more often than not."""
    if rng.random() < 0.1:
        return rng.choice(PIECES)
    if rng.random() < 0.2:
        return full(*(stream(rng, elements) for _ in range(itemsize)))
    changes = rng.choice([1, 2, 3, 10, elements // 2, elements, elements + 1])
    shift = rng.choice([0, 0, 0, 1, 4, 8, 9])
    symbols = changes + rng.choice([0, 0, 0, 1, 2, elements // 255, elements])
    sizes = [symbols, *([changes] if shift else []), *[changes] * itemsize]
    return sparse(changes, symbols, shift, *(stream(rng, size) for size in sizes))


def try_made_up(setting: Setting, rng: random.Random) -> bool:
    """Beneath a sound header, where a change of a valid file seldom comes."""
    blocks = {}
    for name, (shape, dtype) in SHAPES.items():
        made = segment(rng, int(np.prod(shape)), dtype.itemsize)
        blocks[name] = made if rng.random() < 0.6 else b"\0"
    write_blocks(setting.folder, setting.base, setting.steps[0].target, blocks)
    return try_it(setting, setting.steps[0])


def delta() -> Callable[[random.Random], bool]:
    """Changed deltas, and made-up segments beneath a sound header."""
    setting = make_setting(Path(OPEN.enter_context(tempfile.TemporaryDirectory())))

    def case(rng: random.Random) -> bool:
        return (try_changed if rng.random() < 0.5 else try_made_up)(setting, rng)

    return case
