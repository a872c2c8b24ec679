"""What people see while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console
from rich.live import Live

from runspec.cli.view import LiveView, PlainView
from runspec.local.state import RoleRow

ROW = {
    "step": 11,
    "task_reward": 0.4567,
    "reward": -0.2,
    "length_error": 7.89,
    "lag_mean": 1.25,
    "lag_max": 2,
    "tokens_per_s": 4000.0,
    "sampler_tokens_per_s": 8123.4,
}
ROLES = [
    RoleRow("learner", "running", 0, 41, 7, 0.0),
    RoleRow("relay-eu", "backoff", 3, None, None, 0.0),
]


def test_plain_lines_say_every_change_but_not_every_step() -> None:
    out = io.StringIO()
    view = PlainView(150, out)
    view.event("learner", "starting (process 41)")
    for step in range(40):
        view.show([{**ROW, "step": step}], ROLES, "")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("learner: starting (process 41)")
    assert len(lines) == 2, "forty steps at once are one line"
    view.show([{**ROW, "step": 149}], ROLES, "")
    assert "step 150/150" in out.getvalue(), "the last step is always said"


def test_the_live_panel_shows_the_run_and_each_role() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Live(console=console, auto_refresh=False) as live:
        view = LiveView("small", 150, live)
        view.show([], ROLES, "warm start: update 10")
        view.event("relay-eu", "killed by SIGKILL, starts again")
        view.event("evaluator", "held-out of version 8: mean 0.5")
        for _ in range(4):  # others push the event out
            view.event("learner", "starts again")
        view.show([{**ROW, "step": n, "time": 100.0 + 2 * n} for n in range(12)], ROLES, "")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in ("warm start: update 10", "12/150", "0.457", "8,123", "relay-eu", "backoff", "41"):
        assert text in shown
    # and the newest evaluation, and the time that is left
    assert "held-out of version 8: mean 0.5" in shown
    assert "about 4 min 36 s left" in shown
