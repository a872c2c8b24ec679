"""The page's data: rollouts, sections, one file of all, and who may read it, here and elsewhere."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import initial_model
from runspec.core.schema import Hardware
from runspec.core.signed import SigningKey
from runspec.local.dashboard.overview import Tile, events_shown, standing, tiles
from runspec.local.dashboard.page import PageData, exported_page, live_page
from runspec.local.dashboard.rollouts import FIELDS, Rollouts
from runspec.local.dashboard.server import TOKEN, Dashboard, is_loopback
from runspec.local.dashboard.source import CoordinatorSource, FolderSource, Source
from runspec.local.state import EventRow
from tests.runspec.local.dashboard.made_run import (
    REASON,
    MadeRun,
    Page,
    bytes_tokenizer,
    metrics_row,
)
from tests.runspec.local.fake_run import ZERO, small_spec
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import check, sample
from verify.coordinator.machine.events import RolledBack
from verify.formats.findings import Finding, sign_finding

AT = {name: i for i, name in enumerate(FIELDS)}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=y>&amp;"


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """Ten steps, two of which were rejected; read only."""
    made = MadeRun(tmp_path_factory.mktemp("runs"), say=lambda *at: f"{HOSTILE} {at}")
    made.add_steps(10)
    return made


@pytest.fixture
def run(ten: MadeRun, tmp_path: Path) -> MadeRun:
    """A copy to change."""
    shutil.copytree(ten.dir, tmp_path / "small")
    copied = copy(ten)
    copied.dir = tmp_path / "small"
    return copied


def read(run: MadeRun, most: int = 1000) -> Rollouts:
    source = FolderSource(run.dir)
    found = Rollouts(source, most)
    for _, event in source.events(0):
        found.take(event)
    found.read(60.0)
    return found


def view_of(source: Source, *trusted: str) -> PageData:
    view = PageData(source, trusted)
    view.refresh(60.0)
    assert view.trouble == ""
    return view


def answer(view: PageData) -> dict[str, Any]:
    found = json.loads(view.answer({}))
    return {name: part[1] for name, part in found.items() if name != "trouble"}


def column(rows: list[list[Any]], name: str) -> list[Any]:
    return [row[AT[name]] for row in rows]


def test_each_rollout_has_its_outcome_advantage_and_failed_check(ten: MadeRun) -> None:
    rollouts = read(ten)
    rows = rollouts.changes(-1)["rows"]
    # then one failed a check in each of two steps, which rejected the others of its submission too
    assert Counter(column(rows, "outcome")) == {"trained": 8 * 8, "rejected": 2 * 8}
    rejected = [row for row in rows if row[AT["outcome"]] == "rejected"]
    assert {*column(rejected, "step")} == {4, 9}
    assert Counter(column(rows, "check")) == {None: 78, "toploc": 2}
    # and advantages are rewards less their group's mean
    assert {*column(rows, "advantage")} == {-0.5, 0.5}
    # and a detail shows the check with its number and limit, pieces of the output, both log-probs
    [failed, _] = [row for row in rows if row[AT["check"]]]
    detail = rollouts.detail(failed[AT["id"]])
    assert detail is not None and detail["reason"] == REASON
    assert detail["checks"][1] == ["toploc", False, 9.0, 8.0, "9 errors"]
    assert "".join(detail["pieces"]) == f"{HOSTILE} {(failed[AT['step']], 0, 3)}"
    assert set(detail["logprobs"]) == {-0.5} and set(detail["recomputed"]) == {-0.25}
    assert rollouts.detail(10**6) is None
    # and the prompt's words are at the first of a group alone
    words = [row[AT["words"]] for row in rows if row[AT["group"]] == failed[AT["group"]]]
    assert words == [f"Prompt {failed[AT['step']]} 0", None, None, None]
    # and words are found in whatever case
    for text, found in (("ONERROR=Y>&AMP; (3, 1, 2", 1), ("Problem-3 prompt", 8), ("no", 0)):
        assert len(rollouts.search(text)) == found


def test_only_new_rollouts_are_sent_and_those_that_a_rollback_took(run: MadeRun) -> None:
    # given a reader that knows ten steps
    source, rollouts = FolderSource(run.dir), read(run)
    known, events = rollouts.revision, list(source.events(0))
    assert rollouts.changes(known)["rows"] == []
    # when a step is trained, then its rollouts are sent, and no others
    run.add_steps(1)
    for _, event in source.events(events[-1][0]):
        rollouts.take(event)
    rollouts.read(60.0)
    assert {*column(rollouts.changes(known)["rows"], "step")} == {10}
    known = rollouts.revision
    rollouts.take(RolledBack(0.0, 9))
    assert len(rollouts.changes(known)["removed"]) == 2 * 8
    assert {*column(rollouts.changes(-1)["rows"], "step")} == set(range(9))
    # and the newest are listed where there are too many, and files that are gone are counted
    assert {*column(read(run, most=32).changes(-1)["rows"], "step")} == {7, 8, 9, 10}
    for step in range(5):
        shutil.rmtree(run.dir / "rollouts" / f"step_{step}")
    changes = read(run).changes(-1)
    assert (changes["unreadable"], len(changes["rows"])) == (5, 48)


def test_a_section_is_sent_again_only_once_it_changed(run: MadeRun) -> None:
    view = view_of(FolderSource(run.dir))
    first = json.loads(view.answer({}))
    known = {name: first[name][0] for name in ("head", "figures", "timeline", "rollouts")}
    view.refresh(60.0)
    assert json.loads(view.answer(known)) == {"trouble": ""}
    # when a step is trained, then what changed is sent, and of rollouts the new ones
    run.add_steps(1)
    view.refresh(60.0)
    changed = json.loads(view.answer(known))
    assert changed["head"][1]["step"] == 11
    assert len(changed["rollouts"][1]["rows"]) == 8
    # and a run that cannot be read keeps what was read
    (run.dir / "state.db").write_bytes(b"no database" * 100)
    view.refresh()
    assert "state.db" in view.trouble and len(answer(view)["rollouts"]["rows"]) == 88


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export has all the time that it needs."""
    monkeypatch.setattr("runspec.local.dashboard.page.MAX_DECODING_S", 600.0)


@pytest.mark.usefixtures("patient")
def test_a_page_fetches_nothing_runs_its_own_scripts_alone_and_holds_text_as_data(
    ten: MadeRun,
) -> None:
    page = exported_page([view_of(FolderSource(ten.dir))])
    tags = Page(page).tags
    [policy] = [attrs["content"] or "" for tag, attrs in tags if "http-equiv" in attrs]
    scripts = [attrs for tag, attrs in tags if tag == "script"]
    assert policy.count("sha256-") == len(scripts) - 1, "each but the data"
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe-eval" not in policy and "script-src 'unsafe" not in policy
    names = {name for _, attrs in tags for name in attrs}
    assert names.isdisjoint({"src", "srcset", "onerror", "onclick"})
    assert [attrs["href"] for _, attrs in tags if "href" in attrs] == ["data:,"]
    assert HOSTILE not in page
    pieces = Page(page).data["runs"][0]["details"]["0"]["pieces"]
    assert "".join(pieces).startswith(HOSTILE)
    # and a live one asks its own server alone
    assert "connect-src 'self'" in live_page(["small"])
    assert Page(live_page(["small"])).data == {"live": True, "names": ["small"]}


@pytest.mark.usefixtures("patient")
def test_an_export_leaves_out_what_does_not_fit_and_says_so(ten: MadeRun) -> None:
    view = view_of(FolderSource(ten.dir))
    whole = Page(exported_page([view])).data["runs"][0]["rollouts"][1]
    assert len(whole["rows"]) == 80 and whole["left_out"] == 0
    # when there is room for few
    empty = len(exported_page([view], 0))
    page = exported_page([view], empty + 60_000)
    # then texts of rejected ones come first, whole groups, then the newest and the oldest
    assert len(page) <= empty + 60_000
    [run] = Page(page).data["runs"]
    part = run["rollouts"][1]
    steps = column([row for row in part["rows"] if str(row[0]) in run["details"]], "step")
    assert steps[:16] == [9] * 8 + [4] * 8 and steps[16:24] == [8] * 4 + [0] * 4
    # and rows without a text are listed while they take little room
    assert part["left_out"] == 0 and len(part["rows"]) == 80 > len(steps)
    least = Page(exported_page([view], empty + 6_000)).data["runs"][0]["rollouts"][1]
    assert least["left_out"] == 80 - len(least["rows"]) > 0


def test_the_overview_says_what_matters(ten: MadeRun) -> None:
    head = answer(view_of(FolderSource(ten.dir)))["head"]
    # given a paused run on one validator, whose steps 4 and 9 were rejected
    shown = {tile["name"]: (tile["value"], tile["note"]) for tile in head["tiles"]}
    assert shown["Lag, steps"] == ("1.2", "at most 2 steps, 2 allowed")
    assert shown["Rejected rollouts"] == ("0", "0 % of 80")
    assert all(value and value != "-" for value, _ in shown.values()) and "Cost" not in shown
    assert head["now"].startswith("The run is paused: for a test. 10 steps in 0 s, 80 rollouts")
    [validator] = head["validators"]
    assert (validator["judged"], validator["rejected"], validator["verdict_s"]) == (10, 2, 1.0)
    # and no fact is without a number
    assert "-" not in [text.strip("- /") or "-" for _, text in head["facts"]]


def test_a_live_run_says_for_whom_it_waits_and_what_it_costs() -> None:
    spec, rows = small_spec("small", 40), [metrics_row(step) for step in range(20)]
    priced = {"hardware": Hardware(kind="h100", price_per_hour=2.5)}
    spec = spec.model_copy(update={"learner": spec.learner.model_copy(update=priced)})
    now = {"state": "running", "reason": "", "diagnosis": [], "wall_s": 3600.0}
    now |= {"waiting_for": "validators (2 submissions)", "stages": {"learner": "compiling"}}
    found = {tile.name: tile for tile in tiles(spec, rows, [ZERO, replace(ZERO, version=9)], now)}
    # then the tiles are those of the figures that there are, coloured by what they say
    assert found["Time left"].value == "3 min 20 s"
    assert found["Cost"] == Tile("Cost", "2.50", "2.5 an hour, about 2.64 in the end")
    assert found["Held-out, task reward"] == Tile(
        *("Held-out, task reward", "0.25", "0.25 at version 0", "warn", [0.25, 0.25])
    )
    states = {name: tile.state for name, tile in found.items()}
    assert states["Task reward"] == states["Length error, tokens"] == "good"
    told = standing(now, rows, 40, "")
    assert told.startswith(
        "Step 21 of 40: learner: compiling; waits for validators (2 submissions);"
    )
    # and without targets there is no length error, and a reward of zero is red
    bare = [row | {"length_error": None, "task_reward": 0.0} for row in rows]
    red = {tile.name: tile.state for tile in tiles(spec, bare, [], now)}
    assert red["Task reward"] == "bad" and "Length error, tokens" not in red
    # and starts and ends are set apart from events that matter
    result = "held-out of version 8: mean 0.5 (0.4 to 0.6)"
    ended = ("ended with exit code 0, finished", "lost its disk", f"{result}, pass-2 0.7")
    texts = ("starting (process 1)", "running", *ended)
    shown = events_shown([EventRow(1.0, "learner", t, i) for i, t in enumerate(texts)])
    assert [text for *_, text in shown["events"]] == [result, "lost its disk"]
    assert len(shown["routine"]) == 3


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        # elsewhere a token is needed
        ("secret", {}, 401),
        ("secret", {TOKEN: "secret2"}, 401),
        ("secret", {TOKEN: "s\udcffcret\udc80"}, 401),
        ("secret", {TOKEN: "secret"}, 200),
        # on loopback another site's page, by a name that leads here, is refused
        (None, {"Host": "evil.example:80"}, 403),
        (None, {"Host": "localhost:1"}, 200),
    ],
)
async def test_only_this_machine_or_who_has_the_token_may_read(
    ten: MadeRun, token: str | None, headers: dict[str, str], status: int
) -> None:
    app = Dashboard([view_of(FolderSource(ten.dir))], token).application()
    async with TestClient(TestServer(app)) as client:
        for path in ("/api/0", "/api/0/search?q=out", "/api/0/rollout/0"):
            assert (await client.get(path, headers=headers)).status == status
        # the page itself holds no data
        got = await client.get("/")
        assert got.status == 200 and "onerror=y" not in await got.text()
        assert got.headers["Referrer-Policy"] == "no-referrer"
        missing = ("/api/1", "/api/0/rollout/99", "/api/0/rollout/x", "/../etc/passwd")
        for path in missing if status == 200 else ():
            assert (await client.get(path, headers=headers)).status == 404
        # and what a query says fails nothing
        odd = ("?head=" + "9" * 30, "?figures=-1&rollouts=%00", "/search?q=%ff%00[", "/search")
        for query in odd if status == 200 else ():
            assert (await client.get(f"/api/0{query}", headers=headers)).status == 200
    here = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "a.b": False}
    assert {host: is_loopback(host) for host in here} == here


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A live coordinator with one rejected and one accepted submission, and two trained steps."""
    monkeypatch.setattr("runspec.local.dashboard.source.DEADLINE_S", 600.0)
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    folder = initial_model(site.run_dir)
    folder.mkdir()
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    lines = [json.dumps(metrics_row(step)) + "\n" for step in range(2)]
    (site.run_dir / "metrics.jsonl").write_text("".join(lines))
    found = Finding(site.run, 0, 1, ["0" * 64] * 2, "refuted", "NOT", share=0.5, finished=1.0)
    write_atomic(site.run_dir / "findings" / "0.json", sign_finding(found, site.root))
    with site.origin(), site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        sample(site, key, worker)
        check(site, validator)
        sample(site, key, worker, note=1)
        check(site, validator, accepted=False)
        yield site


def test_a_page_elsewhere_shows_what_the_run_directory_does(site: Site) -> None:
    # when a page reads over HTTP with the coordinator's key
    watcher = site.root.public_hex
    remote = view_of(CoordinatorSource(site.url, site.coordinator), watcher)
    local = view_of(FolderSource(site.run_dir))
    there, here = answer(remote), answer(local)
    # then rollouts, curves and timeline are the same
    assert len(there["rollouts"]["rows"]) == 8
    for section in ("rollouts", "figures", "timeline"):
        assert there[section] == here[section]
    assert remote.rollouts.detail(0) == local.rollouts.detail(0)
    head = there["head"]
    # and whose findings count is the reader's to say
    words = "{} steps checked by keys that you trust, {} more reported by others"
    rows = [[["0 to 0", "refuted", f"{how} by {watcher[:16]}"]] for how in ("checked", "reported")]
    assert head["findings"] == {"words": words.format(1, 0), "rows": rows[0]}
    assert here["head"]["findings"] == {"words": words.format(0, 1), "rows": rows[1]}
    assert (head["state"], head["step"], head["published"]) == ("running", 2, 0)
    # and what comes later, too, also where the learner trains a step again
    (site.run_dir / "metrics.jsonl").write_text(json.dumps(metrics_row(0)) + "\n")
    remote.refresh()
    assert answer(remote)["head"]["step"] == 1


def test_only_the_coordinators_own_key_may_read(site: Site) -> None:
    for key in (site.validator, site.publisher, SigningKey.generate()):
        # given a source that has read the spec with the right key
        source = CoordinatorSource(site.url, site.coordinator)
        source._http._key = key
        # then with another one it gets nothing that is not public
        for reads in (
            source.tokenizer,
            source.rows,
            lambda source=source: list(source.events(0)),
            lambda source=source: source.table("submission", 0, "ab" * 32),
        ):
            with pytest.raises(UserError, match=r": 40[13], "):
                reads()
        # and a page with that key refuses the spec, which another key signed
        with pytest.raises(UserError, match="signed with another key"):
            CoordinatorSource(site.url, key)
