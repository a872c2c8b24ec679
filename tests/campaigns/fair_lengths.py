"""Lengths that are trained are those that were leased, though workers differ in speed.

A run with lag 2 and three workers: one as quick as it can be, one that hands in three seconds late,
and one that hands in a second late and withholds each group whose outputs are longer than 22 tokens
on average. What each sampled is compared with what was trained of it, group by group, for lengths
in a group are alike. A drawing of the distributions goes to docs/fair-lengths.svg.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import ks_2samp

from benchmarks.evidence import write_drawing
from benchmarks.runs import apply_command
from runspec.core.process import Endpoints, Role, load_endpoints, run_role, stop_event
from runspec.core.schema.load import load_resolved
from runspec.local.plots import Curve, Figure
from sampler.worker import work
from sampler.worker.worker import Worker
from tests.role_folder import write_folder
from tests.waiting import eventually, one_ended
from verify.client import SubmissionRefused
from verify.formats.batch import FILE_NAME
from verify.formats.submission import Rollout

STEPS = int(os.environ.get("FAIR_STEPS", "20"))
PLOT = Path(__file__).resolve().parents[2] / "docs" / "fair-lengths.svg"
LONG = 22.0
"""Tokens; half of the target lengths are above it."""
WORKERS = {"quick": (0.0, None), "slow": (3.0, None), "withholding": (1.0, LONG)}
"""Seconds that each takes longer than it needs, and the mean above which it withholds a group."""
NOTES = "sampled.jsonl"
Groups = dict[tuple[str, int], float]
"""Mean output tokens by lease and group."""


class Noting(Worker):
    """Writes down what it sampled, then waits, then may withhold it."""

    def __init__(
        self, *parts: Any, notes: Path, late_s: float, longest: float | None, **more: Any
    ) -> None:
        super().__init__(*parts, **more)
        self._notes, self._late_s, self._longest = notes, late_s, longest

    def finish(self, rollouts: list[Rollout]) -> list[Rollout]:
        mean = fmean(len(rollout.output_tokens) for rollout in rollouts)
        with self._notes.open("a") as file:
            print(json.dumps([rollouts[0].lease, rollouts[0].group, mean]), file=file)
        time.sleep(self._late_s)
        if self._longest is not None and mean > self._longest:
            raise SubmissionRefused("withheld")
        return rollouts


def run() -> dict[str, dict[str, object]]:
    """How many groups each worker sampled and had trained, and how their lengths differ.

    Raises:
        AssertionError: the lengths that the honest workers sampled are not those that were trained
            of them.
    """
    with tempfile.TemporaryDirectory(prefix="fair-") as folder:
        sampled, trained = _measured(Path(folder))
    found: dict[str, dict[str, object]] = {}
    drawn: list[tuple[str, list[float]]] = []
    honest = tuple(name for name, (_, longest) in WORKERS.items() if longest is None)
    for title, names in {"honest": honest, "withholding": ("withholding",), "all": WORKERS}.items():
        leased = {key: mean for name in names for key, mean in sampled[name].items()}
        kept = [mean for key, mean in leased.items() if key in trained]
        test = ks_2samp([*leased.values()], kept)
        found[title] = {
            "groups sampled": len(leased),
            "trained": len(kept),
            "mean length sampled": round(fmean(leased.values()), 2),
            "mean length trained": round(fmean(kept), 2),
            "Kolmogorov-Smirnov": round(float(test.statistic), 3),
            "p": round(float(test.pvalue), 3),
        }
        drawn += [(f"{title}, sampled", [*leased.values()]), (f"{title}, trained", kept)]
    curves = [Curve(name, _shares(lengths), averaged=False) for name, lengths in drawn]
    caption = "Share of groups up to a mean length"
    write_drawing(PLOT, Figure(caption, "", curves, x="mean output tokens of a group"))
    assert float(str(found["honest"]["p"])) > 0.05, found
    return found


def _shares(lengths: list[float]) -> list[tuple[float, float]]:
    ordered = sorted(lengths)
    return [(length, (place + 1) / len(ordered)) for place, length in enumerate(ordered)]


def _measured(folder: Path) -> tuple[dict[str, Groups], set[tuple[str, int]]]:
    """What each worker sampled, and the leases and groups of all that was trained."""
    changes = {
        "steps": STEPS,
        "algorithm.fill.deadline": "1h",
        "evaluations": "null",
        "samplers.volunteers.replicas": len(WORKERS),
        "samplers.volunteers.groups_per_submission": 1,
        "placement.roles": "[relay-local, validators]",
    }
    run_dir = folder / "fair"
    command = apply_command("fair", changes, folder)
    with subprocess.Popen(command, stdout=sys.stderr) as process, ExitStack() as stack:
        stack.callback(process.terminate)
        eventually(
            lambda: list(run_dir.glob("weights/v0")) and load_endpoints(run_dir),
            "version 0",
            hopeless=lambda: one_ended([process]),
        )
        up, root = load_endpoints(run_dir), json.loads((run_dir / "keys/roles.json").read_text())
        assert up is not None
        ends, spec = Endpoints(up.coordinator, up.origin), load_resolved(run_dir)
        for number, name in enumerate(WORKERS):
            home = write_folder(folder / name, spec, ends, root["key"])
            key = run_dir / "keys" / f"volunteers-{number}.key"
            words = [sys.executable, "-m", __name__, name, str(home), str(key)]
            stack.enter_context(worker := subprocess.Popen(words, stdout=sys.stderr))
            stack.callback(worker.terminate)
        assert process.wait() == 0, "the run failed"
    sampled: dict[str, Groups] = defaultdict(dict)
    for name in WORKERS:
        for line in (folder / name / NOTES).read_text().splitlines():
            lease, group, mean = json.loads(line)
            sampled[name][lease, group] = mean
    return sampled, {key for path in run_dir.glob(f"rollouts/*/{FILE_NAME}") for key in _of(path)}


def _of(batch: Path) -> Iterator[tuple[str, int]]:
    """Leases and groups of a step's batch."""
    for group in json.loads(batch.read_text())["payload"]["groups"]:
        folder = batch.parent.parent / f"step_{group['step']}"
        envelope = json.loads((folder / f"{group['submission']}.json").read_text())["payload"]
        yield envelope["lease"], group["group"]


def main(name: str, folder: Path, key: Path) -> int:
    """One of the workers."""
    late_s, longest = WORKERS[name]
    kind = partial(Noting, notes=folder / NOTES, late_s=late_s, longest=longest)
    role, stop = Role.load("volunteers", folder, key_file=key), stop_event()
    return run_role(name, lambda log: work(role, log, stop, worker=kind))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
