"""Monitor that writes TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from runspec.local.monitors import Entry, Target


class TensorBoard:
    """Event files of TensorBoard, in a folder of the record's name: one for each session."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, target: Target) -> None:
        folder = target.folder / target.record
        new = not folder.exists()
        self._writer = EventFileWriter(str(folder))
        if new:
            spec = json.dumps(target.spec, indent=2, sort_keys=True)
            self._write(0, 0.0, [_text("spec", _verbatim(spec))])

    def send(self, entry: Entry) -> None:
        values = [Summary.Value(tag=k, simple_value=v) for k, v in entry.scalars.items()]
        if entry.rollouts:
            text = "\n\n---\n\n".join(map(_rollout, entry.rollouts))
            values.append(_text("rollouts", text))
        self._write(entry.at, entry.time, values)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time: float, values: Sequence[Summary.Value]) -> None:
        self._writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))


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
