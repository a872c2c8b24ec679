"""With a failure every minute a run of three islands keeps more of its updates than one learner.

Two real runs over documents on this machine. In one an island of three dies every minute, the trunk
in its turn; two suffice for a commit. The other has no islands: what dies takes the learner with
it, which starts again from its newest full state, written as often. Goodput is committed updates a
minute over those of the same run before the first failure; an update that one island of three did
not contribute counts two thirds. A drawing of both goes to docs/islands-goodput.svg.

What the figures say depends on how long a start takes: where it takes more than a minute, a second
island dies before the first is back, and the third waits for a quorum.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from runspec.core.run_files import STATE_FILE
from tests.campaigns._island_faults import MindedRun
from tests.learner_jax.islands.island_runs import spec_of
from tests.learner_jax.test_document_runs import make_files
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import IslandsCommitted, VersionPublished

CALM_S = 60.0 * float(os.environ.get("ISLANDS_GOODPUT_CALM", "1.5"))
FAILURES = int(os.environ.get("ISLANDS_GOODPUT_FAILURES", "5"))
"""One a minute."""
WARM_STEPS, UPDATES, STEPS, NAMES = 4, 16, 100_000, "abc"
PLOT = Path(__file__).resolve().parents[2] / "docs" / "islands-goodput.svg"
RUNS = {
    "three islands": {"quorum": 2, "grace": "1s", "codec": {"kind": "float16"}},
    "one learner": {},
}


@dataclass(frozen=True)
class Measured:
    """Updates of one run; times are seconds since the first failure."""

    at: Sequence[float]
    """Of each commit."""
    updates: Sequence[float]
    """That it added."""

    def a_minute(self, first: float, last: float) -> float:
        within = (u for at, u in zip(self.at, self.updates, strict=True) if first <= at < last)
        return sum(within) * 60.0 / (last - first)


def run() -> dict[str, dict[str, object]]:
    """Updates a minute with and without failures.

    Raises:
        AssertionError: the islands' goodput is not the higher one.
    """
    measured = {}
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        (files := Path(folder) / "files").mkdir()
        make_files(files)
        for name, islands in RUNS.items():
            spec = spec_of(
                files, NAMES, steps=STEPS, updates=UPDATES, every=4, publish_every=2, **islands
            )
            path = Path(folder) / name.replace(" ", "-") / "runs" / "run"
            with MindedRun(path, spec, files / "tokenizer", small=False) as minded:
                measured[name] = _measured(minded)
    found: dict[str, dict[str, object]] = {}
    goodput = {}
    for name, each in measured.items():
        calm, failing = each.a_minute(-CALM_S, 0.0), each.a_minute(0.0, 60.0 * FAILURES)
        goodput[name] = failing / calm
        found[name] = {
            "updates a minute": round(calm, 1),
            "with a failure a minute": round(failing, 1),
            "goodput": f"{goodput[name]:.0%}",
            "failures": FAILURES,
        }
    print(found, file=sys.stderr)
    PLOT.write_text(_draw(measured), encoding="utf-8")
    assert goodput["three islands"] > goodput["one learner"], found
    return found


def _measured(minded: MindedRun) -> Measured:
    """Lets a run go on without failures, then with one a minute."""
    minded.wait(lambda: len(_commits(minded)) > WARM_STEPS, f"{WARM_STEPS} steps")
    minded.pass_time(CALM_S)
    begun, victims = time.time(), cycle(reversed(minded.names))
    for number in range(1, FAILURES + 1):
        minded.processes[next(victims)].kill()
        minded.pass_time(begun + 60.0 * number - time.time())
    commits = [(at - begun, updates) for at, updates in _commits(minded) if at >= begun - CALM_S]
    return Measured(*zip(*commits, strict=True))


def _commits(minded: MindedRun) -> list[tuple[float, float]]:
    """When the run committed updates, and how many."""
    found, version = [], 0
    with closing(Ledger(minded.run.path / STATE_FILE)) as ledger:
        for event in ledger.events():
            if isinstance(event, IslandsCommitted):
                part = len(event.record.contributors) / len(minded.names)
                found.append((event.at, UPDATES * part))
            elif isinstance(event, VersionPublished) and minded.run.spec.learner.islands is None:
                found.append((event.at, float(UPDATES * (event.version - version))))
                version = event.version
    return found


def _draw(measured: dict[str, Measured]) -> str:
    """An SVG: updates over those of the calm rate, against minutes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "islands", "font.size": 8}):
        figure = Figure(figsize=(5.2, 2.8), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for (name, each), colour in zip(measured.items(), ("#2f7fc2", "#d9772b"), strict=True):
            calm = each.a_minute(-CALM_S, 0.0)
            minutes = [step / 10 for step in range(int(-CALM_S / 6), 10 * FAILURES + 1)]
            done = [each.a_minute(-CALM_S, 60.0 * m + 1e-6) * (m + CALM_S / 60) for m in minutes]
            axes.plot(minutes, [d / calm for d in done], color=colour, label=name)
        ends = -CALM_S / 60, FAILURES
        axes.plot(ends, [0, ends[1] - ends[0]], ":", color="#888888", label="no failure")
        for number in range(FAILURES):
            axes.axvline(number, color="#c2495b", linewidth=0.6, alpha=0.6)
        axes.set_xlabel("minutes since the first failure; one at each red line")
        axes.set_ylabel("committed updates,\nminutes of the rate before")
        axes.legend(loc="upper left")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
