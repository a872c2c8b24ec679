"""The value that a run is started from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.endpoints import Endpoints, load_endpoints
from runspec.local.identity import Identity, make_identity
from runspec.local.machine import Machine, this_machine


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start: its directory has what the roles of this machine need."""

    spec: RunSpec
    directory: Path
    endpoints: Endpoints
    """Where its servers listen."""
    identity: Identity
    """Its keys."""
    machine: Machine
    """The machine that starts its roles."""
    lock: int
    """File descriptor: whoever has it open holds the directory."""

    @classmethod
    def inherited(cls, directory: Path, lock: int) -> PreparedRun:
        """The run that another process prepared, and handed over with its lock.

        Raises:
            UserError: a file of the run cannot be read.
        """
        spec, endpoints = load_resolved(directory), load_endpoints(directory)
        assert endpoints is not None, "written before the lock is handed over"
        identity = make_identity(directory, spec)
        return cls(spec, directory, endpoints, identity, this_machine(), lock)

    def changed(self, spec: RunSpec) -> PreparedRun:
        """The run under another spec, with the keys that it asks for.

        Raises:
            UserError: as `make_identity`.
        """
        return replace(self, spec=spec, identity=make_identity(self.directory, spec))
