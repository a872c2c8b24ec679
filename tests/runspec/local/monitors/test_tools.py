"""TensorBoard, Weights & Biases and trackio have what the run directory has, by their own files."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from wandb.proto.wandb_internal_pb2 import Record

from runspec.core.process import EXIT_USER_ERROR, RunStopped
from tests.harness import ROOT
from tests.runspec.local.monitors.logged_run import KEYS, STEPS, LoggedRun, row

pytestmark = pytest.mark.slow

TRACKIO = Path(os.environ.get("TRACKIO_PYTHON", ROOT / ".venv" / "trackio" / "bin" / "python"))
MEAN = "evaluations/held-out/mean"


@dataclass(frozen=True)
class Sent:
    """What a tool has."""

    steps: list[dict[str, Any]]
    """Figures by step, in the order of arrival."""
    evaluated: list[tuple[int, float, float]]
    """Version, mean, and its lower limit."""
    rollouts: dict[int, str]
    """Text by step."""
    spec: dict[str, Any]


def of_tensorboard(run: LoggedRun) -> Sent:
    """The newest record, by TensorBoard's own reader; values are float32."""
    newest = max(run.folder.glob("small-*"), key=lambda path: path.stat().st_ctime_ns)
    sizes = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    found = event_accumulator.EventAccumulator(str(newest), size_guidance=sizes).Reload()
    scalars = {name: found.Scalars(name) for name in found.Tags()["scalars"]}

    def texts(tag: str) -> dict[int, str]:
        known = found.Tensors(tag) if tag in found.Tags()["tensors"] else []
        return {event.step: event.tensor_proto.string_val[0].decode() for event in known}

    steps = []
    for i, event in enumerate(scalars["figure_0"]):
        named = {name: scalars[name][i] for name in scalars if not name.startswith("eval")}
        times = {(each.step, each.wall_time) for each in named.values()}
        assert times == {(event.step, 1.7e9 + event.step)}
        steps.append({"step": event.step} | {name: each.value for name, each in named.items()})
    means, lows = scalars.get(MEAN, []), scalars.get(f"{MEAN}/low", [])
    evaluated = [(a.step, a.value, b.value) for a, b in zip(means, lows, strict=True)]
    spec = "".join(line.removeprefix("    ") for line in texts("spec")[0].splitlines(True))
    return Sent(steps, evaluated, texts("rollouts"), json.loads(spec))


def records(path: Path) -> Iterator[Record]:
    """Yield the whole records of a .wandb file, by the log format of LevelDB: blocks of 32 KiB with
    parts of records, and before each part seven bytes (checksum, length, kind)."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        if len(part) < length:
            return
        if kind:
            record = part if kind in (1, 2) else record + part
            if kind in (1, 4):
                yield Record.FromString(record)
        at += 7 + length
        left = -at % (32 * 1024)
        at += left if left < 7 or not kind else 0


def of_wandb(run: LoggedRun) -> Sent:
    rows: list[dict[str, Any]] = []
    # given all sessions by their start, as `wandb sync` sends them
    for path in sorted(run.folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            items = record.history.item
            if found := {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}:
                rows.append(found)
    assert {each["_step"] for each in rows} == set(range(rows[-1]["_step"] + 1))
    pages = run.folder.glob("wandb/offline-run-*/files/media/html/rollouts_*.html")
    text = "".join(path.read_text() for path in pages)
    path = min(run.folder.glob("wandb/offline-run-*/*.wandb"))
    config = next(each.run.config for each in records(path) if each.HasField("run"))
    return Sent(
        [each for each in rows if "figure_0" in each],
        [(each["version"], each[MEAN], each[f"{MEAN}/low"]) for each in rows if MEAN in each],
        dict.fromkeys((each["step"] for each in rows if "rollouts/path" in each), text),
        {each.key: json.loads(each.value_json) for each in config.update},
    )


def of_trackio(run: LoggedRun) -> Sent:
    with closing(sqlite3.connect(run.folder / "mine.db")) as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        rows = [(name, {"step": step, **json.loads(values)}) for name, step, values in found]
        [[config]] = database.execute("SELECT config FROM configs")
    assert len({name for name, _ in rows}) == 1
    values = [each for _, each in rows]
    return Sent(
        [each for each in values if "figure_0" in each],
        [(each["step"], each[MEAN], each[f"{MEAN}/low"]) for each in values if MEAN in each],
        {each["step"]: json.dumps(each["rollouts"]) for each in values if "rollouts" in each},
        json.loads(config),
    )


@dataclass(frozen=True)
class Tool:
    monitor: str
    """As YAML writes it."""
    sent: Callable[[LoggedRun], Sent]
    texts: tuple[str, ...]
    """In what it has of the rollouts: what a model wrote is neither Markdown nor HTML."""
    kept: Callable[[float], float] = float
    """Its precision."""


BLOCK = ("    # spell\n    *cat*\n\n    tac<eos>",)
PAGES = ("<pre># spell\n*cat*</pre>", "<pre>tac&lt;eos&gt;</pre>")
TOOLS = [
    pytest.param(Tool("tensorboard", of_tensorboard, BLOCK, np.float32), id="tensorboard"),
    pytest.param(Tool("wandb, mode: offline", of_wandb, PAGES), id="wandb"),
    pytest.param(
        Tool(f"trackio, project: mine, python: {TRACKIO}", of_trackio, ("tac<eos>",)),
        id="trackio",
        marks=pytest.mark.skipif(not TRACKIO.is_file(), reason="`make trackio` was not run"),
    ),
]
every_tool = pytest.mark.parametrize("tool", TOOLS)


def require_all(steps: list[dict[str, Any]], tool: Tool, count: int) -> None:
    """Each figure of each step is there; those that were sent when a monitor was killed, twice."""
    assert {each["step"] for each in steps} == set(range(count))
    for i in range(KEYS):
        name = f"figure_{i}"
        expected = [tool.kept(row(each["step"])[name]) for each in steps]
        assert [tool.kept(each[name]) for each in steps] == expected
    assert {each["waits/coordinator"] for each in steps} == {0.5}
    assert not any("waits/input" in each for each in steps)


@every_tool
def test_a_tool_has_steps_evaluations_rollouts_and_the_spec(tmp_path: Path, tool: Tool) -> None:
    # given a run that is over
    run = LoggedRun(tmp_path / "run", f"kind: {tool.monitor}")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    # when a monitor sends it
    run.end()
    # then the tool has it
    sent = tool.sent(run)
    require_all(sent.steps, tool, STEPS)
    assert len(sent.steps) == STEPS
    figures = tool.kept(0.25), tool.kept(0.2)
    assert [(v, tool.kept(mean), tool.kept(low)) for v, mean, low in sent.evaluated] == [
        (version, *figures) for version in (0, 10, STEPS)
    ]
    assert list(sent.rollouts) == [0, 10, 20]
    assert all(words in text for text in sent.rollouts.values() for words in tool.texts)
    assert (sent.spec["name"], sent.spec["steps"]) == ("small", STEPS)


@every_tool
def test_killed_processes_leave_no_gap_and_send_the_newest_entries_twice_at_most(
    tmp_path: Path, tool: Tool
) -> None:
    # given a run of many steps, and monitors that are killed while they send
    run = LoggedRun(tmp_path / "run", f"kind: {tool.monitor}")
    run.train(range(400))
    run.evaluate(0, 10)
    for entries in (50, 150):
        run.kill_at(entries)
    # when one may work to its end, then each figure is there
    run.end()
    sent = tool.sent(run)
    require_all(sent.steps, tool, 400)
    assert len(sent.steps) <= 1000
    assert {version for version, *_ in sent.evaluated} == {0, 10}
    assert sorted(sent.rollouts) == list(range(0, 400, 10))


def test_a_trackio_that_cannot_start_is_not_tried_again_and_one_that_ends_is_told_of(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    run = LoggedRun(tmp_path / "run", f"kind: trackio, python: {python}")
    with pytest.raises(RunStopped, match=r"cannot start .*python: No such file"):
        run.follow()
    # given an interpreter without trackio, then the monitor ends as one that is started again
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    process = run.process()
    told = process.communicate()[1].decode()
    assert process.returncode == EXIT_USER_ERROR
    assert "its script ended with exit code 7" in told or "Broken pipe" in told


class FakeWandbServer(BaseHTTPRequestHandler):
    """As much of a server of Weights & Biases as a session of ours needs, for one run.

    Names of requests and answers are those of the client, wandb 0.31. It keeps lines of history by
    their offsets, and tells a client that resumes how many there are and what the last one says.
    """

    lines: list[str]
    files: set[str]
    runs: list[str]

    def log_message(self, *words: object) -> None:
        pass

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply({})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = json.loads(gzip.decompress(data) if "Content-Encoding" in self.headers else data)
        if not self.path.endswith("/file_stream"):
            answer = self._answer(sent.get("operationName"), sent.get("variables") or {})
            return self._reply({"data": answer})
        if part := (sent.get("files") or {}).get("wandb-history.jsonl"):
            at, new = part["offset"], part["content"]
            assert at <= len(self.lines), f"lines {len(self.lines)} to {at} are missing"
            self.lines[at : at + len(new)] = new
        return self._reply({"limits": {}})

    def _answer(self, operation: str | None, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "runspec", "entity": {"id": "e", "name": "me"}}
        name = variables.get("name") or "run"
        bucket = {"id": "r", "name": name, "displayName": name, "config": "{}"}
        if operation == "RunResumeStatus":
            resumed = bucket | {"tags": [], "runtime": 0, "logLineCount": 0, "eventsLineCount": 0}
            resumed |= {"historyLineCount": len(self.lines), "summaryMetrics": "{}"}
            resumed |= {"wandbConfig": '{"t": 1}', "eventsTail": "[]"}
            resumed |= {"historyTail": json.dumps(self.lines[-1:])}
            return {"model": {**project, "bucket": resumed if self.runs else None}}
        if operation == "UpsertBucket":
            self.runs.append(name)
            inserted = len(self.runs) == 1
            return {
                "upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": inserted}
            }
        if operation == "CreateRunFiles":
            self.files.update(variables["files"])
            url = f"http://{self.headers['Host']}/up"
            files = [{"name": name, "uploadUrl": url} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}}

    def _reply(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_server_has_each_entry_once_although_a_monitor_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Tool("wandb", of_wandb, ())
    lines, files = list[str](), set[str]()
    answering = type("Server", (FakeWandbServer,), {"lines": lines, "files": files, "runs": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            # given a run whose first monitor is killed, and whose second sends all there is then
            run = LoggedRun(tmp_path / "run", f"kind: {tool.monitor}")
            run.train(range(STEPS))
            run.kill_at(0)
            run.end()
        finally:
            server.shutdown()
    rows = [json.loads(line) for line in lines]
    assert [each["_step"] for each in rows] == list(range(len(rows)))
    require_all([each for each in rows if "figure_0" in each], tool, STEPS)
    assert sum("html/rollouts" in name for name in files) == 3
