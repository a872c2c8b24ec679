"""Commands of `python -m verify` that look once: verdicts, exit codes, and files from outside."""

from __future__ import annotations

import base64
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from runspec.core.signed import SigningKey
from tests.fuzz.files import SUBMISSION, VERDICT
from tests.verify.profiles import ROOT, document, made_profile
from tests.verify.small_model import bf16_bits
from verify.__main__ import main
from verify.thresholds import BFLOAT16
from verify.toploc import PRIME, build_proofs

ACCEPTED, REJECTED, UNREADABLE, INTERNAL, INTERRUPTED, NOBODY_READS = 0, 1, 2, 3, 130, 141
Printed = pytest.CaptureFixture[str]


def hidden_states(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(70, 64)).astype(np.float32)


def saved(path: Path, array: np.ndarray) -> str:
    np.save(path, array)
    return str(path)


def lines_of(proofs: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(proof) + b"\n" for proof in proofs)


GOOD = build_proofs(bf16_bits(hidden_states()))


@pytest.fixture
def activations(tmp_path: Path) -> str:
    return saved(tmp_path / "activations.npy", hidden_states())


@pytest.fixture
def proofs(tmp_path: Path) -> str:
    path = tmp_path / "proofs.txt"
    path.write_bytes(lines_of(GOOD))
    return str(path)


# --- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        *(hidden_states(), hidden_states().astype(">f4"), bf16_bits(hidden_states())),
        np.asfortranarray(hidden_states()),
    ],
    ids=["float32", "big-endian", "uint16", "Fortran order"],
)
def test_prove_prints_a_proof_of_each_chunk(
    array: np.ndarray, tmp_path: Path, capsys: Printed
) -> None:
    assert main(["prove", saved(tmp_path / "a.npy", array)]) == 0
    assert capsys.readouterr().out.encode() == lines_of(GOOD)


def test_proofs_of_the_same_activations_are_accepted(
    activations: str, proofs: str, capsys: Printed
) -> None:
    assert main(["check", activations, proofs, "--profile", "float32"]) == ACCEPTED
    printed = capsys.readouterr().out.splitlines()
    assert "exponent mismatches 0, mantissa error mean 0," in printed[2]
    assert printed[3].startswith("accepted: nearest to its limit: ")


HOSTILE = {
    "none": (b"", "0 proofs for 3 chunks"),
    "endless": (lines_of(GOOD) + b"\n" * 10**6, "more proofs than the 3 chunks"),
    "a line without end": (b"A" * 10**6, "proof of chunk 0: a line of more than 400 characters"),
    "not base64": (b"?" + lines_of(GOOD), "proof of chunk 0: not base64"),
    "blanks within": (lines_of(GOOD).replace(b"A", b"A ", 1), "not base64"),
    "short": (lines_of([*GOOD[:2], GOOD[2][:-1]]), "proof of chunk 2: 257 bytes"),
    "one replayed": (lines_of([GOOD[0], GOOD[0], GOOD[2]]), "of chunk 1"),
    "constant": (lines_of([np.array([PRIME, 0x4030] + [0] * 127, ">u2").tobytes()] * 3), "of chun"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_else_is_sent_as_proofs_is_rejected_with_the_reason(
    name: str, activations: str, tmp_path: Path, capsys: Printed
) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "proofs").write_bytes(data)
    assert main(["check", activations, str(tmp_path / "proofs")]) == REJECTED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("rejected: ") and reason in last


def signed_profile(path: Path, key: SigningKey = ROOT) -> str:
    """A profile that allows no position to be off."""
    strict = replace(BFLOAT16, mismatch_share=0.0, miss_share=0.0)
    model = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 192}
    profile = made_profile(strict, sampler={"precision": "bfloat16"}, model=model)
    path.write_text(document(profile, key))
    return str(path)


def test_a_calibrated_profile_is_judged_by(
    activations: str, tmp_path: Path, capsys: Printed
) -> None:
    # given proofs of activations that differ in one exponent, which the published limits allow
    values = hidden_states()
    values[0, np.argmax(np.abs(values[0]))] *= 2.5
    (tmp_path / "near").write_bytes(lines_of(build_proofs(bf16_bits(values))))
    check = ["check", activations, str(tmp_path / "near")]
    assert main(check) == ACCEPTED
    # when a stricter profile is named
    named = ["--profile", signed_profile(tmp_path / "profile"), "--root-key", ROOT.public_hex]
    capsys.readouterr()
    assert main([*check, *named]) == REJECTED
    assert "exponent or sign mismatches" in capsys.readouterr().out


# --- no verdict ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.full((4, 64), -math.inf, np.float32), "row 0, column 0 is not finite in bf16: -inf"),
        (np.zeros((0, 64), np.float32), "has the shape [0, 64]; 1 to "),
        (np.zeros((1, 2**16 + 1), np.float32), "has the shape [1, 65537]; 1 to "),
    ],
)
def test_activations_that_cannot_be_proved_are_named(
    array: np.ndarray, words: str, tmp_path: Path, capsys: Printed
) -> None:
    assert main(["prove", saved(tmp_path / "a.npy", array)]) == UNREADABLE
    assert words in capsys.readouterr().err


def test_what_is_no_file_is_not_waited_for(
    activations: str, tmp_path: Path, capsys: Printed
) -> None:
    os.mkfifo(tmp_path / "pipe")
    absent = [str(tmp_path), str(tmp_path / "nothing"), "a\0b"]
    commands = [["prove", path] for path in [str(tmp_path / "pipe"), *absent]]
    for command in [*commands, *(["check", activations, path] for path in absent)]:
        assert main(command) == UNREADABLE
        assert "\n  remedy: " in capsys.readouterr().err


# --- tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SUBMISSION, VERDICT], ids=["submission", "verdict"])
def test_a_file_as_parquet(tmp_path: Path, kind: Any, capsys: Printed) -> None:
    verdict = ".verdict" * (kind is VERDICT)
    source, out = tmp_path / f"ab{verdict}.safetensors", tmp_path / "ab.parquet"
    source.write_bytes(kind.file)
    assert main(["table", str(source), "-o", str(out)]) == 0
    assert f"{len(kind.rows)} rows" in capsys.readouterr().out
    for found, row in zip(pq.read_table(out).to_pylist(), kind.rows, strict=True):
        for name, value in vars(row).items():
            expected = value.tolist() if isinstance(value, np.ndarray) else value
            assert found[name] == ([*map(vars, value)] if name == "checks" else expected)
