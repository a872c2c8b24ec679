"""How a process in the sandbox came to its end, in words."""

from __future__ import annotations

import signal

from sampler.grading.launch import Running

_SETTLE_S = 5.0
_LIMITS = {
    "time": "it took too long",
    "cpu": "it took too much CPU time",
    "memory": "it took too much memory",
    "processes": "it started too many processes",
    "files": "it wrote too much",
    "output": "it printed too much",
}


def fate(process: Running) -> str:
    """Of a process whose pipe has ended: waits for its end a little, then sees to it."""
    try:
        finished = process.wait(_SETTLE_S)
    except TimeoutError:
        process.kill()
        return "it closed its pipe"
    return describe(finished.outcome, finished.code, finished.stderr)


def describe(outcome: str, code: int, stderr: bytes) -> str:
    """One line: the limit that was met, the signal, or the exit code with the last line of
    stderr."""
    if outcome in _LIMITS:
        return _LIMITS[outcome]
    if outcome == "signal":
        return f"killed by {_signal(-code)}"
    if outcome == "killed":
        return "killed"
    last = stderr.decode(errors="replace").strip().splitlines()[-1:]
    return " ".join([f"exit code {code}", *(line[:200] for line in last)])


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
