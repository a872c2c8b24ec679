"""A batch as bytes: how process 0 hands what it read and checked to the other processes.

The bytes are a table (`verify.formats.tables`) with a row a rollout. No pickle is involved.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import groupby

from learner_jax.batch import Batch, TrainingRollout
from runspec.core.canonical import canonical_json, parse_object
from verify.formats.batch import BatchGroup, BatchManifest
from verify.formats.tables import Column, Schema, decode_table, encode_table, text

SCHEMA = Schema(
    "runspec batch 1",
    (
        text("manifest"),
        Column("group", "I32"),
        text("problem_id"),
        Column("prompt_tokens", "I32", ("index", "offsets")),
        Column("output_tokens", "I32", ("offsets",)),
        Column("mu", "F32", ("offsets",)),
        Column("advantage", "F64"),
        Column("task_reward", "F64"),
        Column("reward", "F64"),
        Column("target", "I32", ("valid",)),
        Column("version", "I32"),
    ),
)
_MAX_BYTES = 1 << 40
"""No bound: the bytes are process 0's, and `feed` bounds them."""


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch; `decode_batch` gives it back bit for bit."""
    rollouts = batch.rollouts
    names = [field.name for field in fields(TrainingRollout)]
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in names}
    columns["manifest"] = [canonical_json(asdict(batch.manifest)).decode()] * len(rollouts)
    columns["group"] = [number for number, group in enumerate(batch.groups) for _ in group]
    return encode_table(columns, SCHEMA)


def decode_batch(data: bytes) -> Batch:
    """Reads a batch.

    Raises:
        MalformedTable: bytes that `encode_batch` did not make.
    """
    columns = decode_table(data, SCHEMA, max_rows=len(data), max_bytes=_MAX_BYTES)
    (manifest, *_), numbers = columns.pop("manifest"), columns.pop("group")
    said = parse_object(manifest.encode(), max_bytes=len(data))
    groups = [BatchGroup(**group) for group in said.pop("groups")]
    rows = zip(numbers, zip(*columns.values(), strict=True), strict=True)
    return Batch(
        BatchManifest(**said, groups=groups),
        [[TrainingRollout(*row) for _, row in own] for _, own in groupby(rows, lambda row: row[0])],
    )
