"""Lanes: proofs and .npy files. Statistics or `MalformedProof`, activations or `UserError`."""

from __future__ import annotations

import base64
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from runspec.core.errors import UserError
from tests.fuzz.bounds import OPEN, bounded
from tests.fuzz.mutate import damaged
from verify.proof_commands import (
    MAX_HIDDEN,
    MAX_TOKENS,
    bf16_pieces,
    check_proofs,
    open_activations,
)
from verify.thresholds import BFLOAT16
from verify.toploc.codec import PROOF_BYTES, MalformedProof, build_proofs, parse_proof
from verify.toploc.field import PRIME
from verify.toploc.selection import TOP_K, round_to_bf16
from verify.toploc.statistics import ChunkStatistics, verify_proofs

MEMORY = 16 << 20
VALUES = np.random.default_rng(0).normal(size=(37, 16)).astype(np.float32)
BITS = round_to_bf16(VALUES)
PROOFS = build_proofs(BITS)
WORDS = [0, 1, 127, 128, 0x3F80, 0x7F80, 0x7FC0, 0xFF80, PRIME - 1, PRIME, PRIME + 1, 0xFFFF]
_ODD_WORDS = [word.to_bytes(2, "big") for word in WORDS]
HEADER_PIECES = [
    *(
        b"'descr'",
        b"'<f4'",
        b"'|O'",
        b"[('a', '<f4')]",
        b"False",
        b"True",
        b"'shape': ",
        b"(",
        b")",
    ),
    *(b"(37, 16)", b"(0, 16)", b"(-1, 16)", b"(1,)", b"()", b"9" * 18, b"(1048577, 1)", b"," * 50),
    *(b"__import__('os')", b"{" * 200, b" " * 300, b"\x00", b"\xff", b"\n", b"0, " * 40, b")"),
]


def a_proof(rng: random.Random) -> bytes:
    """An honest one with changes, one of odd words, or any bytes of about the length."""
    match rng.randrange(4):
        case 0:
            words = np.frombuffer(rng.choice(PROOFS), ">u2").copy()
            for _ in range(rng.choice([0, 1, 1, 3])):
                words[rng.choice([0, rng.randrange(129)])] = rng.choice(WORDS)
            return words.tobytes()
        case 1:
            k = rng.choice([1, 80, 128])
            odd = [rng.choice(WORDS[:9]) for _ in range(k)] + [0] * (128 - k)
            return np.array([rng.choice([128, 5000, PRIME]), *odd], ">u2").tobytes()
        case 2:
            return damaged(rng, rng.choice(PROOFS), PROOFS, _ODD_WORDS)
        case _:
            return rng.randbytes(rng.choice([0, 1, 257, 258, 258, 258, 259, 600]))


def well_formed(data: bytes, k: int) -> bool:
    """The format in so many words."""
    if len(data) != PROOF_BYTES:
        return False
    modulus, *coefficients = struct.unpack(">129H", data)
    return 128 <= modulus <= PRIME and max(coefficients) < PRIME and not any(coefficients[k:])


def check_statistics(chunk: ChunkStatistics, elements: int) -> None:
    assert (chunk.elements, chunk.k) == (elements, min(TOP_K, elements))
    assert 0 <= chunk.exponent_mismatches <= chunk.k
    assert 0 <= chunk.sign_mismatches <= chunk.k - chunk.exponent_mismatches
    nothing_agrees = chunk.exponent_mismatches == chunk.k
    for error in (chunk.mantissa_error_mean, chunk.mantissa_error_median):
        assert error == math.inf if nothing_agrees else 0 <= error <= 127
    assert 0 <= chunk.error_median < math.inf and 0 <= chunk.constant_error < math.inf


def check_proofs_from_outside(rng: random.Random) -> bool:
    rows = rng.choice([1, 5, 31, 32, 33, 37])
    chunks = -(-rows // 32)
    sent = [a_proof(rng) for _ in range(chunks if rng.random() < 0.8 else rng.randrange(4))]
    sizes = [16 * min(32, rows - start) for start in range(0, rows, 32)]
    sound = len(sent) == chunks and all(
        well_formed(proof, min(TOP_K, size)) for proof, size in zip(sent, sizes, strict=True)
    )
    with bounded(MEMORY):
        try:
            found = verify_proofs(BITS[:rows], sent)
        except MalformedProof as error:
            assert not sound and len(str(error)) < 300
            return False
    assert sound
    for chunk, size in zip(found, sizes, strict=True):
        check_statistics(chunk, size)
    return True


def check_proof(data: bytes, k: int) -> bool:
    """A proof, or `MalformedProof`: as the format says in so many words."""
    with bounded(MEMORY):
        try:
            parsed = parse_proof(data, k=k)
        except MalformedProof as error:
            assert not well_formed(data, k) and len(str(error)) < 300
            return False
    assert well_formed(data, k) and parsed.to_bytes() == data
    return True


def check_lines(folder: Path, rng: random.Random) -> bool:
    """What `python -m verify check` reads: a verdict with a reason, whatever the lines are."""
    lines = b"".join(
        base64.b64encode(proof) + b"\n"
        for proof in (PROOFS if rng.random() < 0.5 else [a_proof(rng) for _ in range(2)])
    )
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(lines) + 1)
        made = rng.choice([b"\n", b"\r\n", b"=", b" ", b"\0", b"A" * 500, lines, rng.randbytes(3)])
        lines = lines[:at] + made + lines[at + rng.choice([0, 1, len(made)]) :]
    (folder / "proofs").write_bytes(lines)
    with bounded(MEMORY):
        verdict = check_proofs(folder / "activations.npy", str(folder / "proofs"), BFLOAT16)
    exact = lines.replace(b"\r\n", b"\n").rstrip(b"\n").split(b"\n")
    if exact == [base64.b64encode(proof) for proof in PROOFS] and lines.count(b"\n") <= 2:
        assert verdict.accepted
    if verdict.accepted:
        assert len(verdict.chunks) == 2
        assert all(chunk.error_median == 0 for chunk in verdict.chunks)
    assert verdict.reason and len(verdict.reason) < 500
    return verdict.accepted


def a_file(rng: random.Random, valid: bytes) -> bytes:
    """A valid .npy file with changes, most of them in its header."""
    made = bytearray(valid)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(140 if rng.random() < 0.9 else len(made))
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = bytes(
                    byte ^ 1 << rng.randrange(8) for byte in made[at : at + 1]
                )
            case 1:
                piece = rng.choice(HEADER_PIECES)
                made[at : at + len(piece)] = piece
            case 2:
                made[at : at + rng.randrange(9)] = rng.choice(HEADER_PIECES)
            case 3:
                made[6:12] = rng.choice(
                    [b"\x01\0v\0{'", b"\x02\0v\0\0\0", b"\x03\0\xff\xff\xff\xff"]
                )
            case _:
                del made[1 + rng.randrange(len(made)) :]
    return bytes(made)


def check_activations(folder: Path, rng: random.Random) -> bool:
    """A damaged file: activations of the sizes that may be, or `UserError`."""
    path = folder / "under-test.npy"
    path.write_bytes(a_file(rng, (folder / "activations.npy").read_bytes()))
    with bounded(MEMORY):
        try:
            activations = open_activations(path)
            pieces = list(bf16_pieces(activations, place="x"))
        except UserError as error:
            assert error.place and error.remedy and len(str(error)) < 1000
            return False
    tokens, hidden = activations.shape
    assert 0 < tokens <= MAX_TOKENS and 0 < hidden <= MAX_HIDDEN
    assert activations.dtype.name in ("uint16", "float32")
    assert sum(len(piece) for piece in pieces) == tokens
    assert all(piece.dtype == np.uint16 and piece.shape[1] == hidden for piece in pieces)
    return True


# --- lanes --------------------------------------------------------------------------------------

Case = Callable[[random.Random], bool]


_KS = (1, 2, 16, 127, TOP_K, TOP_K)


def proof() -> Case:
    """One proof."""
    return lambda rng: check_proof(a_proof(rng), rng.choice(_KS))


def proofs_of_a_rollout() -> Case:
    """Proofs of all chunks, and the statistics of those that are well formed."""
    return check_proofs_from_outside


def proof_lines() -> Case:
    """A file of them, a line of base64 a chunk, for `python -m verify check`."""
    return _in_folder(check_lines)


def activations() -> Case:
    """An .npy file of them."""
    return _in_folder(check_activations)


def _in_folder(check: Callable[[Path, random.Random], bool]) -> Case:
    folder = Path(OPEN.enter_context(TemporaryDirectory()))
    np.save(folder / "activations.npy", VALUES)
    return lambda rng: check(folder, rng)
