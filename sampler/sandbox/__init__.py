"""Isolation of programs that a model wrote: no network, no files, bounded, killed as a group.

    from sampler.sandbox import PYTHON, Limits, run

    finished = run([*PYTHON, "-c", source], limits=Limits(wall_s=2.0))

Two sets of mechanisms, each enough by itself; what works on the machine is applied together. A:
user, PID, network, mount, IPC and UTS namespaces. B: Landlock and seccomp. See docs/sandbox.md.
"""

from sampler.sandbox.isolate import run, start
from sampler.sandbox.limits import Finished, Limits
from sampler.sandbox.probe import probe, require
from sampler.sandbox.process import PYTHON, SET_A, SET_B, Isolated, NotIsolated

__all__ = [
    "PYTHON",
    "SET_A",
    "SET_B",
    "Finished",
    "Isolated",
    "Limits",
    "NotIsolated",
    "probe",
    "require",
    "run",
    "start",
]
