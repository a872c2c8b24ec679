"""Isolation of programs that a model wrote: no network, no files, bounded, killed as a group.

    from sampler.sandbox import PYTHON, Limits, run

    finished = run([*PYTHON, "-c", source], limits=Limits(wall_s=2.0))

There are two sets of mechanisms, each enough by itself; those that work on the machine are applied
together. A: user, PID, network, mount, IPC and UTS namespaces. B: Landlock and seccomp. See
docs/sandbox.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from runspec.core.errors import UserError
from sampler.sandbox.filter import supported
from sampler.sandbox.inside.control import LANDLOCK, NAMESPACES, SECCOMP
from sampler.sandbox.inside.kernel import ROOT_STAYS_ROOT, landlock_abi
from sampler.sandbox.process import (
    PORTION_BYTES,
    PYTHON,
    SET_A,
    SET_B,
    Finished,
    Isolated,
    Limits,
    NotIsolated,
    launch,
)

__all__ = ["PYTHON", "Limits", "NotIsolated", "probe", "require", "run", "start"]


def start(
    command: Sequence[str],
    *,
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    mechanisms: Sequence[str] | None = None,
    repeatable: bool = False,
) -> Isolated:
    """Start a program in isolation like `launch`; by default with all mechanisms that work here.

    Raises:
        NotIsolated: a mechanism fails, or the program or a path is missing.
        UserError: no set of mechanisms works here.
    """
    if mechanisms is None:
        require("sandbox")
        mechanisms = probe().working
    return launch(
        command,
        limits=limits,
        mechanisms=mechanisms,
        files=files,
        readable=readable,
        repeatable=repeatable,
    )


def run(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits,
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    mechanisms: Sequence[str] | None = None,
    repeatable: bool = False,
) -> Finished:
    """Run a program in isolation until it ends or hits a limit; none of its processes is left then.

    Args and errors are those of `start`. `stdin` is the whole standard input of the program.
    """
    process = start(
        command,
        limits=limits,
        files=files,
        readable=readable,
        mechanisms=mechanisms,
        repeatable=repeatable,
    )
    process.limit_stderr(limits.output_bytes)

    def feed() -> None:
        """Write the program's standard input, which the program need not read."""
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(stdin)
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()

    writer = threading.Thread(target=feed, daemon=True)
    writer.start()
    stdout = bytearray()
    try:
        while len(stdout) <= limits.output_bytes:
            if not (part := os.read(process.stdout.fileno(), PORTION_BYTES)):
                break
            stdout += part
        else:
            process.stop()
        finished = process.wait(None)
    finally:
        process.kill()
        writer.join()
    too_much = len(stdout) > limits.output_bytes or process.wrote_too_much
    if too_much and finished.outcome == "killed":
        finished = replace(finished, outcome="output")
    return replace(finished, stdout=bytes(stdout[: limits.output_bytes]))


_TRIAL = Limits(wall_s=30.0)
REMEDIES = {
    "namespaces": "allow user namespaces (docs/sandbox.md has the setting of each distribution), "
    "and in a container start it with them allowed",
    "landlock": "boot Linux 5.13 or newer with `landlock` among the LSMs (lsm=landlock,...)",
    "root": "run it as an ordinary user, or with the capabilities CHOWN, SETGID and SETUID",
    "seccomp": "run on x86_64 or aarch64 with a kernel that has CONFIG_SECCOMP_FILTER",
}


@dataclass(frozen=True)
class Mechanism:
    """One mechanism: whether it works here, and what was seen."""

    name: str
    works: bool
    seen: str

    @property
    def remedy(self) -> str:
        """How to make it work; empty if it works."""
        if self.works:
            return ""
        return REMEDIES["root" if ROOT_STAYS_ROOT in self.seen else self.name]


@dataclass(frozen=True)
class Report:
    """Mechanisms of this machine.

    Attributes:
        mechanisms: namespaces (user, PID, network, mount, IPC and UTS, and mounts in them: set A);
            Landlock and seccomp (set B, where both work).
    """

    mechanisms: tuple[Mechanism, ...]

    @property
    def working(self) -> tuple[str, ...]:
        """Names of those that work."""
        return tuple(mechanism.name for mechanism in self.mechanisms if mechanism.works)

    @property
    def isolates(self) -> bool:
        """Whether one of the two sets works.

        Namespaces do not confine sockets to a virtual machine's host. If the kernel has these,
        set A needs the filter as well.
        """
        works = set(self.working)
        if works >= set(SET_B) or works >= {*SET_A, SECCOMP}:
            return True
        try:
            with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM):
                return False
        except OSError:
            return works >= set(SET_A)


@cache
def probe() -> Report:
    """Try each mechanism on an empty program. The result is cached."""
    alone = _try(SET_A)
    namespaces = Mechanism(NAMESPACES, not alone, alone or "a root of its own was built")
    base = SET_A if namespaces.works else ()
    abi = landlock_abi()
    why = "no Landlock in this kernel"
    if abi:
        why = _try((*base, LANDLOCK)) if base else _try(SET_B)
    found = Mechanism(LANDLOCK, not why, why or f"ABI {abi}")
    why = "no table of system calls for this architecture"
    if supported():
        why = _try((*base, SECCOMP)) if base else _try(SET_B)
    return Report((namespaces, found, Mechanism(SECCOMP, not why, why or "the filter holds")))


def _try(mechanisms: tuple[str, ...]) -> str:
    """Return why a program does not start under these mechanisms; empty if it starts."""
    command = [*PYTHON, "-S", "-c", "pass"]
    try:
        finished = launch(command, limits=_TRIAL, mechanisms=mechanisms).wait(None)
    except NotIsolated as error:
        return str(error)
    return "" if finished.ok else finished.stderr.decode(errors="replace")[-500:]


def require(place: str) -> None:
    """Check that programs of a model can be isolated here.

    Args:
        place: what needs it, for example a reward.

    Raises:
        UserError: neither set of mechanisms works.
    """
    report = probe()
    if report.isolates:
        return
    broken = [m for m in report.mechanisms if not m.works]
    seen = "; ".join(f"{m.name} ({m.seen})" for m in broken)
    remedies = dict.fromkeys(m.remedy for m in broken if m.name != SECCOMP)  # in order, each once
    raise UserError(
        f"code that a model wrote cannot be isolated on this machine: {seen}",
        place=place,
        remedy=f"{'; or '.join(remedies)}. `python -m sampler.sandbox` tells when it works",
    )
