"""What a user sees of a run with islands: by one row, and by hand-computed numbers."""

from __future__ import annotations

import json
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runspec.cli.status import describe_command, read_status, status_command
from runspec.cli.view import LiveView, step_line
from runspec.core.spec.resolved import FILE_NAME, dump_resolved
from runspec.local.endpoints import Endpoints, save_endpoints
from runspec.local.metrics import summarise
from runspec.local.report import REPORT_FILE, write_summary
from runspec.local.run_dir import hold
from runspec.local.state import RunState
from tests.runspec.local.dashboard.exported import report
from tests.runspec.local.test_supervised import row as one_learner
from tests.runspec.supervised import supervised_spec

WHY = "no share offered, 60 s after the quorum of 2"


def row(step: int, **commit: Any) -> dict[str, Any]:
    """A line of the first of three islands, which has a quarter of the weight."""
    islands = {
        "step": step,
        "contributors": ["a", "b", "c"],
        "dropped": {},
        "part": 0.25,
        "share_bytes": 4_000_000,
        "received_bytes": 8_000_000,
        "share_norm": 2.0 + step,
        "cosine": 0.5,
        "settle_s": 0.9,
        **commit,
    }
    return {
        **one_learner(step),
        "tokens": 1000,
        "train_s": 3.0,
        "wait_s": 1.0,
        "waits": {"islands": 0.8, "input": 0.2},
        "waited_for": "islands",
        "learner_busy_fraction": 0.75,
        "islands": islands,
    }


DROPPED = row(1, contributors=["a", "b"], dropped={"c": WHY}, received_bytes=4_000_000)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    islands = {"members": [{"name": name} for name in "abc"]}
    run_dir = folder / "reads"
    run_dir.mkdir()
    (run_dir / FILE_NAME).write_bytes(dump_resolved(supervised_spec(learner={"islands": islands})))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    for store, sent in (("origin", 5), ("shares-a", 70), ("shares-b", 8)):
        (run_dir / "store" / store).mkdir(parents=True)
        (run_dir / "store" / store / "served.json").write_text(json.dumps({"bytes": sent}))
    with closing(RunState(run_dir)):
        pass
    return run_dir


def test_a_step_names_who_is_missing_and_what_was_waited_for() -> None:
    # 1,000 tokens in 4 s are a quarter of the islands'
    assert "  1,000 tok/s  MFU 41 %  waited 25 %, most for the islands  islands 3/3" in step_line(
        [row(0)], 9
    )
    assert step_line([DROPPED], 9).endswith("  islands 2/3 without c")
    # and the input is still what a run with one learner waits for
    assert step_line([one_learner(0)], 9).endswith("waited for input 10 %")


def test_status_and_describe_say_what_the_exchange_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write(tmp_path, [row(0), DROPPED])
    status_command("reads", False, tmp_path)
    status = capsys.readouterr().out
    describe_command("reads", tmp_path)
    described = capsys.readouterr().out
    for text in (
        "step 1, shares of a, b",
        f"c: {WHY}",
        "norm 3, cosine to the others' 0.5",
        "4 MB up to each island that fetches it, 4 MB down",
        "waited for 0.8 s of the step (20 %); busy 75 %",
        "about 1,000 tokens/s",
    ):
        assert text in status and text in described
    found = read_status(run_dir)["islands"]
    assert found["dropped"] == {"c": WHY}
    assert (found["wait_s"], found["wait_share"], found["busy"]) == (0.8, 0.2, 0.75)
    assert found["tokens_per_s"] == 1000.0


def test_an_island_that_is_not_in_the_mean_knows_no_sum() -> None:
    shown = step_line([row(0, contributors=["b"], dropped={"a": "x", "c": "y"}, part=None)], 9)
    assert "  - tok/s" in shown and shown.endswith("islands 1/3 without a, c")


def test_the_panel_has_the_islands() -> None:
    shown: list[Any] = []

    class Screen:
        console = Console(width=120)

        def update(self, group: Any, *, refresh: bool) -> None:
            shown.append(group)

    LiveView("reads", 9, Screen()).show([DROPPED], [], "")  # type: ignore[arg-type]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(shown[0])
    text = capture.get()
    for part in ("of all islands", "most for the islands", f"c: {WHY}", "cosine to the others'"):
        assert part in text


def test_the_summary_sums_up_the_exchange(tmp_path: Path) -> None:
    # given a run of two steps, the second without c
    run_dir = write(tmp_path, [row(0), DROPPED])
    # when it is summed up
    summary = write_summary(run_dir, 8.0)
    # then bytes of shares are not counted as weights
    assert summary is not None
    assert summary["weights_bytes_sent"] == 5
    assert summary["islands"] == {
        "dropped": {"c": 1},
        "share_bytes": 4_000_000,
        "sent_bytes": 78,
        "received_bytes": 12_000_000,
        "share_norm_first": 2.5,
        "share_norm_last": 2.5,
        "cosine_first": 0.5,
        "cosine_last": 0.5,
        "wait_share": pytest.approx(0.2),
        "tokens_per_s": 1000.0,
    }
    assert summary["input_wait_share"] == pytest.approx(0.05)
    # and the page shows it
    page = report(run_dir / REPORT_FILE)
    titles = [figure["title"] for figure in page["figures"]["Islands"]]
    assert {"Agreement", "Contributors"} <= {*titles}
    facts = [text for _, text in page["head"]["facts"]]
    assert "c in 1 steps" in facts and "78 B / 12 MB" in facts
    # and a run with one learner has none of it
    assert summarise([one_learner(0)], wall_s=1.0, weights_bytes_sent=0)["islands"] is None


def test_islands_that_are_waited_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a live run whose coordinator lacks the share of c
    run_dir = write(tmp_path, [row(0)])
    save_endpoints(run_dir, Endpoints("http://127.0.0.1:1", "http://127.0.0.1:2", {}))
    members = [{"name": name, "offered": name != "c"} for name in "abc"]
    islands = {"committed": 1, "waiting_for": {"c": "no share offered"}, "members": members}
    module = import_module("runspec.cli.status")
    monkeypatch.setattr(module, "coordinator_status", lambda url: {"islands": islands})
    text = "for the shares of step 1 (c: no share offered)"
    # then it is shown while the run is up
    with hold(run_dir):
        status_command("reads", False, tmp_path)
        assert f"waits {text}\n" in capsys.readouterr().out
        describe_command("reads", tmp_path)
        assert text in capsys.readouterr().out
        # but not while all train
        for member in members:
            member["offered"] = False
        status_command("reads", False, tmp_path)
    status_command("reads", False, tmp_path)
    assert "waits for" not in capsys.readouterr().out
