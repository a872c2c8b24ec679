"""`python -m sampler solve-rates`: measures how often a model solves problems, and writes Parquet.

It samples every problem a few times and counts the solved tries. Progress is written to disk line
by line, so a killed measurement continues.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.errors import UserError
from runspec.core.files import atomic_file, read_bounded
from runspec.core.process import run_role, stop_event
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles, load_layers
from runspec.core.schema.lock_file import pin_model
from runspec.core.schema.source_files import whole_uri
from sampler.engine.arguments import find_pool
from sampler.evaluation.ask import SOLVED, Questions, answered
from sampler.tasks.task_set import RunTask, build_task_set
from verify.plugins import TaskSet

if TYPE_CHECKING:
    from sampler.engine.engine import Engine

MAX_BYTES = 1 << 30
_LOG_EVERY_S = 5.0


@dataclass(frozen=True)
class Tries:
    """Number of tries of one problem, and of solved ones."""

    index: int
    """Index of the problem in the task set."""
    solved: int
    """Tries with a task reward of 1 or more."""
    graded: int
    """Tries that were graded; a fault of a grader leaves a try out."""

    @property
    def rate(self) -> float | None:
        """Share of solved tries; None if no try could be graded."""
        return self.solved / self.graded if self.graded else None


class Progress:
    """Progress file: what is measured, then one line for each problem. It has one writer."""

    def __init__(self, path: Path, file: BinaryIO, done: dict[int, Tries]) -> None:
        self._path, self._file = path, file
        self.done = done
        """Tries by index of the problem."""

    def add(self, tries: Iterable[Tries]) -> None:
        """Store more problems; they are on disk when this returns.

        Raises:
            UserError: they cannot be written.
        """
        with _said(self._path):
            for one in tries:
                self.done[one.index] = one
                self._file.write(json.dumps(asdict(one)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def open_progress(path: Path, about: Mapping[str, object]) -> Iterator[Progress]:
    """Continue a measurement, or start one.

    Args:
        path: of the progress file.
        about: all that the solve rates depend on.

    Raises:
        UserError: the file belongs to another measurement, or cannot be read or written.
    """
    head = json.dumps(about, sort_keys=True).encode()
    with _said(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = read_bounded(path, MAX_BYTES) if path.exists() else b""
        whole = data.rfind(b"\n") + 1  # a killed process may leave half a line
        lines = data[:whole].splitlines()
        if lines and lines[0] != head:
            raise UserError(
                "this is the progress of a measurement with another model, data or settings",
                place=str(path),
                remedy="use the same model, data and settings, or delete the file to start again",
            )
        try:
            found = [Tries(**json.loads(line)) for line in lines[1:]]
        except (ValueError, TypeError) as error:
            raise UserError(
                f"damaged: {error}", place=str(path), remedy="delete the file to start again"
            ) from error
        file = path.open("r+b" if lines else "wb")
    with file:
        file.truncate(whole)
        file.seek(whole)
        if not lines:
            file.write(head + b"\n")
        yield Progress(path, file, {one.index: one for one in found})


@contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot store the progress: {error.strerror or error}",
            place=str(path),
            remedy="free disk space or fix the permissions; the same command continues",
        ) from error


def measure(
    asked: Questions,
    engine: Engine,
    progress: Progress,
    log: logging.Logger,
    stop: threading.Event,
) -> bool:
    """Measure the problems that `progress` lacks; the engine stays full while answers are graded.

    Returns:
        Whether all are measured; False if `stop` was set.

    Raises:
        UserError: the engine died, or nothing can be graded here.
    """
    begun = said = time.monotonic()
    before = sum(index < asked.count for index in progress.done)
    left = (index for index in range(asked.count) if index not in progress.done)
    for found in answered(asked, engine, left, stop):
        graded = {index: [r for r in one.rewards if r is not None] for index, one in found.items()}
        progress.add(
            Tries(index, sum(reward >= SOLVED for reward in rewards), len(rewards))
            for index, rewards in graded.items()
        )
        done = [one.rate for one in progress.done.values() if one.index < asked.count]
        missing, now = asked.count - len(done), time.monotonic()
        if now - said >= _LOG_EVERY_S or not missing:
            said = now
            rates = [rate for rate in done if rate is not None]
            log.info(
                "%d of %d problems, mean solve rate %.3f, %d without one; about %.0f s left",
                *(len(done), asked.count, sum(rates) / max(1, len(rates)), len(done) - len(rates)),
                missing * (now - begun) / max(1, len(done) - before),
            )
    return all(index in progress.done for index in range(asked.count))


_GROUP_ROWS = 1000
_REMEDY = "free disk space or fix the permissions; the same command continues"
METADATA = b"runspec.solve_rates"
"""Metadata key of the file's schema for what was measured: model, settings, data."""
_TEXTS = ("problem_id", "task_type", "prompt", "verification_info")
NAME = "solve-rates"
DEFAULT_FIELD = "solve_rate"


def add_command(commands: Any) -> None:
    """Add `solve-rates` to what `add_subparsers` returned."""
    parser = commands.add_parser(
        NAME,
        help="measure how often a model solves the problems of a source",
        description="Samples every problem of a source a few times with a model, grades the "
        "answers as the run does, and writes the rows with their solve rate. If it is killed, the "
        "same command continues where it stopped.",
    )
    parser.set_defaults(call=run)
    parser.add_argument("spec", type=Path, metavar="SPEC", help="names sources, prompts, rewards")
    parser.add_argument("--source", required=True, metavar="NAME", help="of data.sources")
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR", help="Hugging Face files or a version"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.parquet")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="tries a problem (8)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N problems")
    parser.add_argument("--pool", metavar="NAME", help="how to sample; default: the first pool")
    parser.add_argument("--field", metavar="NAME", help="column to write; default: solve_rate's")
    parser.add_argument("--profile", metavar="NAME", help="overlay of the spec")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="over the spec"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    return run_role(NAME, lambda log: _measure(options, log))


def _measure(options: argparse.Namespace, log: logging.Logger) -> None:
    stop = stop_event()
    out: Path = options.out
    if out.exists():
        raise UserError(
            "the file exists already", place=str(out), remedy="name another file in --out"
        )
    if options.samples < 1 or (options.limit is not None and options.limit < 1):
        raise UserError("--samples and --limit must be at least 1")
    files = SpecFiles(options.spec, profile=options.profile, overrides=tuple(options.set))
    spec = only_source(load_layers(files).require(), options.source, options.spec.parent)
    pool = find_pool(spec, options.pool or spec.samplers[0].name)
    rate = next(s for s in spec.data.sources).solve_rate
    field = options.field or (rate.field if rate else DEFAULT_FIELD)
    with closing(build_task_set(unfiltered(spec), options.model)) as tasks:
        problems = min(len(tasks), options.limit or len(tasks))
        seed = ("solve rates", spec.seed)
        asked = Questions(tasks, pool, options.samples, problems, seed, targets=())
        about = _about(spec, tasks, asked, options.model)
        progress_path = out.with_name(f"{out.name}.progress")
        with open_progress(progress_path, about) as progress:
            if progress.done:
                log.info("continuing after %d problems", len(progress.done))
            if any(index not in progress.done for index in range(problems)):
                from sampler.engine.engine import Engine  # its import takes seconds

                # The only version is loaded once, so weights never change in flight.
                pool = pool.model_copy(update={"in_flight_updates": False})
                with closing(Engine(pool, probe=False)) as engine:
                    engine.load(options.model, 0)
                    log.info("%d tries of %d problems", asked.samples, asked.count)
                    if not measure(asked, engine, progress, log, stop):
                        log.info("stopped after %d problems", len(progress.done))
                        return
            done = {index: one for index, one in progress.done.items() if index < problems}
            write_rows(out, tasks, done, field=field, about=about)
        progress_path.unlink()
        solved, graded = (sum(getattr(t, n) for t in done.values()) for n in ("solved", "graded"))
        log.info("wrote %d rows with %s to %s", len(done), field, out)
        log.info("%d of %d graded tries are right: %.3f", solved, graded, solved / max(graded, 1))


def only_source(spec: RunSpec, name: str, folder: Path) -> RunSpec:
    """Return the spec with one of its sources, whose file paths are relative to `folder`.

    Raises:
        UserError: it has no such source.
    """
    found = [source for source in spec.data.sources if source.name == name]
    if not found:
        raise UserError(
            f"no source {name!r}; there are {', '.join(s.name for s in spec.data.sources)}",
            place="data.sources",
        )
    source = found[0]
    if source.uri is not None:
        source = source.model_copy(update={"uri": whole_uri(source.uri, folder)})
    data = spec.data.model_copy(update={"sources": [source]})
    return spec.model_copy(update={"data": data})


def unfiltered(spec: RunSpec) -> RunSpec:
    """Return the spec without filters of problems, except the limit on the prompt."""
    sources = [s.model_copy(update={"solve_rate": None}) for s in spec.data.sources]
    data = spec.data.model_copy(update={"sources": sources})
    return spec.model_copy(update={"data": data, "warm_start": None})


def _about(spec: RunSpec, tasks: RunTask, asked: Questions, model: Path) -> dict[str, object]:
    """Return everything that the rates depend on, except the number of problems, which may grow."""
    try:
        pins = pin_model(model)
    except OSError as error:
        raise UserError(f"cannot read the model: {error}", place=str(model)) from error
    shown = ("max_prompt_tokens", "length_prompt_role", "system_prompt", "think_prefill")
    return {
        "model": {name: pin.model_dump() for name, pin in pins.items()},
        "data": tasks.data_digest,
        "source": unfiltered(spec).data.sources[0].model_dump(exclude={"uri"}),
        "prompts": spec.data.model_dump(include=set(shown)),
        "targets": tasks.targets,
        "reward": [reward.model_dump() for reward in spec.reward],
        "samples": asked.samples,
        "seed": spec.seed,
        "max_new_tokens": asked.pool.max_new_tokens,
        "dtype": asked.pool.dtype,
        "quantization": asked.pool.quantization,
        "sampling": asked.pool.sampling.model_dump(exclude={"seeded"}),
    }


def write_rows(
    path: Path,
    tasks: TaskSet,
    tries: Mapping[int, Tries],
    *,
    field: str,
    about: Mapping[str, object],
) -> None:
    """Write problem_id, task_type, prompt, verification_info and the rate, in the problems' order.

    The file appears complete or not at all.

    Args:
        path: of the Parquet file.
        tasks: the problems.
        tries: by index of the problem; only these problems are written.
        field: column of the solve rate; null if no try could be graded.
        about: stored in the file's metadata.

    Raises:
        UserError: it cannot be written.
    """
    texts = [(name, pa.string()) for name in _TEXTS]
    schema = pa.schema(
        [*texts, (field, pa.float64())],
        metadata={METADATA: json.dumps(about, sort_keys=True).encode()},
    )

    def row(index: int) -> dict[str, Any]:
        problem = tasks.problem(index)
        info = json.dumps(dict(problem.verification), ensure_ascii=False)
        texts = (problem.problem_id, problem.task_type, problem.prompt, info)
        return {**dict(zip(_TEXTS, texts, strict=True)), field: tries[index].rate}

    rows = map(row, sorted(tries))
    with (
        atomic_file(path, remedy=_REMEDY) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
