"""A sound spec from its files, for the commands that act on runs; and whether a run can start here.

`runspec doctor` looks at this machine, and `lint --data` at problems and graders of specs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runspec import cli
from runspec.core.entry_points import (
    LISTS,
    NO_TPU_SAMPLER,
    extra_of,
    install_command,
    list_command,
    machine_kind,
)
from runspec.core.errors import BadUsage, UserError, bad_usage, size
from runspec.core.files import expand_user
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.findings import Finding, format_finding
from runspec.core.schema.load import SpecFiles, with_profiles
from runspec.core.schema.source_files import whole_uri
from runspec.core.schema.validate import locate
from runspec.estimate.fit import Unfit
from runspec.lint import RULES, TokenizerFiles
from runspec.lint.check import CheckedFiles, check_spec
from runspec.lint.rules.data import thinking_of
from runspec.local.backend import birth
from runspec.local.endpoints import PORTS, port_is_free
from runspec.local.machine import BUILDS, Facts, find_tokenizer, look, this_machine
from runspec.local.planning import absent_modules, check_problems
from runspec.local.preflight import ROLE_MODULES, missing
from runspec.local.run_dir import RUNS, run_directory
from runspec.local.volunteer import divided, served
from runspec.lock import is_repository, model_cache, require_lock
from runspec.plan import read_plan


def located(spec: RunSpec, folder: Path) -> RunSpec:
    """The spec with local models and data by their whole paths, and its profiles' contents in it:
    the run's roles may run elsewhere.

    Args:
        spec: its `model.hf`, `model.tokenizer.hf`, sources' `uri` and profiles may lie beside it.
        folder: of the spec's file, where relative paths start from.

    Raises:
        UserError: a profile cannot be read.
    """
    model = spec.model
    if model.hf is not None:
        model = model.model_copy(update={"hf": _whole(model.hf, folder)})
    if model.tokenizer is not None:
        tokenizer = {"hf": _whole(model.tokenizer.hf, folder)}
        model = model.model_copy(update={"tokenizer": model.tokenizer.model_copy(update=tokenizer)})
    whole = spec.model_copy(update={"model": model})
    sources = [
        source
        if source.uri is None
        else source.model_copy(update={"uri": whole_uri(source.uri, folder)})
        for source in spec.data.sources
    ]
    data = spec.data.model_copy(update={"sources": sources, "thinking": _thinking(whole)})
    return with_profiles(spec.model_copy(update={"model": model, "data": data}), folder)


def _thinking(spec: RunSpec) -> Literal["required", "optional", "none"] | None:
    """What `data.thinking` says or, where it is not set, the model's chat template."""
    if spec.data.thinking is not None or spec.supervised is not None:
        return spec.data.thinking
    if spec.model.shape is not None:
        return "required"
    folder = find_tokenizer(spec.model, os.environ)
    files = None if folder is None else TokenizerFiles.read(folder)
    return None if files is None else thinking_of(files, spec.data)


def _whole(name: str, folder: Path) -> str:
    path = folder / expand_user(Path(name))
    try:
        return str(path.resolve()) if path.is_dir() or not is_repository(name) else name
    except OSError:  # a name that can be no path
        return name


def sound_spec(files: SpecFiles, *, pins_root: bool = False) -> RunSpec:
    """The spec, if it has no errors and is what its lock says, `located`; prints its warnings.

    Args:
        files: what to load.
        pins_root: whether the caller makes and pins a root where the spec names none.

    Raises:
        BadUsage: a file cannot be read, or bad usage.
        UserError: listing every error with its place, or what the lock pins otherwise.
    """
    try:
        plan = read_plan(files.path)
    except (OSError, UserError):
        plan = None  # whatever it is, the loader says what is wrong with it
    if plan is not None:  # YAML too, it would be a spec with much that is wrong
        remedy = f"`runspec apply {files.path}`"
        raise BadUsage("a saved plan, not a spec", place=str(files.path), remedy=remedy)
    with bad_usage():
        checked = check_spec(files)
    if pins_root:
        rest = [finding for finding in checked.findings if finding.code != "unsigned-weights"]
        checked = replace(checked, findings=rest)
    spec = checked.require()
    require_lock(spec, files.path, files.profile)
    for warning in checked.findings:
        print(format_finding(warning), file=sys.stderr)
    return located(spec, files.path.parent)


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
    return [*_software(facts), *_devices(facts, runs_dir), *_system(facts.machine.env, runs_dir)]


def _check(name: str, well: bool, found: str, remedy: str, otherwise: Verdict = "warn") -> Check:
    """A check that names a remedy where it is not well."""
    return Check(name, "ok", found) if well else Check(name, otherwise, found, remedy)


def _software(facts: Facts) -> Iterator[Check]:
    """Python, the list of packages that fits this machine, and what each part imports."""
    here = ".".join(map(str, sys.version_info[:3]))
    remedy = f"{PYTHON[0]}.{PYTHON[1]} or newer is needed"
    yield _check("python", sys.version_info[:2] >= PYTHON, here, remedy, "fail")
    kind = machine_kind(facts.gpus, facts.tpus)
    found = f"{LISTS[kind].file} fits this machine ({kind})"
    if kind == "tpu":
        found += f"; no sampler: {NO_TPU_SAMPLER}"
    well = not facts.builds or BUILDS.get(kind) in facts.builds
    if not well:
        found += f"; installed is {', '.join(facts.builds)}, which is for other machines"
    yield Check("requirements", "ok" if well else "warn", found, list_command(kind))
    for part, modules in ROLE_MODULES.items():
        if (part, kind) == ("sampler", "tpu"):
            continue
        numbers = {name: _version(name) if facts.has_module(name) else None for name in modules}
        listed = ", ".join(f"{name} {number or 'missing'}" for name, number in numbers.items())
        remedy = f"the list above, or {install_command(extra_of(part, kind))}"
        yield _check(f"packages, {part}", None not in numbers.values(), listed, remedy)


def _version(module: str) -> str:
    for distribution in _DISTRIBUTIONS.get(module, (module,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _devices(facts: Facts, runs_dir: Path) -> Iterator[Check]:
    devices = [*facts.gpus, *([f"{facts.tpus} TPU chips"] if facts.tpus else [])]
    remedy = "small runs do without; else see that nvidia-smi lists the GPUs, /dev/accel* the TPUs"
    listed = ", ".join(devices) or "none that a driver names"
    yield _check("accelerators", bool(devices), listed, remedy)
    cores = len(facts.machine.cores)
    yield _check("cores", cores > 1, str(cores), "learner and sampler will share it: allow two")
    for name, free, little, none, remedy in (
        ("memory", facts.memory(), LITTLE_MEMORY, NO_MEMORY, "close what else needs memory"),
        ("disk", facts.free_bytes(runs_dir), LITTLE_DISK, NO_DISK, "use another --runs-dir"),
    ):
        if free is None:
            yield Check(name, "warn", "the system does not say", remedy)
        else:
            otherwise: Verdict = "fail" if free < none else "warn"
            yield _check(name, free >= little, f"{size(free)} free", remedy, otherwise)


def _system(env: Mapping[str, str], runs_dir: Path) -> Iterator[Check]:
    folder = runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    well = os.access(folder, os.W_OK)
    found = f"{folder} {'can' if well else 'cannot'} be written"
    remedy = "mend its permissions, or use another --runs-dir"
    yield _check("runs", well, found, remedy, "fail")
    tried = PORTS[:: len(PORTS) // _PORTS_TRIED][:_PORTS_TRIED]
    free = sum(port_is_free("127.0.0.1", port) for port in tried)
    found = f"{free} of {len(tried)} tried in {PORTS.start}-{PORTS.stop - 1} are free"
    remedy = "end what holds them, or set placement.base_port"
    yield _check("ports", free > 0, found, remedy, "fail")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{soft} a process"
    remedy = f"`ulimit -n {FEW_FILES}` or more"
    yield _check("open files", unlimited or soft >= FEW_FILES, found, remedy)
    # Signatures carry times, with five minutes of slack.
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "adjtimex", None)
    answer = call(ctypes.create_string_buffer(_TIMEX_BYTES)) if call else -1
    well = 0 <= answer < _TIME_ERROR
    missed = "nothing keeps it in step" if answer == _TIME_ERROR else "not known to be kept in step"
    remedy = "run an NTP client: machines of one run may differ by five minutes"
    yield _check("clock", well, "kept in step" if well else missed, remedy)
    # The supervisor tells its roles from later namesakes by their birth in /proc.
    well = birth(os.getpid()) is not None
    found = "/proc tells one from another" if well else "no /proc"
    yield _check("processes", well, found, "roles are supervised on Linux", "fail")
    # Where `learner_jax.aot_command` looks for libtpu.
    named, aside = env.get("TPU_LIBRARY_PATH"), Path(sys.prefix) / "aot" / "libtpu" / "libtpu.so"
    well = bool((named and Path(named).is_file()) or find_spec("libtpu") or aside.is_file())
    found = "there: `plan --aot` compiles for TPUs" if well else "none"
    yield _check("libtpu", well, found, "make aot, for `plan --aot` on TPU specs")
    # Roles never ask a network for weights: what a run needs is here before it starts.
    cache = model_cache(env)
    models = sorted(path.name for path in cache.glob("models--*"))
    names = [name.removeprefix("models--").replace("--", "/") for name in models[:_NAMED]]
    more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
    listed = f"{': ' if models else ''}{', '.join(names)}{more}"
    yield Check("models", "ok", f"{len(models)} in {cache}{listed}")


def doctor_command(
    file: Annotated[Path | None, typer.Argument(help="A spec that should run here.")] = None,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    runs_dir: cli.SpecRunsDir = None,
) -> int:
    """Prints the checks; returns 0, or 1 where one failed."""
    facts = look()
    checks = check_machine(facts, runs_dir or RUNS)
    if file is not None:
        files = cli.files_named(file, profile, placement, overrides)
        checks += check_spec_here(files, facts, runs_dir)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path is never cut off
    for check in checks:
        remedy = Text(f"\n{check.remedy}" if check.remedy else "", style="dim")
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(verdict, Text(check.name), Text(check.found) + remedy)
    Console(highlight=False).print(table)
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
    config = model_config(spec)
    for pool in (p for p in spec.samplers if p.trust == "untrusted" and p.hardware.kind != "cpu"):
        here = served(pool, spec, config, facts)
        name, remedy = f"joining {pool.name}", "docs/join.md says what fits"
        if isinstance(here, Unfit):
            yield Check(name, "warn", f"{here.path}: {here.reason}", remedy)
        else:
            yield Check(name, "ok", f"this machine can serve it{divided(here)}")
    if not lacking:
        yield Check(spec.name, "ok", "this machine has everything that it needs")


CODE = "problems"


def with_problems(checked: CheckedFiles, specs: Sequence[SpecFiles]) -> CheckedFiles:
    """The findings of specs, with those of their problems; progress and counts go to stderr.

    Raises:
        UserError: what reads the problems is not installed here.
    """
    if absent := absent_modules():
        raise UserError(
            f"not installed here: {', '.join(absent)}",
            place="--data",
            remedy=f"make install, or {install_command('tasks')}",
        )
    unreadable = {one.file for one in checked.unreadable}
    readable = [files for files in specs if str(files.path) not in unreadable]
    found = [finding for files in readable for finding in _findings(files)]
    return replace(checked, findings=[*checked.findings, *found])


def _findings(files: SpecFiles) -> Iterator[Finding]:
    loaded = check_spec(files)
    name, tree = files.path, loaded.tree
    errors = [finding for finding in loaded.findings if finding.severity == "error"]
    if loaded.spec is None or errors:
        print(f"{name}: its problems are not read: it is no spec without errors", file=sys.stderr)
        return
    spec = located(loaded.spec, files.path.parent)
    problems = check_problems(spec, this_machine(), lambda line: print(line, file=sys.stderr))
    for note in problems.notes:
        print(f"{name}: {note}", file=sys.stderr)
    for lacking in problems.lacking:
        place = locate(tree, tuple(lacking.path.split(".")))[0]
        yield Finding(
            place,
            CODE,
            lacking.thing,
            path=lacking.path,
            requires=RULES[CODE].summary,
            suggestion=lacking.remedy,
        )
