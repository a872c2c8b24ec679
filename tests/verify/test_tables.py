"""Tables as safetensors: what is written is read, by us, by safetensors, and as Parquet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.fuzz.tables import SUBMISSION, VERDICT, decoded
from verify.__main__ import main
from verify.formats.submission import decode_rollouts, encode_rollouts
from verify.formats.tables import MalformedTable
from verify.formats.verdict import MAX_CHECKS, decode_verdicts, encode_verdicts


@pytest.mark.parametrize("kind", [SUBMISSION, VERDICT], ids=["submission", "verdict"])
def test_what_is_written_is_read(kind) -> None:
    assert repr(decoded(kind, kind.file)) == repr(kind.rows)
    assert kind.encode(kind.decode(kind.file)) == kind.file
    assert kind.decode(kind.encode([])) == []


def test_safetensors_reads_the_columns(tmp_path: Path) -> None:
    from safetensors.numpy import load

    found = load(SUBMISSION.file)
    rows = SUBMISSION.rows
    assert np.array_equal(found["logprobs"], np.concatenate([row.logprobs for row in rows]))
    assert found["proofs"].shape == (sum(len(row.proofs) for row in rows), 258)
    assert found["prompt_tokens.index"].tolist() == [0, 0, 1, 1]


def test_arrays_are_views_that_nobody_can_write() -> None:
    (row, *_) = decode_rollouts(SUBMISSION.file, max_rows=4, max_bytes=1 << 20)
    assert row.logprobs.flags.aligned and not row.logprobs.flags.writeable


def test_a_group_shares_its_prompt_and_a_run_its_names() -> None:
    row = replace(SUBMISSION.rows[0], prompt_tokens=np.arange(10_000, dtype=np.int32))
    one, many = (len(encode_rollouts([row] * count)) for count in (1, 9))
    assert many - one < 8 * 1500


def test_a_proof_of_another_length_is_not_written() -> None:
    with pytest.raises(ValueError, match="proofs: 257 bytes instead of 258"):
        encode_rollouts([replace(SUBMISSION.rows[0], proofs=[bytes(257)])])


def test_checks_of_a_row_are_bounded() -> None:
    row = VERDICT.rows[0]
    data = encode_verdicts([replace(row, checks=row.checks[:1] * (MAX_CHECKS + 1))])
    with pytest.raises(MalformedTable, match=f"{MAX_CHECKS + 1} elements of a row, more than"):
        decode_verdicts(data)


@pytest.mark.parametrize("kind", [SUBMISSION, VERDICT], ids=["submission", "verdict"])
def test_a_file_as_parquet(tmp_path: Path, kind, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = ".verdict" * (kind is VERDICT)
    source, out = tmp_path / f"ab{verdict}.safetensors", tmp_path / "ab.parquet"
    source.write_bytes(kind.file)
    assert main(["table", str(source), "-o", str(out)]) == 0
    assert f"{len(kind.rows)} rows" in capsys.readouterr().out
    table = pq.read_table(out)
    for found, row in zip(table.to_pylist(), kind.rows, strict=True):
        for name, value in vars(row).items():
            if name == "checks":
                assert found[name] == [vars(check) for check in value]
            else:
                assert found[name] == (value.tolist() if isinstance(value, np.ndarray) else value)


def test_another_file_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "ab.parquet"
    for data, words in ((b"PAR1" * 9, "a Parquet file of an older"), (b"x", "shorter than")):
        source.write_bytes(data)
        assert main(["table", str(source), "-o", str(tmp_path / "out")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
