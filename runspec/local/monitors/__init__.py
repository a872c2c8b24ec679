"""Monitors: tools that a run logs to, each in a process that only reads the run directory.

Here are the interface of one, what it is given, and ours: TensorBoard, Weights & Biases, trackio.
The tools are imported by what uses them.

trackio is installed in an environment of its own, because its pins and ours exclude each other. So
`trackio_script.py` speaks to it, and the monitor speaks to the script: lines of JSON over pipes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, Protocol

from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.core.process import RunStopped
from runspec.core.schema import Monitor as MonitorSpec


@dataclass(frozen=True)
class Target:
    """The run, and the record of it that a tool opens."""

    run: str
    """Name of the run."""
    record: str
    """Name of the record: another one after each rollback. Unique, and safe as a file's name."""
    spec: Mapping[str, Any]
    """The resolved spec, as spec.json has it."""
    setting: MonitorSpec
    folder: Path
    """Where the tool's files go."""


@dataclass(frozen=True)
class Entry:
    """One thing to send."""

    axis: Literal["step", "version"]
    """What `at` counts: trained steps, or policy versions."""
    at: int
    time: float
    """When it was made, in Unix seconds."""
    scalars: Mapping[str, float]
    """Finite figures by name; a slash divides groups of them."""
    rollouts: Sequence[Mapping[str, str | int | float | None]] = ()
    """Rows of samples.jsonl: prompt, output, rewards, ...; empty for an entry of figures."""
    number: int = 0
    """Its place in the record, from 0 on. After a kill the newest ones come again, with the numbers
    that they had."""


class Monitor(Protocol):
    """Interface of an entry point of `runspec.monitors`: a class made without arguments.

    Calls come from one thread, in this order, and any exception ends the process; it starts again
    later. A call that takes longer than the monitor's `deadline` ends the process too.
    """

    def start(self, target: Target) -> None:
        """Open a record, or open it again.

        Raises:
            RunStopped: it cannot work and trying again would not help.
        """

    def send(self, entry: Entry) -> None:
        """Log an entry."""

    def flush(self) -> None:
        """Return once everything sent would outlive this process, if the tool can tell."""

    def close(self) -> None:
        """End the session; the record can be opened again."""


class TensorBoard:
    """Event files of TensorBoard, in a folder of the record's name: one for each session."""

    def __init__(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open: Any = EventFileWriter
        self._writer: Any = None

    def start(self, target: Target) -> None:
        folder = target.folder / target.record
        new = not folder.exists()
        self._writer = self._open(str(folder))
        if new:
            spec = json.dumps(target.spec, indent=2, sort_keys=True)
            self._write(0, 0.0, [_text_value("spec", _verbatim(spec))])

    def send(self, entry: Entry) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in entry.scalars.items()]
        if entry.rollouts:
            text = "\n\n---\n\n".join(map(_markdown_rollout, entry.rollouts))
            values.append(_text_value("rollouts", text))
        self._write(entry.at, entry.time, values)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, time: float, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))


def _text_value(tag: str, markdown: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()])
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def _markdown_rollout(row: Mapping[str, Any]) -> str:
    """Return a rollout as Markdown in which nothing of the model's own is Markdown."""
    figures = {key: value for key, value in row.items() if key not in ("prompt", "output")}
    head = ", ".join(f"{key} {value}" for key, value in figures.items() if value is not None)
    parts = [head, *(str(row[key]) for key in ("prompt", "output") if key in row)]
    return "\n\n".join(_verbatim(part) for part in parts)


def _verbatim(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class WeightsAndBiases:
    """A run of Weights & Biases, whose id is the record's name; each restart resumes it.

    The entry's number is its `_step`, by which a server leaves out what comes a second time.
    """

    def __init__(self) -> None:
        import wandb

        self._tool: Any = wandb
        self._run: Any = None

    def start(self, target: Target) -> None:
        setting, folder = target.setting, target.folder
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing of this run goes to folders of the user's; error reports go nowhere.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder))
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = self._tool.init(
            project=setting.project,
            id=target.record,
            name=target.record,
            dir=str(folder),
            mode=setting.mode,
            resume="allow" if setting.mode == "online" else None,
            config=dict(target.spec),
            settings=self._tool.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                quiet=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluations/*", step_metric="version")

    def send(self, entry: Entry) -> None:
        values: dict[str, Any] = {entry.axis: entry.at, **entry.scalars}
        if entry.rollouts:
            # A table would be an artifact, for which the call asks the server, and can fail.
            values["rollouts"] = self._tool.Html("<hr>".join(map(_html_rollout, entry.rollouts)))
        self._run.log(values, step=entry.number, commit=True)

    def flush(self) -> None:
        """Wait until wandb's own process, which outlives this one, has everything."""
        self._run.summary.get("step")  # it answers in order

    def close(self) -> None:
        self._run.finish()


def _html_rollout(row: Mapping[str, Any]) -> str:
    """Return a rollout as HTML in which nothing of the model's own is HTML."""
    known = ((key, value) for key, value in row.items() if value is not None)
    return "".join(
        f"<p>{escape(key)}</p><pre>{escape(value)}</pre>"
        if isinstance(value, str)
        else f"<p>{escape(key)} {value}</p>"
        for key, value in known
    )


SCRIPT = Path(__file__).with_name("trackio_script.py")
_MOST_BYTES = 64 * 1024
"""Of an answer."""


class Trackio:
    """A run of trackio in its local database, whose name is the record's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, target: Target) -> None:
        setting = target.setting
        if setting.python is None:
            raise RunStopped(
                "trackio needs an environment of its own",
                place=f"monitors.{setting.name}.python",
                remedy="name its interpreter; `make trackio` makes .venv/trackio/bin/python",
            )
        target.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process = subprocess.Popen(
                # Isolated: neither PYTHONPATH nor this folder is searched for modules.
                [str(expand_user(Path(setting.python))), "-I", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TRACKIO_DIR": str(target.folder)},
            )
        except OSError as error:
            raise RunStopped(
                f"cannot start {setting.python}: {error.strerror}",
                place=f"monitors.{setting.name}.python",
                remedy="name the interpreter of trackio's environment (`make trackio`)",
            ) from error
        self._ask(project=setting.project, run=target.record, config=target.spec)

    def send(self, entry: Entry) -> None:
        figures = {entry.axis: entry.at, **entry.scalars}
        self._tell(at=entry.at, figures=figures, rollouts=list(entry.rollouts))

    def flush(self) -> None:
        self._ask(flush=True)  # answered once the database has what was sent

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()  # the end of its input ends it

    def _tell(self, **message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "start comes first"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _ask(self, **message: Any) -> None:
        self._tell(**message)
        assert self._process is not None and self._process.stdout is not None, "start comes first"
        if not self._process.stdout.readline(_MOST_BYTES):
            raise UserError(
                f"its script ended with exit code {self._process.wait()}",
                place=str(SCRIPT),
                remedy="the lines above are its own",
            )
