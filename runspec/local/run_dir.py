"""A run's directory: who holds its lock, and how a name on the command line finds it.

A run whose directory is on another machine has a file here, site.json, which says how to reach it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import RunElsewhere, UserError, reported
from runspec.core.files import expand_user, open_lock, read_bounded, write_atomic
from runspec.core.run_files import island_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import dump_resolved
from runspec.core.schema.role_names import island_processes, island_role
from runspec.local.backend import backend

RUNS = Path("runs")
"""The default folder of runs."""
LOCK_FILE = "lock"
EXIT_LOCKED = 5
_LOCK_TIMEOUT_S = 1.0
_ROOT_LETTERS = 12
SITE_FILE = "site.json"
_MAX_SITE_BYTES = 64 * 1024


class RunLocked(UserError):
    """Another process holds the run."""

    exit_code = EXIT_LOCKED


@contextmanager
def hold(run_dir: Path, *, role: str | None = None) -> Iterator[int]:
    """Holds a run's lock, which the kernel lets go when its last holder dies.

    Args:
        run_dir: the run's directory, or the folder of one role.
        role: whose folder it is; None for a run's directory.

    Yields:
        The lock's file descriptor; a process that inherits it holds the lock too.

    Raises:
        RunLocked: someone else holds it.
        UserError: this user may not write the lock.
    """
    path = run_dir / LOCK_FILE
    remedy = "mend the permissions, or work as the user who made the run"
    with reported("the run cannot be locked", path, remedy, OSError):
        descriptor = open_lock(path)
    try:
        if not _lock(descriptor):
            pause = f"`runspec pause {run_dir}` stops it, `runspec status {run_dir}` watches it"
            raise RunLocked(
                f"{role or 'the run'} is alive: held by {_holder(path)}",
                place=str(run_dir),
                remedy="stop that process first, or name another --dir" if role else pause,
            )
        sign_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def sign_lock(descriptor: int) -> None:
    """Writes into the lock who holds it."""
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def holder(run_dir: Path) -> str | None:
    """Return who holds the run, in words; None when nobody does."""
    path = run_dir / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except PermissionError:
        return "another user, as far as this one may see"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(path)
    finally:
        os.close(descriptor)
    return None


def find_run(run: str, runs_dir: Path) -> Path:
    """The directory of a run given by name or path.

    Raises:
        UserError: there is none.
        RunElsewhere: it lies on another machine.
    """
    for candidate in (runs_dir / run, Path(run)):
        if (candidate / SPEC_FILE).is_file():
            return candidate.absolute()
        refuse_elsewhere(candidate, run)
    known = sorted(path.parent.name for path in runs_dir.glob(f"*/{SPEC_FILE}"))
    raise UserError(
        f"no run {run!r}",
        place=str(runs_dir),
        remedy=f"one of: {', '.join(known)}" if known else "start one with `runspec apply`",
    )


def run_directory(spec: RunSpec, runs_dir: Path | None) -> Path:
    """Where a run lies: under `runs_dir` where one is given, else under the spec's `storage.dir`,
    else under `runs`."""
    folder = runs_dir or Path(spec.storage.dir or RUNS)
    return (expand_user(folder) / spec.name).absolute()


def write_spec(spec: RunSpec, folder: Path, roles: Container[str]) -> None:
    """Write a resolved spec where processes read it: their folder, and those of islands in it.

    Args:
        spec: resolved.
        folder: the run directory, or what a role has for one.
        roles: names of the processes that start there.
    """
    data = dump_resolved(spec)
    write_atomic(folder / SPEC_FILE, data)
    for name, processes in island_processes(spec).items():
        if any(process in roles for process in processes):
            own = island_folder(folder, island_role(name))
            own.mkdir(parents=True, exist_ok=True)
            write_atomic(own / SPEC_FILE, data)


def own_folder(spec: RunSpec, role: str) -> Path:
    """Return the folder of a role that does not share the run directory.

    Its path has the root that the spec pins: a rollback makes another root, and so a new folder.
    """
    root = (spec.identity.root_public_key or "")[:_ROOT_LETTERS]
    return expand_user(Path(spec.storage.scratch)).absolute() / spec.name / root / role


def _lock(descriptor: int) -> bool:
    # `holder` looks by taking the lock for a moment: outwait it.
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_bytes()[:4096])
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held["since"]))
        if held["host"] == socket.gethostname() and not Path(f"/proc/{held['process']}").exists():
            return f"a process that process {held['process']} started, which is gone"
        return f"process {held['process']} on {held['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not said who it is"


def note_site(run_dir: Path, site: Mapping[str, str]) -> None:
    """Write the note that says how a run is reached.

    Args:
        run_dir: where the run would lie on this machine, by whose path it lies on the other.
        site: `backend`, `run`, and what the backend wants to know again.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    known = {"runs_dir": str(run_dir.parent), **site}
    write_atomic(run_dir / SITE_FILE, canonical_json(known))


def read_site(run_dir: Path) -> dict[str, str] | None:
    """Read the note of a run; None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    path, kinds = run_dir / SITE_FILE, (OSError, MalformedJson, KeyError)
    if not path.exists():
        return None
    with reported("cannot be read", path, "remove it, then apply again", *kinds):
        site = parse_object(read_bounded(path, _MAX_SITE_BYTES), max_bytes=_MAX_SITE_BYTES)
        return {key: str(site[key]) for key in ("backend", "run", "runs_dir", *site)}


def refuse_elsewhere(run_dir: Path, named: str) -> None:
    """Raise RunElsewhere for a run that was applied from here and lies on another machine.

    Args:
        run_dir: where the run would lie on this machine.
        named: as the command line names the run.
    """
    site = read_site(run_dir)
    if site is None:
        return

    def carry(arguments: Sequence[str]) -> int:
        there = [site["run"] if word == named else word for word in arguments]
        there += ["--runs-dir", site["runs_dir"]]  # of two the last one counts
        code = backend(site["backend"]).command(site, there)
        if code == 0 and arguments[0] == "delete":
            (run_dir / SITE_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                run_dir.rmdir()
        return code

    raise RunElsewhere(site["run"], carry)
