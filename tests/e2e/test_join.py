"""One run on several machines, which starts no sampler: a volunteer joins by a link, leaves, and
comes back without disk.

Shows: a trunk, a relay and a validator that `runspec role` starts from bundles share no folder; one
that is killed goes on where it is started again; `runspec join`, installed from the wheel, looks
whether the machine fits, works for a run, outlives its coordinator, leaves politely and is there to
the end; a run without asynchrony trains on policy; versions go out as deltas, a late joiner fetches
an anchor and the deltas after it, and everybody has the bits that were exported; bfloat16 samplers
are accepted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broadcast.layout import manifest_name, stored_versions
from broadcast.manifest import WeightsManifest, open_manifest
from runspec.core.run_files import versions_in, weights_folder
from tests.harness import LiveRun, free_port, standing_still
from tests.processes import alive, descendants
from tests.site_page import ADMIN, TRUNK, Machines, command_on, commands, hidden
from tests.volunteer import JOIN, environment_with_wheel
from tests.waiting import HANG_S, eventually

pytestmark = pytest.mark.nightly

STEPS = 12
OVERRIDES = {
    "steps": STEPS,
    "verify.lease_timeout": "2m",
    "algorithm.async_level": 0,
    "broadcast.format": "delta",
    "broadcast.anchor_every": 128,  # so that a joiner never meets a fresh anchor
    # Of bf16 weights a small rate changes few; of float32 ones it would change them all.
    "broadcast.dtype": "bfloat16",
    "samplers.volunteers.dtype": "bfloat16",
    "learner.compute_dtype": "bfloat16",
    "optimizer.lr": 5e-6,
}
FETCHED = re.compile(r"version (\d+) fetched( from .*)?: (\d+) bytes over the network for (\d+),")
WAY = r"from {} version (\d+) and deltas ([\d, ]+)"


OTHERS = ("relay", "validator")
"""Machines with a role beside the trunk's; the page's samplers and evaluator are left out."""


class SiteRun(LiveRun):
    """A LiveRun that the trunk alone supervises; the run directory exists for nobody else."""

    def __init__(self, machines: Machines, overrides: Mapping[str, Any]) -> None:
        base = {"placement.base_port": free_port(4)}
        super().__init__(machines.runs, "target-short", {**overrides, **base})
        self.machines = machines
        self.others: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self) -> None:
        """Prepares the site, and starts trunk, relay and validator with the bundles they need."""
        prepare, sets = command_on(ADMIN, "runspec prepare"), self.words
        self.machines.call(ADMIN, [*prepare, *sets[sets.index("--set") :]])
        for machine, words in commands():
            to = words[-1].removesuffix(":")
            if machine == ADMIN and words[0] == "scp" and to in (TRUNK, *OTHERS):
                self.machines.call(ADMIN, words)
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        role = command_on(TRUNK, "runspec role")
        self.process = self.machines.start(TRUNK, role, self._output)
        for machine in OTHERS:
            self.start(machine)

    def start(self, machine: str) -> None:
        """Starts the role of a machine, or starts it again after it was killed."""
        role = command_on(machine, "runspec role")
        self.others[machine] = self.machines.start(machine, role, self.log(machine))

    def kill(self, machine: str) -> None:
        """Kills the role of a machine, which has to be alive and see no run directory."""
        process = self.others[machine]
        mounts = Path(f"/proc/{process.pid}/mountinfo").read_text()
        assert f" {self.runs_dir} " in mounts, f"{machine} sees the run directory"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, machine: str) -> Path:
        """What the role of a machine printed."""
        return self.machines.on(machine) / "log"

    def stop(self) -> None:
        super().stop()
        for process in self.others.values():
            process.terminate()
        for process in self.others.values():
            process.wait()

    def output(self) -> str:
        logs = [f"--- {name}\n{self.log(name).read_text()[-1500:]}" for name in self.others]
        return "\n".join([super().output(), *logs])


@contextmanager
def joined(
    link: str, folder: Path, log: Path, prefix: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """`runspec join` in a process of its own, whose words go to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *prefix,
                *(folder / "environment" / "bin" / "python", "-c", JOIN, "join", link),
                *("--key", str(folder / "mine.key"), "--dir", str(folder / "volunteer")),
            ],
            cwd=folder,
            stdout=out,
            stderr=out,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The volunteer's folder: no checkout, but an environment that has our wheel."""
    folder = tmp_path_factory.mktemp("volunteer")
    environment_with_wheel(folder / "environment")
    return folder


def words_of(home: Path) -> str:
    """The worker's own log, of both times."""
    return (home / "volunteer" / "worker.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, home: Path) -> SiteRun:
    # given a run that starts no sampler; `status` says how to join it from this machine
    log = home / "join.log"
    machines = Machines(tmp_path_factory.mktemp("machines"), tmp_path_factory.getbasetemp())
    away = hidden(machines.runs)
    with SiteRun(machines, OVERRIDES) as run:
        run.wait_until((run.dir / "spec.json").exists, "its spec")
        run.wait_until(lambda: "coordinator" in run.pids(), "its roles")
        link = run.status()["join"]
        assert link.startswith("http://127.0.0.1:")
        assert "runspec join" not in run.output()  # strangers cannot reach that address

        # when a stranger with nothing but the wheel and the link looks whether the machine fits
        key = ("--key", home / "mine.key")
        command = [home / "environment" / "bin" / "runspec", "join", link, *key, "--check"]
        checked = subprocess.run(command, cwd=home, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "this machine can serve pool volunteers" in checked.stdout
        assert "made a key" in checked.stdout + checked.stderr
        # and joins
        with joined(link, home, log, away) as volunteer:
            run.wait_until(lambda: run.metrics(), "a first step", others=[volunteer])
            # and the coordinator is killed under it, and the roles of other machines
            os.kill(run.status()["roles"]["coordinator"]["pid"], signal.SIGKILL)
            for machine in ("relay", "validator"):
                run.kill(machine)
                run.start(machine)
            steps = max(4, len(run.metrics()))
            run.wait_until(lambda: len(run.metrics()) > steps, "another", others=[volunteer])
            # then it works on, and leaves politely on Ctrl-C, with all that it started
            below = descendants(volunteer.pid)
            assert len(below) > 1, "the worker, and vLLM's core"
            with standing_still(run.pids()["learner"]):  # the run cannot end before it has left
                volunteer.send_signal(signal.SIGINT)
                assert volunteer.wait(HANG_S) == 0, log.read_text()
            eventually(lambda: not any(map(alive, below)), "no process of its is left")
            assert len(run.metrics()) < STEPS
        words = log.read_text()
        assert (home / "mine.key").stat().st_mode & 0o777 == 0o600
        assert "rollouts accepted" in words
        assert "left; thank you" in words

        # and when it comes back, under the same key and with an empty disk, it is there to the end
        shutil.rmtree(home / "volunteer" / "weights")
        with joined(link, home, log, away) as volunteer:
            run.finish()
            assert volunteer.wait(HANG_S) == 0, log.read_text()
        # and the validator ends by itself
        assert run.others["validator"].wait(HANG_S) == 0, run.output()
        assert "the run is finished; thank you" in log.read_text()
    return run


def summary(run: LiveRun) -> dict[str, float]:
    return json.loads((run.dir / "summary.json").read_text())


def test_the_run_reaches_its_end_and_every_rollout_is_on_policy(finished: SiteRun) -> None:
    assert summary(finished)["steps"] == STEPS
    trunk = {"origin", "coordinator", "publisher", "learner"}
    assert set(finished.status()["roles"]) - {"warm-start"} == trunk
    # and status says it where the run lies
    machines = finished.machines
    assert "target-short" in machines.call(TRUNK, command_on(TRUNK, "runspec status"))
    assert summary(finished)["max_lag"] == 0


def test_bf16_samplers_are_accepted(finished: LiveRun) -> None:
    # then validators, who rebuilt every version too, agree with the sampler
    assert summary(finished)["rollouts_rejected"] == 0
    for figure in ("logprob_diff", "policy_drift"):
        assert max(line[figure] for line in finished.metrics()) < 0.02


def manifest(run: LiveRun, version: int) -> WeightsManifest:
    data = (run.dir / "store" / "origin" / manifest_name(run.name, version)).read_bytes()
    return open_manifest(data, run=run.name, publishers=None)


def deltas_of(way: str, start: str) -> tuple[int, list[int]]:
    """The version that a fetch started from, `held` or `fetched`, and the deltas onto it."""
    match = re.search(WAY.format(start), way)
    assert match is not None, way
    return int(match[1]), [int(number) for number in match[2].split(", ")]


def test_followers_fetch_deltas_and_a_late_joiner_an_anchor_with_the_deltas_after_it(
    finished: SiteRun, home: Path
) -> None:
    run = finished
    # then every version but the first was a delta of the one before
    stored = stored_versions(run.dir / "store" / "origin", run.name)
    found = {version: manifest(run, version) for version in stored}
    assert found[0].is_anchor
    assert all(m.base == v - 1 and not m.is_anchor for v, m in found.items() if v)
    # and those who held one fetched what changed, a small part of it
    validator = run.log("validator").read_text(errors="replace")
    volunteer = FETCHED.findall(words_of(home))
    whole = [n for n, (_, way, *_) in enumerate(volunteer) if "from held" not in way]
    assert len(whole) == 2 and whole[0] == 0, "once a time it came with nothing"
    before, after = volunteer[: whole[1]], volunteer[whole[1] :]
    for fetched in (before, FETCHED.findall(validator)):
        assert len(fetched) > 3
        for version, way, received, size in fetched[1:]:
            base, deltas = deltas_of(way, "held")
            assert deltas == list(range(base + 1, int(version) + 1))
            assert int(received) < len(deltas) * int(size) / 5
    # and the joiner went by the anchor and every delta after it
    version, way, received, size = after[0]
    assert deltas_of(way, "fetched") == (0, list(range(1, int(version) + 1)))
    assert int(received) > int(size) * 0.9
    # and everybody has the bits that were exported
    exported, compared = weights_folder(run.dir), 0
    own = run.machines.on("validator") / "validator-0" / "work"
    for held in (home / "volunteer" / "weights", own / "weights"):
        for version in set(versions_in(held)) & set(versions_in(exported)):
            names = [folder / f"v{version}" / "model.safetensors" for folder in (held, exported)]
            assert names[0].read_bytes() == names[1].read_bytes(), f"{held}: version {version}"
            compared += 1
    assert compared >= 2
