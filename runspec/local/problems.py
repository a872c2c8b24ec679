"""Has the problems of a run read, and its graders tried, by `python -m sampler check`.

The documents of a run that samples nothing are opened by `python -m learner_jax check`.

    checked = check_problems(spec, this_machine(), say=print)
    checked.lacking          # what would end the run; empty where it can start

The plug-ins are imported there: runspec imports none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from runspec.core.files import read_bounded
from runspec.core.process import SUPERVISOR
from runspec.core.spec.resolved import FILE_NAME, dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.children import last_lines
from runspec.local.machine import Machine, find_files, module_is_installed
from runspec.local.planning import RunPlan
from runspec.local.preflight import Missing
from runspec.local.supervisor import describe_exit

SILENCE_S = 300.0
"""Longest time without a line in its log, in seconds: a plug-in may be slow to import, and rows are
reported every five seconds."""
SHOWN_AFTER_S = 3.0
"""Seconds after which its progress is shown."""
MODULES = ("sampler", "numpy", "tokenizers", "pyarrow")
"""Packages that the check imports."""
_INFORMS = " I check "
"""Before what its log says at level INFO (`runspec.core.process.setup_logging`)."""
_LOG, _REPORT = "log", "report.json"
_POLL_S = 0.05
_MAX_REPORT_BYTES = 1 << 20
_LINES = 10


@dataclass(frozen=True)
class CheckedProblems:
    """The result of a check."""

    lacking: Sequence[Missing]
    notes: Sequence[str]
    """A line for each source: how many problems there are, and how many are left out."""


def absent_modules(is_installed: Callable[[str], bool] = module_is_installed) -> list[str]:
    """Packages that the check imports and this machine lacks."""
    return [name for name in MODULES if not is_installed(name)]


def with_problems(plan: RunPlan, machine: Machine, say: Callable[[str], None]) -> RunPlan:
    """The plan, with what its problems and graders lack, for a run that is new or changed.

    Not looked at where something else is lacking, or the packages that read problems; nor in a run
    that is alive or goes on as it was: its problems were read when it was started.
    """
    as_it_was = plan.held_by is not None or not (plan.new or plan.changes)
    if plan.lacking or as_it_was or absent_modules():
        return plan
    checked = check_problems(plan.spec, machine, say)
    for note in checked.notes if not checked.lacking else ():
        say(note)
    return replace(plan, lacking=checked.lacking)


def check_problems(
    spec: RunSpec, machine: Machine, say: Callable[[str], None], *, silence_s: float = SILENCE_S
) -> CheckedProblems:
    """Reads every row of a run's sources and tries its graders, in a process of its own.

    Of documents it reads the first of each file; nothing grades them.

    Args:
        spec: with whole paths (`runspec.cli.spec_files.located`).
        machine: this one.
        say: called with a line of progress, once the check takes more than a few seconds.
        silence_s: longest time without a line in the log of the process, which is then ended.

    Returns:
        What the run lacks; where the process died or hung, that, with the last lines of its log.
    """
    found = find_files(spec.model, machine.env)
    tokenizer = found.model if spec.model.tokenizer is None else found.tokenizer
    with TemporaryDirectory(prefix="runspec-check-") as name:
        folder = Path(name)
        (folder / FILE_NAME).write_bytes(dump_resolved(spec))
        graded = spec.supervised is None
        role = "sampler" if graded else "learner_jax"
        command = machine.module(role, "check", str(folder))
        if graded and tokenizer is not None:
            command += ("--model", str(tokenizer))
        what = "problems" if graded else "documents"
        end = _run(command, folder, lambda line: say(f"reading the {what}: {line}"), silence_s)
        if end:
            lines = "".join(f"\n  | {line}" for line in last_lines(folder / _LOG, _LINES))
            thing = f"`python -m {role} check` {end}; its last lines:{lines}"
            cause = "plug-in" if graded else "file"
            died = Missing("data.sources", thing, f"mend the {cause} that they name")
            return CheckedProblems([died], [])
        told = json.loads(read_bounded(folder / _REPORT, _MAX_REPORT_BYTES))
        lacking = [Missing(each["place"], each["thing"], each["remedy"]) for each in told["faults"]]
        return CheckedProblems(lacking, told["notes"])


def _run(command: Sequence[str], folder: Path, say: Callable[[str], None], silence_s: float) -> str:
    """Runs the process, its report and its log in `folder`; says how it failed, or nothing."""
    log = folder / _LOG
    with (folder / _REPORT).open("wb") as report, log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=report,
            stderr=errors,
            env={**os.environ, SUPERVISOR: str(os.getpid()), "RUNSPEC_LOG_LEVEL": "INFO"},
            start_new_session=True,
        )
    started = heard = time.monotonic()
    said, size = "", 0
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if log.stat().st_size != size:
                size, heard = log.stat().st_size, now
            if now - heard > silence_s:
                return f"said nothing for {silence_s:.0f} s"
            line = _progress(log) if now - started > SHOWN_AFTER_S else ""
            if line not in ("", said):
                said = line
                say(line)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return describe_exit(process.returncode) if process.returncode else ""


def _progress(log: Path) -> str:
    """The newest step that the check has logged; empty where there is none."""
    told = [line.partition(_INFORMS)[2] for line in last_lines(log, _LINES)]
    return next((text for text in reversed(told) if text), "")
