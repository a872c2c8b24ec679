"""`python -m verify prove` and `check`: output, exit codes, and files from outside."""

from __future__ import annotations

import base64
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runspec.core.keys import SigningKey
from tests.verify.profiles import ROOT, document, made_profile
from tests.verify.small_model import bf16_bits
from verify.__main__ import main
from verify.thresholds import BFLOAT16
from verify.toploc.codec import build_proofs
from verify.toploc.field import PRIME

ACCEPTED, REJECTED, UNREADABLE = 0, 1, 2


def hidden_states(rows: int = 70, hidden: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, hidden)).astype(np.float32)


def saved(path: Path, array: np.ndarray) -> str:
    np.save(path, array)
    return str(path)


def lines_of(proofs: list[bytes]) -> str:
    return "".join(base64.b64encode(proof).decode() + "\n" for proof in proofs)


@pytest.fixture
def activations(tmp_path: Path) -> str:
    return saved(tmp_path / "activations.npy", hidden_states())


@pytest.fixture
def proofs(tmp_path: Path) -> Path:
    path = tmp_path / "proofs.txt"
    path.write_text(lines_of(build_proofs(bf16_bits(hidden_states()))))
    return path


# --- what is proved -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        hidden_states(),
        hidden_states().astype(">f4"),
        bf16_bits(hidden_states()),
        np.asfortranarray(hidden_states()),
    ],
    ids=["float32", "big-endian", "uint16", "Fortran order"],
)
def test_prove_prints_a_proof_of_each_chunk(
    array: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", saved(tmp_path / "a.npy", array)]) == 0
    assert capsys.readouterr().out == lines_of(build_proofs(bf16_bits(hidden_states())))


# --- the verdict --------------------------------------------------------------------------------


def test_proofs_of_the_same_activations_are_accepted(
    activations: str, proofs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", activations, str(proofs), "--profile", "float32"]) == ACCEPTED
    printed = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in printed[:3]] == ["chunk 0: ", "chunk 1: ", "chunk 2: "]
    assert "exponent mismatches 0, mantissa error mean 0," in printed[2]
    assert printed[3].startswith("accepted: nearest to its limit: ")


def test_numbers_that_are_not_finite_are_null_in_json(
    activations: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = np.array([PRIME] + [0] * 128, ">u2").tobytes()
    (tmp_path / "zeros").write_text(lines_of([zero] * 3))
    assert main(["check", activations, str(tmp_path / "zeros"), "--json"]) == REJECTED
    chunk = json.loads(capsys.readouterr().out)["chunks"][0]
    assert (chunk["exponent_mismatches"], chunk["mantissa_error_mean"]) == (128, None)


GOOD = build_proofs(bf16_bits(hidden_states()))
OTHER = build_proofs(bf16_bits(hidden_states(seed=5)))
CONSTANT = np.array([PRIME, 0x4030] + [0] * 127, ">u2").tobytes()
HOSTILE = {
    "none": (b"", "0 proofs for 3 chunks"),
    "fewer": (lines_of(GOOD[:2]).encode(), "2 proofs for 3 chunks"),
    "more": (lines_of([*GOOD, GOOD[0]]).encode(), "more proofs than the 3 chunks"),
    "endless": (lines_of(GOOD).encode() + b"\n" * 10**6, "more proofs than the 3 chunks"),
    "a line without end": (b"A" * 10**6, "proof of chunk 0: a line of more than 400 characters"),
    "not base64": (b"?" + lines_of(GOOD).encode(), "proof of chunk 0: not base64"),
    "blanks within": (lines_of(GOOD).replace("A", "A ", 1).encode(), "not base64"),
    "an empty line": (b"\n" + lines_of(GOOD[:2]).encode(), "proof of chunk 0: 0 bytes"),
    "null": (lines_of([bytes(258)] * 3).encode(), "proof of chunk 0: modulus 0"),
    "short": (lines_of([*GOOD[:2], GOOD[2][:-1]]).encode(), "proof of chunk 2: 257 bytes"),
    "beyond the field": (lines_of([b"\xff" * 258] * 3).encode(), "modulus 65535"),
    "of others": (lines_of(OTHER).encode(), "of chunk"),
    "one replayed": (lines_of([GOOD[0], GOOD[0], GOOD[2]]).encode(), "of chunk 1"),
    "constant": (lines_of([CONSTANT] * 3).encode(), "of chunk"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_else_is_sent_as_proofs_is_rejected_with_the_reason(
    name: str, activations: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, reason = HOSTILE[name]
    (tmp_path / "proofs").write_bytes(data)
    assert main(["check", activations, str(tmp_path / "proofs")]) == REJECTED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("rejected: ") and reason in last


# --- what cannot be read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"), [(math.nan, "nan"), (-math.inf, "-inf"), (3.4028235e38, "3.4028")]
)
def test_activations_that_are_not_finite_in_bf16(
    wrong: float, words: str, tmp_path: Path, proofs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = hidden_states()
    values[66, 3] = wrong
    path = saved(tmp_path / "a.npy", values)
    for command in (["prove", path], ["check", path, str(proofs)]):
        assert main(command) == UNREADABLE
        assert f"row 66, column 3 is not finite in bf16: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(4,), (0, 64), (64, 0), (2, 2, 64), (1, 2**16 + 1)])
def test_activations_of_another_shape(
    shape: tuple[int, ...], tmp_path: Path, proofs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "a.npy", np.zeros(shape, np.float32))
    for command in (["prove", path], ["check", path, str(proofs)]):
        assert main(command) == UNREADABLE
        assert f"has the shape {list(shape)}; 1 to " in capsys.readouterr().err


def test_what_is_no_file_is_not_waited_for(
    activations: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for command in (
        ["prove", str(tmp_path / "pipe")],
        ["prove", str(tmp_path)],
        ["prove", str(tmp_path / "nothing")],
        ["prove", "a\0b"],
        ["check", activations, str(tmp_path)],
        ["check", activations, str(tmp_path / "nothing")],
        ["check", activations, "a\0b"],
    ):
        assert main(command) == UNREADABLE
        assert "\n  remedy: " in capsys.readouterr().err


# --- calibrated profiles ------------------------------------------------------------------------


def signed_profile(path: Path, key: SigningKey = ROOT) -> str:
    """A profile that allows no position to be off."""
    strict = replace(BFLOAT16, mismatch_share=0.0, miss_share=0.0)
    profile = made_profile(strict, sampler={"precision": "bfloat16"})
    path.write_text(document(profile, key))
    return str(path)


def test_a_calibrated_profile_is_judged_by(
    activations: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given proofs of activations that differ in one exponent, which the published limits allow
    values = hidden_states()
    values[0, np.argmax(np.abs(values[0]))] *= 2.5
    path = tmp_path / "near.txt"
    path.write_text(lines_of(build_proofs(bf16_bits(values))))
    assert main(["check", activations, str(path)]) == ACCEPTED
    # when a stricter profile is named
    profile = signed_profile(tmp_path / "profile.json")
    capsys.readouterr()
    named = ["--profile", profile, "--root-key", ROOT.public_hex]
    assert main(["check", activations, str(path), *named]) == REJECTED
    assert "exponent or sign mismatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "named", "words"),
    [
        (ROOT, [], "no profile"),
        (SigningKey.generate(), ["--root-key", ROOT.public_hex], "may not sign it"),
    ],
)
def test_a_profile_that_is_not_the_roots_is_no_verdict(
    key: SigningKey,
    named: list[str],
    words: str,
    activations: str,
    proofs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = signed_profile(tmp_path / "profile.json", key)
    assert main(["check", activations, str(proofs), "--profile", profile, *named]) == UNREADABLE
    assert words in capsys.readouterr().err
