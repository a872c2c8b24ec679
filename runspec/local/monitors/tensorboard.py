"""Monitor that writes a TensorBoard event file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from runspec.local.monitors.interface import Entry, Target

_HEADERS = 2
"""Records before the first entry: the format's version, and the spec."""
_BESIDE = 16
"""Bytes of a record beside its data."""


class TensorBoard:
    """Event files of TensorBoard, in a folder of the record's name.

    An entry is one event, so the events in the file are the entries that it has. One that a crash
    left torn is cut off.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def start(self, target: Target) -> int:
        folder = target.folder / target.record
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.0.{target.record}").open("a+b")
        count, end = whole_records(self._file)
        if count < _HEADERS:
            count, end = 0, 0
        self._file.truncate(end)
        if count == 0:
            self._write(Event(file_version="brain.Event:2"))
            spec = json.dumps(target.spec, indent=2, sort_keys=True)
            self._write(_event(0, 0.0, [_text("spec", _verbatim(spec))]))
            self.flush()
        return max(0, count - _HEADERS)

    def send(self, entry: Entry) -> None:
        values = [Summary.Value(tag=k, simple_value=v) for k, v in entry.scalars.items()]
        if entry.rollouts:
            text = "\n\n---\n\n".join(map(_rollout, entry.rollouts))
            values.append(_text("rollouts", text))
        self._write(_event(entry.at, entry.time, values))

    def flush(self) -> None:
        assert self._file is not None, "start comes first"
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        assert self._file is not None, "flush has asked"
        self._file.close()

    def _write(self, event: Event) -> None:
        RecordWriter(self._file).write(event.SerializeToString())


def whole_records(file: BinaryIO) -> tuple[int, int]:
    """Return how many records an event file begins with, and the bytes that they take."""
    size, count, at = file.seek(0, os.SEEK_END), 0, 0
    while at + _BESIDE <= size:
        file.seek(at)
        length, check = struct.unpack("<QI", file.read(12))
        if masked_crc32c(struct.pack("<Q", length)) != check or at + _BESIDE + length > size:
            break
        count, at = count + 1, at + _BESIDE + length
    return count, at


def _event(step: int, time: float, values: Sequence[Summary.Value]) -> Event:
    return Event(step=step, wall_time=time, summary=Summary(value=values))


def _text(tag: str, markdown: str) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def _rollout(row: Mapping[str, Any]) -> str:
    """Return a rollout as Markdown in which nothing of the model's own is Markdown."""
    figures = {key: value for key, value in row.items() if key not in ("prompt", "output")}
    head = ", ".join(f"{key} {value}" for key, value in figures.items() if value is not None)
    parts = [head, *(str(row[key]) for key in ("prompt", "output") if key in row)]
    return "\n\n".join(_verbatim(part) for part in parts)


def _verbatim(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
