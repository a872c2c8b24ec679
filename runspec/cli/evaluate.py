"""`runspec evaluate`: a run's version, or any Hugging Face directory, on rows or on a suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from runspec import cli
from runspec.cli import serve
from runspec.cli.evaluation_suites import bare_spec, named_suite, rows_suite, suite_spec
from runspec.core.entry_points import KEY_VARIABLE, Asked, EvaluationTool, evaluation_tool
from runspec.core.errors import BadUsage, UserError, number, one_line
from runspec.core.models import TOKENIZER_NAMES
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.schema.role_names import evaluator_pool
from runspec.local.backend import EXIT_INTERRUPTED, StopSignals, last_lines
from runspec.local.machine import vllm_environment


def evaluate_command(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME|FILE", help="Else the run's own evaluations."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Rows to ask, also of a shipped suite.")
    ] = None,
    overrides: cli.Overrides = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, metavar="N", help="Prints N answers.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Names problems that the run trains on.")
    ] = False,
    tool: Annotated[
        str | None, typer.Option("--with", metavar="TOOL", help="inspect-ai, lm-eval or verifiers.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="Interpreter of the tool's environment.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="The tool's task; its options follow --.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder for the tool's files.")
    ] = None,
    as_json: cli.Json = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Evaluate and print the figures; return the exit code.

    Raises:
        BadUsage: an option of the other way to evaluate is given.
        UserError: the weights are missing or damaged, or the suite has errors.
    """
    theirs = {"--python": python, "--task": task, "--out": out, "options after --": context.args}
    ours: dict[str, object] = {"--suite": suite, "--data": data, "--set": overrides}
    ours |= {"--overlap": overlap, "--samples": samples}
    if wrong := [name for name, value in (ours if tool else theirs).items() if value]:
        how = "beside --with" if tool else "without --with"
        raise BadUsage(f"{wrong[0]} {how}", remedy="see `runspec evaluate --help`")
    found: dict[str, Any] | None
    if tool is None:
        more = ["--samples", str(samples or _UNSOLVED), *(["--overlap"] if overlap else [])]
        found = evaluate_suite(what, suite, data, overrides or (), runs_dir, more)
    else:
        found = evaluate_with(what, tool, python, task, context.args, out, runs_dir)
    if found is None:
        return EXIT_INTERRUPTED
    print_results(found, as_json=as_json, samples=samples is not None)
    return 0


def evaluate_suite(
    what: str,
    suite: str | None,
    data: Path | None,
    overrides: Sequence[str],
    runs_dir: Path,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate on rows or a suite; return the result by evaluation.

    Args:
        what: NAME, NAME@VERSION, or a Hugging Face directory.
        suite: name of a shipped suite, or a file; None: the run's own evaluations.
        data: the problems of a shipped suite; without a suite, rows of the run's format.
        overrides: `path=value` each, over the suite.
        runs_dir: folder of runs.
        more: options of `python -m sampler suite`.

    Raises:
        UserError: the weights are missing or damaged, or rows or suite have errors.
    """
    with tempfile.TemporaryDirectory(prefix="runspec-evaluate-") as folder:
        model = serve.served(what, runs_dir)
        weights = model.folder
        if model.spec is None or model.manifest is None:
            base = bare_spec(weights, model.pool.max_model_len)
        else:
            from bridge.model_files import require_published  # draws numpy

            require_published(weights, model.manifest)
            base = model.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        own = {each["name"] for each in base.get("evaluations", ())}
        file: Path | None = None
        if suite is not None:
            file, where = named_suite(suite, data, Path(folder))
            overrides = [*where, *overrides]
        elif data is not None:
            file = rows_suite(base, data, Path(folder))
        elif not own:
            remedy = "ask rows with --data ROWS.jsonl, or name a --suite"
            raise UserError("no evaluation", place=what, remedy=remedy)
        spec = suite_spec(base, file, overrides, Path(folder))
        names = [each.name for each in spec.evaluations if file is None or each.name not in own]
        if not names:
            raise UserError("no evaluation", place=suite or what, remedy="give it `evaluations`")
        return _evaluated(spec, weights, names, Path(folder), more)


def _evaluated(
    spec: RunSpec, weights: Path, names: Sequence[str], folder: Path, more: Sequence[str]
) -> dict[str, Any]:
    resolved, out = folder / "spec.json", folder / "result.json"
    resolved.write_bytes(dump_resolved(spec))
    command = [sys.executable, "-m", "sampler", "suite", str(resolved), str(weights)]
    command += ["--out", str(out), *(word for name in names for word in ("--evaluation", name))]
    pool = evaluator_pool(spec)
    on_cpu = pool.hardware.kind == "cpu"
    environment = vllm_environment((), on_cpu=on_cpu, tensor=pool.parallel.tensor)
    # The process reads rows before it forks, so it may have no threads. It ends without taking its
    # engine apart, which multiprocessing would remark on.
    quiet = {"PYTHONWARNINGS": "ignore:resource_tracker"}
    environment = quiet | dict(os.environ) | environment | {"TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*command, *more], env=environment, check=False)
    if done.returncode != 0 or not out.exists():
        raise UserError(
            f"the evaluation ended with exit code {done.returncode}",
            place=str(weights),
            remedy="the lines above say why",
        )
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


_UNSOLVED = 3
"""Answers that are printed where none is right."""


def print_results(found: Mapping[str, Any], *, as_json: bool, samples: bool = False) -> None:
    """Print results by evaluation, with answers if `samples` is true or all of them got 0."""
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console(markup=False, highlight=False)
    for name, result in found.items():
        table = cli.plain_table("figure", "mean", "95 % interval")
        for figure, (value, low, high) in result["figures"].items():
            between = "" if low is None else f"{number(low)} to {number(high)}"
            table.add_row(figure, number(value), between)
        count = result["count"] if "count" in result else len(result["problems"])
        print(f"{name}: {count} problems, {result['faults']} without a grade")
        if unanswered := result.get("unanswered"):
            print(f"  {unanswered} outputs have no answer in the form of data.thinking")
        console.print(table)
        if samples or result["figures"].get("mean", [None])[0] == 0:
            for one in result.get("samples", ()):
                asked, reason = one_line(one["problem_id"], 200), one_line(one["reason"], 400)
                print(f"  {asked}: reward {number(one['reward'])}{', ' if reason else ''}{reason}")
                print(f"    asked  {one_line(one['prompt'], 400)}")
                print(f"    output {one_line(one['output'], 400)}")
        for one in result.get("overlap", ()):
            how = "the same words as" if one["exact"] else "13 words in a row of"
            asked, trained = (one_line(one[name], 200) for name in ("problem_id", "trained"))
            print(f"  {asked} has {how} {trained}, which is trained on")
        if result.get("overlap") == []:
            print("  no problem overlaps the training problems")


LOG_NAME = "tool.log"


def evaluate_with(
    what: str,
    tool: str,
    python: Path | None,
    task: str | None,
    more: Sequence[str],
    out: Path | None,
    runs_dir: Path,
) -> dict[str, Any] | None:
    """Evaluate by another project's tool; return its result by task, or None if interrupted.

    The tool runs in an environment of its own, since its packages rule out ours, and speaks HTTP to
    a model that is served here.

    Args:
        what: NAME, NAME@VERSION, or a Hugging Face directory.
        tool: name of an adapter.
        python: the interpreter of the tool's environment.
        task: in the tool's own terms.
        more: further options of the tool.
        out: a new folder that keeps the tool's files; None keeps none.
        runs_dir: folder of runs.

    Raises:
        BadUsage: an argument is missing.
        UserError: the model cannot be served, or the tool fails.
    """
    adapter = evaluation_tool(tool)
    if python is None or not python.is_file():
        raise BadUsage(
            "its environment is not named" if python is None else f"there is no {python}",
            place=f"--with {tool}",
            remedy="--python ENV/bin/python; docs/evaluation.md says how to make one",
        )
    if task is None:
        raise BadUsage("no task", place=f"--with {tool}", remedy="--task TASK")
    if out is not None and out.exists():
        raise BadUsage("is there already", place=str(out), remedy="name a new folder")
    found = serve.served(what, runs_dir)
    with ExitStack() as up:
        stops = up.enter_context(StopSignals())
        folder = Path(up.enter_context(tempfile.TemporaryDirectory(prefix="runspec-with-")))
        serve.link_files(found.folder, folder / "tokenizer", only=TOKENIZER_NAMES)
        port, log = serve.free_port(), folder / "server.log"
        server = up.enter_context(serve.serving(found, serve.HOST, port, log=log))
        serve.await_server(server, port, log, stops)
        if stops():
            return None
        (out := (out or folder / "out").absolute()).mkdir(parents=True)
        asked = Asked(
            # Not resolved: the interpreter of an environment is a link, which says where it is.
            python=python.absolute(),
            url=f"http://{serve.HOST}:{port}/v1",
            model=found.names[-1],
            tokenizer=folder / "tokenizer",
            context=found.pool.max_model_len,
            task=task,
            out=out,
            more=more,
        )
        begun = time.monotonic()
        if not run_tool(adapter, asked, server, log, stops):
            return None
        wall_s = round(time.monotonic() - begun, 3)
        measured = adapter.measured(out)
    return {name: asdict(each) | {"wall_s": wall_s} for name, each in measured.items()}


def run_tool(
    adapter: EvaluationTool,
    asked: Asked,
    server: subprocess.Popen[bytes],
    server_log: Path,
    stops: StopSignals,
) -> bool:
    """Run the tool; return False if it was interrupted. It ends with the server.

    Raises:
        UserError: it failed, or the server ended.
    """
    command = adapter.command(asked)
    path = f"{asked.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    log = asked.out / LOG_NAME
    with log.open("wb") as stdout:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PATH": path, KEY_VARIABLE: "none"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,  # ours is for the figures
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"cannot be started: {error}",
                place=str(asked.python.parent),
                remedy="install the tool's list of requirements/ there",
            ) from error
        try:
            while process.poll() is None and server.poll() is None and not stops():
                time.sleep(serve.LOOK_S)
        finally:
            if process.poll() is None:
                serve.end_group(process)
    if stops():
        return False
    if server.poll() is not None:
        raise serve.server_failed(f"ended with exit code {server.poll()}", server_log)
    if process.returncode != 0:
        said = "\n".join(last_lines(log, 20))
        raise UserError(
            f"exit code {process.returncode}\n{said}",
            place=Path(command[0]).name,
            remedy="the lines above say why",
        )
    return True
