"""The columns of a submission: all that its Parquet decoder needs to know, and quick to import."""

from __future__ import annotations

import pyarrow as pa


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [
        _required("run", pa.string()),
        _required("step", pa.int32()),
        _required("worker", pa.string()),
        _required("lease", pa.string()),
        _required("problem_id", pa.string()),
        _required("group", pa.int32()),
        _required("sample", pa.int32()),
        _required("version", pa.int32()),
        _required("prompt_tokens", _list_of(pa.int32())),
        _required("output_tokens", _list_of(pa.int32())),
        _required("logprobs", _list_of(pa.float32())),
        _required("finish_reason", pa.string()),
        _required("temperature", pa.float32()),
        _required("top_p", pa.float32()),
        _required("top_k", pa.int32()),
        pa.field("target", pa.int32()),
        _required("task_reward", pa.float32()),
        _required("length_penalty", pa.float32()),
        _required("proofs", _list_of(pa.binary())),
        pa.field("versions", _list_of(pa.int32())),
    ]
)
NEWER_COLUMNS = ("versions",)
"""A run that goes on after an upgrade reads what was handed in before it."""
