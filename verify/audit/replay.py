"""Starts `python -m learner_jax replay` for an audit, as the program that trained was started."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from typing import IO, Any

from runspec.core.canonical import MalformedJson
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError, reported
from runspec.core.run_files import numbered, record_of, state_folder
from runspec.core.schema.load import load_resolved

Interval = tuple[int, int]
"""Numbers of the full states at the beginning and at the end of some steps."""
_SWITCH = re.compile(r"--xla_(?!force_host_)(?:(?!dump)[a-z0-9_])+=(?:true|false|[0-9]{1,9})")
"""Flags that a record may give to XLA: switches and levels. Others could make it write files."""

_MOST_THREADS = 4096


def replay(run_dir: Path, what: str, out: IO[str], *options: str) -> int:
    """Train intervals of a run again; a line is printed for each.

    Args:
        run_dir: the run directory.
        what: see `choose`.
        out: receives the lines.
        options: of `python -m learner_jax replay`.

    Returns:
        0 unless an interval is refuted or cannot be replayed.

    Raises:
        UserError: JAX is not installed, or the newest full state cannot be read.
    """
    if find_spec("jax") is None:
        remedy = install_command("learner")
        raise UserError(
            "a replay trains, and jax is not installed", place="--replay", remedy=remedy
        )
    states = state_folder(run_dir, load_resolved(run_dir))
    steps, cores = numbered(states, "step_"), os.sched_getaffinity(0)
    env, threads = dict[str, str](), len(cores)
    if steps:
        newest = states / f"step_{steps[-1]}"
        kinds = (OSError, MalformedJson, KeyError, TypeError, ValueError)
        with reported("not the record of a full state", newest, "see `verify audit`", *kinds):
            env, threads = environment(record_of(newest)["fingerprint"], threads)
    command = [sys.executable, "-m", "learner_jax", "replay", str(run_dir), what, *options]
    # A child has the cores of the process that starts it, from its first instruction on.
    os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        done = subprocess.run(command, env={**os.environ, **env}, stdout=out, check=False)
        return done.returncode
    finally:
        os.sched_setaffinity(0, cores)


def choose(
    what: str, known: Sequence[Interval], kept: Sequence[int], place: str, remedy: str
) -> list[Interval]:
    """Return the intervals that a command line names.

    Args:
        what: `A-B`, every interval between; `STEP`, the one that trains it; `sample:K`, K drawn at
            random.
        known: intervals that can be trained again, in order.
        kept: numbers of the full states, for the message.
        place, remedy: of the message.

    Raises:
        UserError: it is none of these, or no such interval is known.
    """
    kind, _, count = what.partition(":")
    with suppress(ValueError):
        if known and kind == "sample" and int(count) > 0:
            return sorted(SystemRandom().sample(known, min(int(count), len(known))))
        first, _, last = what.partition("-")
        begin, end = int(first), int(last or first)
        found = [(a, b) for a, b in known if a <= end and b > begin]
        if last:
            found = [(a, b) for a, b in known if begin <= a and b <= end]
        if found:
            return found
    raise UserError(
        f"{what!r} names no interval between the full states {', '.join(map(str, kept))} whose "
        "manifests and rollouts are there",
        place=place,
        remedy=remedy,
    )


def environment(made_on: Mapping[str, Any], cores: int) -> tuple[dict[str, str], int]:
    """Return what of its environment a CPU's bits depend on, and how many cores it has.

    Args:
        made_on: fingerprint of the program that wrote a full state; from anybody.
        cores: that are here.
    """
    if made_on["platform"] != "cpu":
        return {}, cores
    devices = math.prod(map(int, made_on["mesh"].values()))  # one process has them all
    flags = [flag for flag in map(str, made_on["xla_flags"]) if _SWITCH.fullmatch(flag)]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    threads = max(1, min(int(made_on["threads"]), cores))
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    if (pool := made_on["nproc"]) is not None:
        env["NPROC"] = str(min(int(pool), _MOST_THREADS))
    return env, threads
