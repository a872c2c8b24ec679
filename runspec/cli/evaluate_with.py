"""`runspec evaluate --with`: another project's evaluation tool asks a model that is served here.

The tool runs in an environment of its own, since its packages rule out ours, and speaks HTTP.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.model_files import TOKENIZER_NAMES
from runspec.cli.serve import (
    HOST,
    await_server,
    end_group,
    free_port,
    link_files,
    served,
    serving,
)
from runspec.core.errors import BadUsage, UserError
from runspec.core.evaluation_tools import KEY_VARIABLE, Asked, EvaluationTool, evaluation_tool
from runspec.local.backend import StopSignals, last_lines

LOG_NAME = "tool.log"
_LOOK_S = 0.2


def results_with(
    what: str,
    tool: str,
    python: Path | None,
    task: str | None,
    more: Sequence[str],
    out: Path | None,
    runs_dir: Path,
) -> dict[str, Any] | None:
    """Return the results by task as `runspec evaluate` prints them; None if it was interrupted.

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
    found = served(what, runs_dir)
    with ExitStack() as up:
        stops = up.enter_context(StopSignals())
        folder = Path(up.enter_context(tempfile.TemporaryDirectory(prefix="runspec-with-")))
        link_files(found.folder, folder / "tokenizer", only=TOKENIZER_NAMES)
        port, log = free_port(), folder / "server.log"
        server = up.enter_context(serving(found, HOST, port, log=log))
        await_server(server, port, log, stops)
        if stops():
            return None
        (out := (out or folder / "out").absolute()).mkdir(parents=True)
        asked = Asked(
            # Not resolved: the interpreter of an environment is a link, which says where it is.
            python=python.absolute(),
            url=f"http://{HOST}:{port}/v1",
            model=found.names[-1],
            tokenizer=folder / "tokenizer",
            context=found.context,
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
                time.sleep(_LOOK_S)
        finally:
            if process.poll() is None:
                end_group(process)
    if stops():
        return False
    if server.poll() is not None:
        said = "\n".join(last_lines(server_log, 20))
        raise UserError(f"the server ended with exit code {server.poll()}\n{said}", place="vLLM")
    if process.returncode != 0:
        said = "\n".join(last_lines(log, 20))
        raise UserError(
            f"exit code {process.returncode}\n{said}",
            place=Path(command[0]).name,
            remedy="the lines above say why",
        )
    return True
