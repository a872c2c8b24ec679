"""`python -m verify prove` and `check`: TOPLOC proofs of activations in a file, without a run.

The file holds final hidden states as .npy; it is mapped, never unpickled.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from runspec.core.canonical import is_digest
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.schema.load import MAX_PROFILE_BYTES
from verify import toploc
from verify.checks.prefill import judge_proofs, nearest_to_failing
from verify.commands import run_once, say
from verify.formats.verdict import CheckResult
from verify.profile import open_profile
from verify.thresholds import BFLOAT16, FLOAT32, Limits
from verify.toploc.statistics import ChunkStatistics, verify_proofs

MAX_TOKENS = 1 << 20
MAX_HIDDEN = 1 << 16
_PIECE_ELEMENTS = 1 << 22
_MAGIC = b"\x93NUMPY\x01\x00"
_DTYPES = {"<u2", ">u2", "<f4", ">f4"}
_SAVE = "save it with numpy.save as uint16 (bf16 bits) or float32, [tokens, hidden]"


def open_activations(path: Path) -> np.ndarray:
    """Map the activations of one rollout.

    Args:
        path: .npy file of version 1.0: uint16 (bf16 bits) or float32, [n, D], in either byte order.

    Returns:
        The array in the file, read-only and not loaded into memory.

    Raises:
        UserError: the file does not exist, or its kind, dtype, shape or size is wrong.
    """
    if not path.is_file():  # a pipe without a writer would block
        raise UserError("is not a file that can be read", place=str(path), remedy=_SAVE)
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:  # later versions may have a header of 4 GB
                raise ValueError("does not begin as an .npy file of version 1.0")
        found = np.lib.format.open_memmap(path, mode="r")
        found_bytes = found.offset + found.nbytes
        if found_bytes != path.stat().st_size:
            raise ValueError(f"its header gives {found_bytes} bytes")
        if found.dtype.str not in _DTYPES:
            raise ValueError(f"has elements of dtype {found.dtype.str}")
        most = MAX_TOKENS, MAX_HIDDEN
        if found.ndim != 2 or not all(0 < n <= m for n, m in zip(found.shape, most, strict=True)):
            raise ValueError(
                f"has the shape {list(found.shape)}; 1 to {MAX_TOKENS} tokens of 1 to {MAX_HIDDEN} "
                "activations are taken"
            )
    except Exception as error:  # numpy raises many kinds at a damaged header
        raise UserError(
            f"cannot be used: {getattr(error, 'strerror', None) or str(error)[:200]}",
            place=str(path),
            remedy=_SAVE,
        ) from error
    return found


def bf16_pieces(activations: np.ndarray, *, place: str) -> Iterator[np.ndarray]:
    """Yield the bf16 bits, u16 [rows, D], a few whole chunks at a time, to limit memory.

    Args:
        activations: array of `open_activations`; float32 is rounded to nearest, ties to even.
        place: name of the file in errors.

    Raises:
        UserError: an activation is not finite, before or after rounding.
    """
    chunk = toploc.CHUNK_ROWS * activations.shape[1]
    rows = toploc.CHUNK_ROWS * max(1, _PIECE_ELEMENTS // chunk)
    for start in range(0, len(activations), rows):
        piece = np.ascontiguousarray(activations[start : start + rows])
        bits = piece.astype(np.uint16) if piece.dtype.kind == "u" else toploc.round_to_bf16(piece)
        wrong = (bits & toploc.MAGNITUDE) >= toploc.INFINITY
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise UserError(
                f"row {start + row}, column {column} is not finite in bf16: {piece[row, column]}",
                place=place,
                remedy="a forward pass that overflowed has no proof: find out why it overflowed",
            )
        yield bits


ACCEPTED, REJECTED = 0, 1
PROFILES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
DEFAULT_PROFILE = "bfloat16"
"""The strictest profile that the published figures allow; float32 is for engines that sum in the
same order."""
_MAX_LINE_BYTES = 400
"""Longest line of a proof; 258 bytes are 344 characters."""


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `prove` and `check` to a command line."""
    prove = commands.add_parser(
        "prove",
        help="print the TOPLOC proofs of activations",
        description="Prints a proof in base64, one line for each 32 tokens begun. "
        "Exits 0, or 2 if the activations cannot be read.",
    )
    check = commands.add_parser(
        "check",
        help="judge TOPLOC proofs by activations",
        description="Prints the statistics of each chunk and the verdict. "
        "Exits 0 if the proofs are accepted, 1 if they are rejected, 2 if a file cannot be read.",
    )
    for command in (prove, check):
        command.add_argument(
            "activations",
            type=Path,
            metavar="ACTIVATIONS.npy",
            help="final hidden states [tokens, hidden]: bf16 bits as uint16, or float32, which is "
            "rounded",
        )
    check.add_argument("proofs", metavar="PROOFS", help="as `prove` prints them; - reads stdin")
    check.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="P",
        help=f"limits to judge by: {', '.join(PROFILES)}, or the file of a calibrated profile; "
        "the default %(default)s has the strictest limits that the published figures allow",
    )
    check.add_argument(
        "--root-key", metavar="HEX", help="the root's public key, which must have signed the file"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    prove.set_defaults(body=lambda options: run_once(lambda: _prove(options)))
    check.set_defaults(body=lambda options: run_once(lambda: _check(options)))


def _prove(options: argparse.Namespace) -> int:
    activations = open_activations(options.activations)
    pieces = bf16_pieces(activations, place=str(options.activations))
    proofs = [
        proof for bits in pieces for proof in toploc.build_proofs(bits)
    ]  # all, or none is printed
    say("\n".join(base64.b64encode(proof).decode() for proof in proofs))
    return ACCEPTED


def _check(options: argparse.Namespace) -> int:
    hidden_size = open_activations(options.activations).shape[1]
    limits = limits_of(options.profile, hidden_size, root_public_key=options.root_key)
    verdict = check_proofs(options.activations, options.proofs, limits)
    say(_as_json(verdict, options.profile) if options.json else _as_text(verdict))
    return ACCEPTED if verdict.accepted else REJECTED


def limits_of(profile: str, hidden_size: int, *, root_public_key: str | None = None) -> Limits:
    """Return the limits of a profile.

    Args:
        profile: name in `PROFILES`, or the file of a calibrated profile.
        hidden_size: hidden size of the activations to judge.
        root_public_key: key that must have signed the file (hex).

    Raises:
        UserError: there is no such name or file, the file is not valid, or it was measured on a
            model of another hidden size.
    """
    if profile in PROFILES:
        return PROFILES[profile]
    if not is_digest(root_public_key):
        raise UserError(
            f"no profile {profile[:80]!r}; a file needs the public key of its signer",
            place="--profile and --root-key",
            remedy=f"name one of {', '.join(PROFILES)}, or a file of `python -m verify "
            "calibrate` and, with --root-key, the 64 hexadecimal characters of its signer",
        )
    try:
        data = read_bounded(Path(profile), MAX_PROFILE_BYTES)
        found = open_profile(data, root_public_key=root_public_key)
    except (OSError, ValueError) as error:  # ValueError: a bad signature too, or no path
        raise UserError(
            f"cannot be verified: {getattr(error, 'strerror', None) or error}",
            place=profile[:200],
            remedy="name a file of `python -m verify calibrate`, and the key that signed it",
        ) from error
    if found.model.hidden_size != hidden_size:
        raise UserError(
            f"measured on a model with hidden_size {found.model.hidden_size}; the activations have "
            f"{hidden_size}",
            place=profile[:200],
            remedy="name the profile of their model",
        )
    return found.as_limits()


@dataclass(frozen=True)
class ProofVerdict:
    """Result of the proofs of one rollout."""

    accepted: bool
    reason: str
    """The deciding check with its number and limit; if accepted, the check nearest to failing."""
    chunks: list[ChunkStatistics]
    """Empty if a proof is malformed, or the number of proofs is wrong."""
    results: list[CheckResult]


def check_proofs(path: Path, proofs: str, limits: Limits) -> ProofVerdict:
    """Judge proofs by the activations in a file.

    Args:
        path: file of the activations.
        proofs: file of base64 lines, or `-` for standard input. The prover writes it, so malformed
            contents are a reason to reject, not an error.
        limits: limits to judge by.

    Raises:
        UserError: the activations cannot be used, or the proofs cannot be read.
    """
    activations = open_activations(path)
    try:
        sent = _read_proofs(proofs, *activations.shape)
        chunks: list[ChunkStatistics] = []
        for bits in bf16_pieces(activations, place=str(path)):
            here = sent[len(chunks) : len(chunks) + -(-len(bits) // toploc.CHUNK_ROWS)]
            chunks += verify_proofs(bits, here)
    except toploc.MalformedProof as error:
        return ProofVerdict(False, str(error), [], [])
    results = judge_proofs(chunks, limits)
    reason = nearest_to_failing(results).measured
    return ProofVerdict(all(r.passed for r in results), reason, chunks, results)


def _read_proofs(name: str, tokens: int, hidden: int) -> list[bytes]:
    """Return one proof for each chunk; read at most one line more, and no line beyond its limit.

    Raises:
        MalformedProof: the lines are not one well-formed proof for each chunk.
        UserError: the file cannot be read.
    """
    expected = -(-tokens // toploc.CHUNK_ROWS)
    found: list[bytes] = []
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(found) == expected:
                    raise toploc.MalformedProof(f"more proofs than the {expected} chunks")
                rows = min(toploc.CHUNK_ROWS, tokens - toploc.CHUNK_ROWS * len(found))
                found.append(_proof(line, len(found), min(toploc.TOP_K, rows * hidden)))
    except (OSError, ValueError) as error:
        if isinstance(error, toploc.MalformedProof):
            raise
        raise UserError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
            place=name[:200],
            remedy="name a file of base64 lines, or - for standard input",
        ) from error
    if len(found) < expected:
        raise toploc.MalformedProof(f"{len(found)} proofs for {expected} chunks")
    return found


def _proof(line: bytes, chunk: int, k: int) -> bytes:
    """Return the bytes of the proof in a line."""
    place = f"proof of chunk {chunk}"
    if len(line) > _MAX_LINE_BYTES:
        raise toploc.MalformedProof(f"{place}: a line of more than {_MAX_LINE_BYTES} characters")
    try:
        data = base64.b64decode(line.rstrip(b"\r\n"), validate=True)
    except binascii.Error as error:
        raise toploc.MalformedProof(f"{place}: not base64: {error}") from error
    try:
        toploc.parse_proof(data, k=k)
    except toploc.MalformedProof as error:
        raise toploc.MalformedProof(f"{place}: {error}") from error
    return data


def _as_text(verdict: ProofVerdict) -> str:
    lines = [
        f"chunk {number}: "
        + ", ".join(f"{name.replace('_', ' ')} {_number(v)}" for name, v in asdict(chunk).items())
        for number, chunk in enumerate(verdict.chunks)
    ]
    nearest = "nearest to its limit: " if verdict.accepted else ""
    words = "accepted" if verdict.accepted else "rejected"
    return "\n".join([*lines, f"{words}: {nearest}{verdict.reason}"])


def _number(value: object) -> str:
    if isinstance(value, list | tuple):
        return "/".join(_number(part) for part in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _as_json(verdict: ProofVerdict, profile: str) -> str:
    """Return the verdict as JSON; a number that is not finite (no exponents agree) is null."""
    document = {
        "accepted": verdict.accepted,
        "reason": verdict.reason,
        "profile": profile,
        "chunks": [
            {name: _finite(value) for name, value in asdict(chunk).items()}
            for chunk in verdict.chunks
        ],
        "failed": [
            {"reason": r.reason, "value": _finite(r.value), "limit": _finite(r.limit)}
            for r in verdict.results
            if not r.passed
        ],
    }
    return json.dumps(document, allow_nan=False)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
