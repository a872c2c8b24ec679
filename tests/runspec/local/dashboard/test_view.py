"""Sections of the page, the timeline, and the page as one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.local.dashboard.page import exported_page, live_page
from runspec.local.dashboard.source import FolderSource
from runspec.local.dashboard.view import RunView, thinned
from runspec.local.plots import figures
from tests.runspec.local.dashboard.exported import Page
from tests.runspec.local.dashboard.made_run import BEGAN, REASON, MadeRun, metrics_row

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=y>&amp;"


def view_of(run: MadeRun) -> RunView:
    view = RunView(FolderSource(run.dir))
    view.refresh(60.0)
    assert view.trouble == ""
    return view


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path, say=lambda s, g, n: f"{HOSTILE} {s}-{g}-{n}")
    made.add_steps(10)
    return made


def test_a_section_is_sent_again_only_once_it_changed(run: MadeRun) -> None:
    # given a page that knows everything
    view = view_of(run)
    first = json.loads(view.answer({}))
    assert {"head", "figures", "timeline", "rollouts"} <= first.keys()
    known = {name: first[name][0] for name in ("head", "figures", "timeline", "rollouts")}
    view.refresh(60.0)
    assert json.loads(view.answer(known)) == {"trouble": ""}
    # when a step is trained
    run.add_steps(1)
    view.refresh(60.0)
    # then what changed is sent, and of rollouts the new ones
    changed = json.loads(view.answer(known))
    assert changed["head"][1]["step"] == 11
    assert len(changed["rollouts"][1]["rows"]) == 8


def test_the_head_says_how_far_the_run_is(run: MadeRun) -> None:
    head = json.loads(view_of(run).answer({}))["head"][1]
    assert (head["state"], head["reason"], head["step"]) == ("paused", "for a test", 10)
    assert ["Task reward", pytest.approx(0.3225), pytest.approx(0.3225)] in head["ends"]
    assert head["workers"][0]["rejected_submissions"] == 2
    assert [server["name"] for server in head["servers"]] == ["origin", "relay-local"]


def test_the_timeline_has_who_worked_and_who_waited(run: MadeRun) -> None:
    timeline = json.loads(view_of(run).answer({}))["timeline"][1]
    assert timeline["origin"] == BEGAN
    lanes = dict(timeline["lanes"])
    assert [*lanes] == [
        *("learner", "publisher", "coordinator", "validator bbbbbbbb", "volunteers aaaaaaaa")
    ]
    assert lanes["volunteers aaaaaaaa"][0] == [
        *(0.5, 3.0, "sampling", "step 0: 2 groups by version 0")
    ]
    assert lanes["validator bbbbbbbb"][4] == [43.0, 44.0, "rejected", f"step 4: {REASON}"]
    # and the learner's waits by whom they were for, then its work
    assert [span for span in lanes["learner"] if "step 1:" in span[3]] == [
        [13.7, 13.9, "waiting", "step 1: waits for the coordinator"],
        [13.9, 14.0, "waiting", "step 1: waits for the checkpoint"],
        [14.0, 20.0, "training", "step 1: trains"],
    ]


def test_long_curves_are_means_of_neighbours() -> None:
    points = [(float(i), float(i % 2)) for i in range(4000)]
    few = thinned(points, 1000)
    assert len(few) == 1000 and few[-1] == (3999.0, 0.5)
    assert thinned(points[:10]) == points[:10]


def test_figures_without_numbers_are_left_out() -> None:
    # given a run on a CPU, whose peak nobody knows
    rows = [{**metrics_row(step), "mfu": None, "mfu_update": None} for step in range(3)]
    drawn = figures(rows)
    # then there is no figure of MFU, and waits are drawn by whom they were for, a 0 where none was
    assert [figure.title for figure in drawn["Time"]] == [
        "Busy share",
        "Wait for a verdict and for training",
        "The learner's seconds",
        "Learner's speed",
    ]
    curves = {curve.label: list(curve.points) for curve in drawn["Time"][2].curves}
    assert curves["for the coordinator"] == [(0, 0.0), (1, 0.2), (2, 0.0)]
    assert curves["for the checkpoint"] == [(0, 0.0), (1, 0.1), (2, 0.0)]
    assert figures([{"step": 0}]) == {}


def test_a_page_fetches_nothing_and_runs_its_own_scripts_alone(run: MadeRun) -> None:
    page = exported_page([view_of(run)])
    tags = Page(page).tags
    [policy] = [attrs["content"] or "" for tag, attrs in tags if "http-equiv" in attrs]
    scripts = [attrs for tag, attrs in tags if tag == "script"]
    assert policy.count("sha256-") == len(scripts) - 1, "each but the data"
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy and "script-src 'unsafe" not in policy
    names = {name for _, attrs in tags for name in attrs}
    assert names.isdisjoint({"src", "srcset", "onerror", "onclick"})
    assert [attrs["href"] for _, attrs in tags if "href" in attrs] == ["data:,"]
    # and a live one asks its own server alone
    assert "connect-src 'self'" in live_page(["small"])
    assert Page(live_page(["small"])).data == {"live": True, "names": ["small"]}


def test_what_a_model_says_is_data(run: MadeRun) -> None:
    page = exported_page([view_of(run)])
    assert HOSTILE not in page
    data = Page(page).data["runs"][0]
    assert "".join(data["details"]["0"]["pieces"]).startswith(HOSTILE)


def test_an_export_leaves_out_what_does_not_fit_and_says_so(run: MadeRun) -> None:
    view = view_of(run)
    whole = Page(exported_page([view])).data["runs"][0]["rollouts"][1]
    assert len(whole["rows"]) == 80 and whole["left_out"] == 0
    # when there is room for few
    empty = len(exported_page([view], 0))
    page = exported_page([view], empty + 60_000)
    # then rejected ones come first, whole groups, then the newest and the oldest
    assert len(page) <= empty + 60_000
    part = Page(page).data["runs"][0]["rollouts"][1]
    at = part["fields"].index("step")
    steps = [row[at] for row in part["rows"]]
    assert steps[:16] == [9] * 8 + [4] * 8 and steps[16:24] == [8] * 4 + [0] * 4
    assert part["left_out"] == 80 - len(steps) > 0


def test_a_run_that_cannot_be_read_keeps_what_was_read(run: MadeRun) -> None:
    view = view_of(run)
    (run.dir / "state.db").write_bytes(b"no database" * 100)
    view.refresh()
    assert "state.db" in view.trouble
    assert len(json.loads(view.answer({}))["rollouts"][1]["rows"]) == 80
