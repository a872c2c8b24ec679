"""Whether what a lock pins is what the spec names and this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.spec.lock_file import FilePin, Pin, lock_path, read_lock
from runspec.core.spec.schema import RunSpec
from runspec.lock.pins import look


def check_lock(
    spec: RunSpec,
    path: Path,
    profile: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """What differs from the lock beside a spec, a sentence each; empty where there is no lock.

    What is not on this machine is compared by name and commit alone. Nothing is asked of a network.

    Args:
        spec: as its layers make it.
        path: of its file.
        profile: the one that it was resolved with.
        env: says where the Hugging Face cache lies; the process's environment when None.

    Raises:
        UserError: the lock cannot be read, or a file that it pins.
    """
    lock = read_lock(path, profile)
    if lock is None:
        return []
    seen = look(spec, path.parent, os.environ if env is None else env)
    absent = [f"{where}: {what}" for where, what in seen.absent.items()]
    return [*absent, *differences(lock.pins, seen.pins)]


def require_lock(spec: RunSpec, path: Path, profile: str | None = None) -> None:
    """Holds a spec to the lock beside it, where there is one.

    Raises:
        UserError: listing everything that differs.
    """
    stale = check_lock(spec, path, profile)
    if stale:
        listed = "\n".join(f"  {sentence}" for sentence in stale)
        raise UserError(
            f"what is here is not what was locked:\n{listed}",
            place=str(lock_path(path, profile)),
            remedy="bring what the lock names, or accept what is here with `runspec lock`",
        )


def differences(locked: Mapping[str, Pin], here: Mapping[str, Pin]) -> list[str]:
    """What differs between a lock's pins and those that were seen, a sentence each."""
    found = []
    for where in [*here, *(where for where in locked if where not in here)]:
        if where not in locked:
            found.append(f"{where}: {here[where].source} is not in the lock")
        elif where not in here:
            found.append(f"{where}: {locked[where].source} is in the lock, and not in the spec")
        else:
            found += [f"{where}: {what}" for what in _pin_differences(locked[where], here[where])]
    return found


def _pin_differences(locked: Pin, here: Pin) -> Iterator[str]:
    if locked.source != here.source:
        yield f"{here.source}, and {locked.source} in the lock"
        return
    if here.package and locked.package != here.package:
        yield f"{here.package}, and {locked.package or 'no package'} in the lock"
    if here.commit and locked.commit != here.commit:
        yield f"commit {here.commit}, and {locked.commit or 'none'} in the lock"
        return
    if here.files:  # else it is not on this machine
        yield from _file_differences(locked, here)


def _file_differences(locked: Pin, here: Pin) -> Iterator[str]:
    for name, pin in locked.files.items():
        if name not in here.files:
            yield f"{name} is in the lock, and not here"
        elif pin != here.files[name]:
            yield f"{name} is not the file of the lock: {_how(pin, here.files[name])}"
    # A repository may have been on the machine in part, or not at all, when it was locked.
    if locked.commit is None:
        yield from (
            f"{name} is not in the lock" for name in here.files.keys() - locked.files.keys()
        )


def _how(locked: FilePin, here: FilePin) -> str:
    if locked.size != here.size:
        return f"{here.size} bytes, {locked.size} in the lock"
    digest, kept = here.blake3 or here.header or "", locked.blake3 or locked.header or ""
    return f"digest {digest[:12]}, {kept[:12]} in the lock"
