"""Files and signatures that are not what they should be: a rejection each, never a crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify.bench import Bench, lease_for, packed
from tests.verify.small_model import fixed_key
from verify.formats.submission import SCHEMA, decode_rollouts
from verify.formats.tables import MalformedTable

MAX_BYTES = 1 << 20


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def reason(bench: Bench, envelope: bytes, table: bytes) -> str:
    verdict = bench.verdict_on(envelope, table)
    assert not verdict.accepted and bench.engine.prefills == []
    return verdict.reason


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def test_forged_signature(bench: Bench) -> None:
    envelope, table = bench.packed(bench.honest())
    place = envelope.index(b'"signature":"') + 20
    forged = envelope[:place] + bytes([envelope[place] ^ 1]) + envelope[place + 1 :]
    assert reason(bench, forged, table).startswith("signature: submission: ")


def test_file_exchanged_after_signing(bench: Bench) -> None:
    rows = bench.honest()
    envelope, _ = bench.packed(rows)
    _, other = bench.packed([*rows[:-1], replace(rows[-1], task_reward=1.0)])
    assert reason(bench, envelope, other) == "signature: the file is not the one that was signed"


def test_another_workers_file_signed_anew(bench: Bench) -> None:
    """A thief signs an honest worker's rows with its own key, under the honest worker's lease."""
    stolen = packed(bench.honest(), bench.signed_lease, bench.lease, fixed_key(9))
    assert reason(bench, *stolen).startswith("lease: the envelope names another run, step, worker")


def test_submission_replayed_under_a_new_lease(bench: Bench) -> None:
    old = bench.honest()
    signed, lease = lease_for(bench.worker_key, bench.coordinator_key, index=1)
    bench.signed_lease, bench.lease = signed, lease
    assert reason(bench, *bench.packed(old)).startswith("assignment: row 0: lease is")


def test_rows_replayed_under_a_new_lease_with_new_names(bench: Bench) -> None:
    """Renamed rows still carry the old lease's problems."""
    old = bench.honest()
    bench.signed_lease, bench.lease = lease_for(bench.worker_key, bench.coordinator_key, index=1)
    renamed = [replace(r, lease=bench.honest()[0].lease) for r in old]
    assert reason(bench, *bench.packed(renamed)).startswith("assignment: row 0: ")


def test_samples_swapped_within_a_group(bench: Bench) -> None:
    """Each sample has noise of its own: a good one cannot stand in for another."""
    rows = bench.honest()
    swapped = [replace(r, sample=(r.sample + 1) % 4) for r in rows]
    verdict = bench.verdict(swapped)
    assert verdict.reason.startswith("seeded_sampling: row ")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.append_column("extra", pa.array([0] * len(t))),
        lambda t: t.drop_columns(["proofs"]),
        lambda t: t.select(t.column_names[::-1]),
        lambda t: t.cast(pa.schema([f.with_nullable(True) for f in t.schema])),
        lambda t: t.set_column(
            1, pa.field("step", pa.int64(), nullable=False), t["step"].cast("int64")
        ),
    ],
    ids=["extra", "missing", "reordered", "nullable", "wider"],
)
def test_another_schema(bench: Bench, change) -> None:
    _, data = bench.packed(bench.honest())
    table = change(pq.read_table(pa.BufferReader(data)).cast(SCHEMA))
    with pytest.raises(MalformedTable, match="columns are not those"):
        decode_rollouts(parquet(table), max_rows=8, max_bytes=MAX_BYTES)


def test_decompression_bomb(bench: Bench) -> None:
    """Millions of zeros in a few kilobytes are refused by the size that they would have."""
    rows = bench.honest()
    zeros = np.zeros(1 << 22, np.int32)
    _, table = bench.packed([replace(rows[0], output_tokens=zeros)])
    assert len(table) < MAX_BYTES
    with pytest.raises(MalformedTable, match="decoded, more than the"):
        decode_rollouts(table, max_rows=8, max_bytes=MAX_BYTES)


@pytest.fixture(scope="module")
def honest_table(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    bench = Bench(tmp_path_factory.mktemp("honest"))
    return bench.packed(bench.honest())[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_to_the_file_is_a_malformed_table(
    honest_table: bytes, damage: list[tuple[int, int]]
) -> None:
    damaged = bytearray(honest_table)
    for place, value in damage:
        damaged[place % len(damaged)] = value
    try:
        rows = decode_rollouts(bytes(damaged), max_rows=8, max_bytes=MAX_BYTES)
    except MalformedTable:
        return
    assert len(rows) <= 8
