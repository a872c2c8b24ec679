"""`runspec doctor`: looks at this machine, and at what a spec would lack here."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runspec.cli.spec_files import sound_spec
from runspec.core.distribution import LISTS, extra_of, install_command, list_command, machine_kind
from runspec.core.spec.load import SpecFiles
from runspec.local.children import birth
from runspec.local.endpoints import PORTS, port_is_free
from runspec.local.formatting import size
from runspec.local.machine import free_memory
from runspec.local.pool_fit import BUILDS, is_installed
from runspec.local.preflight import ROLE_MODULES, Facts, look, missing
from runspec.local.problems import absent_modules, check_problems
from runspec.local.run_dir import RUNS, run_directory
from runspec.lock.cache import model_cache

Verdict = Literal["ok", "warn", "fail"]

PYTHON = (3, 11)
LITTLE_MEMORY, NO_MEMORY = 8e9, 2e9
LITTLE_DISK, NO_DISK = 10e9, 1e9
FEW_FILES = 1024
_PORTS_TRIED = 20
_NAMED = 5
_TIME_ERROR = 5
"""Return value of adjtimex where the clock is not synchronised."""
_TIMEX_BYTES = 512
"""More than the kernel's struct timex."""
_DISTRIBUTIONS = {"orbax.checkpoint": ("orbax-checkpoint",), "vllm": tuple(BUILDS.values())}
EXIT_WELL, EXIT_NOT_WELL = 0, 1
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def check_machine(facts: Facts, runs_dir: Path) -> list[Check]:
    """Run the checks that need no spec and no network.

    A package or a device that only some roles need is a warning: which are needed, a spec says.

    Args:
        facts: what was seen of this machine.
        runs_dir: where runs lie or will lie.
    """
    return [
        _python(),
        _requirements(facts),
        *_packages(facts),
        _accelerators(facts),
        _cores(facts),
        _bytes("memory", free_memory(), LITTLE_MEMORY, NO_MEMORY, "close what else needs memory"),
        _bytes("disk", facts.free_bytes(runs_dir), LITTLE_DISK, NO_DISK, "use another --runs-dir"),
        _writable(runs_dir),
        _ports(),
        _open_files(),
        _clock(),
        _supervision(),
        _compiler(facts.machine.env),
        _models(facts.machine.env),
    ]


def _check(name: str, well: bool, found: str, remedy: str, otherwise: Verdict = "warn") -> Check:
    """A check that names a remedy where it is not well."""
    return Check(name, "ok", found) if well else Check(name, otherwise, found, remedy)


def _python() -> Check:
    here = ".".join(map(str, sys.version_info[:3]))
    remedy = f"{PYTHON[0]}.{PYTHON[1]} or newer is needed"
    return _check("python", sys.version_info[:2] >= PYTHON, here, remedy, "fail")


def _requirements(facts: Facts) -> Check:
    """The list of packages that fits this machine, with the command that installs it."""
    kind = machine_kind(facts.gpus, facts.tpus)
    found = f"{LISTS[kind].file} fits this machine ({kind})"
    if kind == "tpu":
        found += f"; {LISTS['tpu-sampler'].file} does where it only samples"
    builds = [name for name in BUILDS.values() if is_installed(name)]
    if not builds or BUILDS[kind] in builds:
        return Check("requirements", "ok", found, list_command(kind))
    found += f"; installed is {', '.join(builds)}, which is for other machines"
    return Check("requirements", "warn", found, list_command(kind))


def _packages(facts: Facts) -> Iterator[Check]:
    kind = machine_kind(facts.gpus, facts.tpus)
    for part, modules in ROLE_MODULES.items():
        found = {name: _version(name) if facts.has_module(name) else None for name in modules}
        absent = [name for name, number in found.items() if number is None]
        listed = ", ".join(f"{name} {number or 'missing'}" for name, number in found.items())
        remedy = f"the list above, or {install_command(extra_of(part, kind))}" if absent else ""
        yield Check(f"packages, {part}", "warn" if absent else "ok", listed, remedy)


def _version(module: str) -> str:
    for distribution in _DISTRIBUTIONS.get(module, (module,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _accelerators(facts: Facts) -> Check:
    found = [*facts.gpus, *([f"{facts.tpus} TPU chips"] if facts.tpus else [])]
    remedy = "small runs do without; else see that nvidia-smi lists the GPUs, /dev/accel* the TPUs"
    listed = ", ".join(found) or "none that a driver names"
    return _check("accelerators", bool(found), listed, remedy)


def _cores(facts: Facts) -> Check:
    count = len(facts.machine.cores)
    return _check("cores", count > 1, str(count), "learner and sampler will share it: allow two")


def _bytes(name: str, free: float | None, little: float, none: float, remedy: str) -> Check:
    if free is None:
        return Check(name, "warn", "the system does not say", remedy)
    verdict: Verdict = "fail" if free < none else "warn" if free < little else "ok"
    return Check(name, verdict, f"{size(free)} free", "" if verdict == "ok" else remedy)


def _writable(folder: Path) -> Check:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    well = os.access(folder, os.W_OK)
    found = f"{folder} {'can' if well else 'cannot'} be written"
    return _check("runs", well, found, "mend its permissions, or use another --runs-dir", "fail")


def _ports() -> Check:
    step = len(PORTS) // _PORTS_TRIED
    tried = PORTS[::step][:_PORTS_TRIED]
    free = sum(port_is_free("127.0.0.1", port) for port in tried)
    found = f"{free} of {len(tried)} tried in {PORTS.start}-{PORTS.stop - 1} are free"
    remedy = "end what holds them, or set placement.base_port"
    return _check("ports", free > 0, found, remedy, "fail")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    found, remedy = f"{soft} a process", f"`ulimit -n {FEW_FILES}` or more"
    well = unlimited or soft >= FEW_FILES
    return _check("open files", well, "unlimited" if unlimited else found, remedy)


def _clock() -> Check:
    """Signatures carry times, with five minutes of slack."""
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "adjtimex", None)
    answer = call(ctypes.create_string_buffer(_TIMEX_BYTES)) if call else -1
    if 0 <= answer < _TIME_ERROR:
        return Check("clock", "ok", "kept in step")
    said = "nothing keeps it in step" if answer == _TIME_ERROR else "not known to be kept in step"
    remedy = "run an NTP client: machines of one run may differ by five minutes"
    return Check("clock", "warn", said, remedy)


def _supervision() -> Check:
    """The supervisor tells its roles from later namesakes by their birth in /proc."""
    if birth(os.getpid()) is not None:
        return Check("processes", "ok", "/proc tells one from another")
    return Check("processes", "fail", "no /proc", "roles are supervised on Linux")


def _compiler(env: Mapping[str, str]) -> Check:
    """Where `learner_jax.aot_command` looks for libtpu."""
    named, aside = env.get("TPU_LIBRARY_PATH"), Path(sys.prefix) / "aot" / "libtpu" / "libtpu.so"
    if (named and Path(named).is_file()) or find_spec("libtpu") or aside.is_file():
        return Check("libtpu", "ok", "there: `plan --aot` compiles for TPUs")
    return Check("libtpu", "warn", "none", "make aot, for `plan --aot` on TPU specs")


def _models(env: Mapping[str, str]) -> Check:
    cache = model_cache(env)
    found = sorted(path.name for path in cache.glob("models--*"))
    names = ", ".join(name.removeprefix("models--").replace("--", "/") for name in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    # Roles never ask a network for weights: what a run needs is here before it starts.
    return Check("models", "ok", f"{len(found)} in {cache}{': ' if found else ''}{names}{more}")


def doctor_command(files: SpecFiles | None, runs_dir: Path | None) -> int:
    """Prints the checks; returns 0, or 1 where one failed."""
    facts = look()
    checks = check_machine(facts, runs_dir or RUNS)
    if files is not None:
        checks += check_spec_here(files, facts, runs_dir)
    _show(checks)
    failed = sum(check.verdict == "fail" for check in checks)
    warned = sum(check.verdict == "warn" for check in checks)
    print(f"{len(checks)} checks: {failed} failed, {warned} warnings")
    return EXIT_NOT_WELL if failed else EXIT_WELL


def check_spec_here(files: SpecFiles, facts: Facts, runs_dir: Path | None) -> Iterator[Check]:
    """Run the preflight of `apply` for a spec.

    Raises:
        UserError: the spec has errors.
    """
    spec = sound_spec(files)
    lacking = missing(spec, run_directory(spec, runs_dir), facts)
    if not absent_modules(facts.has_module):
        lacking += check_problems(spec, facts.machine, print).lacking
    yield from (Check(item.path, "fail", item.thing, item.remedy) for item in lacking)
    if not lacking:
        yield Check(spec.name, "ok", "this machine has everything that it needs")


def _show(checks: Sequence[Check]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path is never cut off
    for check in checks:
        remedy = Text(f"\n{check.remedy}" if check.remedy else "", style="dim")
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(verdict, Text(check.name), Text(check.found) + remedy)
    Console(highlight=False).print(table)
