"""Monitors as roles of a supervised run: whatever they do, the run is as it is without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from runspec.core.run_files import monitor_folder
from runspec.core.spec.role_names import monitor_names
from runspec.local.processes import role_specs
from tests.runspec.local.fake_run import ROOT, drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.monitors import fake_monitors
from tests.runspec.local.monitors.fake_monitors import entries
from tests.runspec.local.test_supervise import Watch, steps_trained

pytestmark = pytest.mark.slow  # real processes, killed and waited for

STEPS = 30
MONITORS = (
    "monitors=[{name: sound, kind: counting}, {name: killed, kind: counting}, "
    "{name: broken, kind: raising}, {name: stuck, kind: hanging, deadline: 1s}, "
    "{name: absent, kind: unimportable}]"
)


def test_no_monitor_costs_the_run_anything_and_each_failure_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run with a sound monitor, one that is killed, and plug-ins that raise, hang and miss
    packages = fake_monitors.install(tmp_path / "packages")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{packages}")
    victims: list[int] = []
    done: list[bool] = []

    def let_go(watch: Watch) -> None:
        """The run waits after some steps until each monitor has done what it does."""
        hold, told = run.directory / "hold", {name for name, text in watch.events if ": " in text}
        if len(watch.rows) < 5 or done:
            return
        hold.touch()
        killed = watch.roles["monitor-killed"]
        if killed.pid and not victims and entries(monitor_folder(run.directory, "killed")):
            victims.append(killed.pid)
            os.kill(killed.pid, signal.SIGKILL)
        back = killed.restarts == 1 and killed.state == "running"
        if back and told >= {"monitor-broken", "monitor-stuck", "monitor-absent"}:
            done.append(True)
            hold.unlink()

    watch = Watch(let_go)
    spec = small_spec("small", STEPS, MONITORS, "evaluations=null")
    with prepared(spec, tmp_path) as run:
        monitors = role_specs(run, here=set(monitor_names(spec)))
        # when it is driven to its end
        outcome = drive_roles(run, [*usual_roles(run), *monitors], watch)
    # then it has trained every step
    assert outcome.kind == "finished"
    assert steps_trained(run.directory) == list(range(STEPS))
    # and the two that can have sent everything, once
    for name in ("sound", "killed"):
        [rows] = entries(monitor_folder(run.directory, name)).values()
        assert [each["step"] for each in rows] == list(range(STEPS))
    # and what is wrong with the others was told of once
    deaths = [(name, text) for name, text in watch.events if "ended with" in text]
    broken, stuck, absent = (
        [text for name, text in deaths if name == f"monitor-{each}"]
        for each in ("broken", "stuck", "absent")
    )
    assert len(broken) == len(stuck) == len(absent) == 1
    assert broken[0].startswith(
        "ended with exit code 1, starts again: monitors.broken: raising: send failed: "
        "ConnectionError: the tool's server is gone at "
    )
    assert "takes over 1 s: this process ends, to be started again" in stuck[0]
    assert absent[0].startswith("ended with exit code 4, is not started again; the run goes on: ")
    assert json.loads((run.directory / "summary.json").read_text())["steps"] == STEPS
