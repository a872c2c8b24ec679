"""A volunteer's machine: which pools of a run it can serve, and its worker process.

A worker is one replica of a pool. What a pool needs is compared with `Facts`, what was seen of the
machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runspec.core.entry_points import NO_TPU_SAMPLER, Kind, extra_of, install_command
from runspec.core.errors import UserError, reported, size
from runspec.core.models import ModelConfig
from runspec.core.process import SUPERVISOR, Endpoints, save_endpoints
from runspec.core.schema import RunSpec, SamplerPool
from runspec.core.schema.source_files import missing_plugins
from runspec.estimate.broadcast import version_size
from runspec.estimate.fit import Unfit, fitted
from runspec.estimate.speed import sampler_memory
from runspec.local.machine import BUILDS, Facts, alike, thread_limits, vllm_environment
from runspec.local.preflight import ROLE_MODULES, STORED_VERSIONS, Missing
from runspec.local.run_dir import write_spec

ROOM_BYTES = 1 << 30
"""Disk for the log, and the engine's own files."""


def served(
    pool: SamplerPool, spec: RunSpec, config: ModelConfig | None, facts: Facts
) -> SamplerPool | Unfit:
    """Return a pool as this machine's devices serve it, or why they do not: see `fit.fitted`.

    Of devices of several kinds, it has those that are most.
    """
    if pool.hardware.kind == "cpu":
        return pool
    tried = [fitted(pool, spec, config, devices) for devices in alike(facts, pool.hardware)]
    fits = [each for each in tried if isinstance(each, SamplerPool)]
    none = f"{pool.hardware.kind} wanted or alike; no such device here"
    return next(iter([*fits, *tried]), Unfit(f"samplers.{pool.name}.hardware", none))


def divided(pool: SamplerPool) -> str:
    """How a pool's replica is divided here, for the volunteer; empty for one device."""
    tensor, copies, kind = pool.parallel.tensor, pool.parallel.data, pool.hardware.kind
    engines = "1 engine" if copies == 1 else f"{copies} engines"
    return "" if kind == "cpu" else f" with {engines} of {tensor} x {kind}"


def lacks(
    pool: SamplerPool,
    spec: RunSpec,
    config: ModelConfig | None,
    facts: Facts,
    folder: Path,
    data_bytes: int = 0,
) -> list[Missing]:
    """Return what the machine lacks to serve a pool; empty where it can.

    Args:
        pool, spec: of the run.
        config: the model's shape; None where nothing here knows it: then its size is not checked.
        facts: of the machine.
        folder: where the versions will lie.
        data_bytes: of the problems' files that are still to be fetched.
    """
    found = [*_build(pool, facts)]
    if isinstance(here := served(pool, spec, config, facts), Unfit):
        found.append(Missing(here.path, here.reason))
    found += [Missing(each.path, str(each), each.remedy) for each in missing_plugins(spec)]
    if config is None:
        return found
    if pool.hardware.kind == "cpu":
        found += _main_memory(pool, spec, config, facts)
    free = facts.free_bytes(folder.absolute())
    needed = STORED_VERSIONS * version_size(spec, config).whole + data_bytes + ROOM_BYTES
    if needed > free:
        thing = f"{size(needed)} of disk for {STORED_VERSIONS} versions and the data"
        remedy = "free some, or name a directory on another disk"
        found.append(Missing("--dir", f"{thing}; {size(free)} free", remedy))
    return found


def open_pools(spec: RunSpec) -> list[SamplerPool]:
    """The pools that a machine may ask for without an invite and without a key of the run's own.

    Raises:
        UserError: there are none.
    """
    pools = [pool for pool in spec.samplers if pool.trust == "untrusted"]
    if not pools:
        raise UserError(
            "every pool of the run is trusted: those take only invited keys, and the run's own",
            place="join",
            remedy="ask for a link with an invite; with a key of the run's own, give --pool",
        )
    return pools


def choose_pool(found: Mapping[str, Sequence[Missing]], asked: str | None) -> str:
    """The first pool that the machine fits, or the one that was asked for.

    Args:
        found: `lacks` of each pool, in the order of the spec.
        asked: `--pool`.

    Raises:
        UserError: it fits none, or not that one; the message names what is missing.
    """
    if asked is not None and asked not in found:
        raise UserError(
            f"no sampler pool {asked!r}", place="--pool", remedy=f"the spec has: {', '.join(found)}"
        )
    wanted = [asked] if asked is not None else list(found)
    for name in wanted:
        if not found[name]:
            return name
    lines = [
        f"{missing.path}: {missing.thing}" + (f" ({missing.remedy})" if missing.remedy else "")
        for name in wanted
        for missing in found[name]
    ]
    raise UserError(
        "this machine fits no pool of the run:\n  " + "\n  ".join(lines),
        place="join",
        remedy="mend one of these, or join a run with a pool for such a machine",
    )


def _build(pool: SamplerPool, facts: Facts) -> Iterator[Missing]:
    kind = pool.hardware.kind
    if kind.startswith("tpu"):
        remedy = "sample on CPUs or GPUs"
        yield Missing(f"samplers.{pool.name}.hardware.kind", NO_TPU_SAMPLER, remedy)
        return
    where: Kind = "cpu" if kind == "cpu" else "cuda"
    path = f"samplers.{pool.name}.engine"
    install = install_command(extra_of("sampler", where))
    if absent := [name for name in ROLE_MODULES["sampler"] if not facts.has_module(name)]:
        yield Missing(path, f"Python packages not installed: {', '.join(absent)}", install)
    elif BUILDS[where] not in facts.builds:
        others = ", ".join(facts.builds) or "none that is known"
        yield Missing(path, f"vLLM for {kind} is {BUILDS[where]}; installed: {others}", install)


def _main_memory(
    pool: SamplerPool, spec: RunSpec, config: ModelConfig, facts: Facts
) -> Iterator[Missing]:
    needed = sampler_memory(pool, spec, config)
    wanted = needed.weights + needed.activations + (needed.room or 0.0)
    have = facts.memory()
    if have is not None and wanted > have:
        yield Missing(
            f"samplers.{pool.name}.max_model_len",
            f"{size(wanted)} of main memory for weights ({size(needed.weights)}), activations, "
            f"keys and values; {size(have)} here",
        )


LOG_FILE = "worker.log"
LEAVE_S = 15.0
"""How long the worker may take to leave before it is killed."""
# Time, level and role before the message, as `runspec.core.process.setup_logging` writes them.
_LOGGED = re.compile(r"^\S+ \S+ ([A-Z]) (?:sampler )?\S+ (.*)$")
_WORTH_TELLING = re.compile(r"version \d+ loaded|fetching|loading vLLM|the run is finished|stopped")


class Worker:
    """A worker process, the lines of its log that the volunteer is shown, and its end.

    Args:
        spec: of the run, with its root key.
        endpoints: of its coordinator, relays and origin.
        key: file of the volunteer's key.
        folder: keeps its versions, the problems' files and its log.
        pool: that it serves.
        cores: that it may use.
        tell: called with each line for the volunteer, without time and role, from a thread.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(
        self,
        spec: RunSpec,
        endpoints: Endpoints,
        key: Path,
        folder: Path,
        pool: SamplerPool,
        cores: Sequence[int],
        tell: Callable[[str], None],
    ) -> None:
        path = folder / LOG_FILE
        remedy = "free disk space, mend the permissions, or name another --dir"
        with reported("cannot write the worker's log", path, remedy, OSError):
            self._log = path.open("ab", buffering=0)
            write_spec(spec, folder, ())
            save_endpoints(folder, endpoints)
        self._tell = tell
        self.last_error = ""
        """The last error that it logged."""
        on_cpu, tensor = pool.hardware.kind == "cpu", pool.parallel.tensor
        environment = thread_limits(cores) | vllm_environment(cores, on_cpu=on_cpu, tensor=tensor)
        # In a session of its own, so that a Ctrl-C in the terminal reaches it only through us.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runspec.role", pool.name, str(folder), "--key", str(key)],
            env={**os.environ, **environment, SUPERVISOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="log", daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end, no longer than `timeout_s` seconds; whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout_s)
        return True

    def leave(self) -> None:
        """Asks it to submit finished groups and to return its other leases."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it, and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(OSError):  # a full disk: what matters is told below
                self._log.write(line)
            found = _LOGGED.match(line.decode(errors="replace").rstrip("\n"))
            if found is None:
                continue
            level, message = found.groups()
            if level in "EC":
                self.last_error = message
            if level in "WEC" or _WORTH_TELLING.match(message):
                self._tell(message)
