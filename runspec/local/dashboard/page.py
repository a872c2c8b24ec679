"""A run's page: its data in sections, each with a revision, and the page as one HTML document.

A run's texts are a model's words, and so hostile. They reach the page as JSON and are shown as text
(`page/text.js`); the content security policy lets no script run but the page's own, by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from statistics import fmean
from string import Template
from typing import Any

from runspec.core.errors import UserError
from runspec.core.schema.training import TrainingChange
from runspec.local.dashboard.overview import (
    evaluation_tables,
    facts,
    findings_shown,
    parted,
    plain_tile,
    standing,
    tiles,
    work_line,
)
from runspec.local.dashboard.rollouts import MAX_TOKENS, Rollouts, rounded
from runspec.local.dashboard.source import Source
from runspec.local.diagnosis import SECTION, evaluation_plots
from runspec.local.metrics import ENDS, Row, end_figures, mean, summarise, time_left_s
from runspec.local.plots import Curve, Figure, figures
from verify.coordinator.machine import events
from verify.coordinator.machine.events import Event
from verify.formats.documents import Evaluated

MOST = 4000
"""Newest spans that are kept of each source."""
Span = tuple[str, float, float, str, str]
"""Lane, start and end in seconds since the epoch, kind, label."""


class Timeline:
    """Spans of the newest work."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST)
        self._leases: dict[str, events.LeaseGranted] = {}
        self._received: dict[str, tuple[float, int]] = {}
        """When a submission came, and its step, by lease."""
        self._opened: dict[int, float] = {}
        self._judged: dict[str, list[float]] = {}
        """Submissions, rejected ones, and seconds to all verdicts, by validator."""

    def take(self, event: Event) -> None:
        """Follow an event of the ledger."""
        if isinstance(event, events.LeaseGranted):
            self._leases[event.digest] = event
        elif isinstance(event, events.SubmissionReceived):
            self._lease_ended(event.lease, event.at, "sampling")
        elif isinstance(event, events.LeaseExpired):
            self._lease_ended(event.lease, event.at, "withheld")
        elif isinstance(event, events.LeaseReleased):
            self._leases.pop(event.lease, None)
        elif isinstance(event, events.SubmissionJudged):
            came, step = self._received.pop(event.lease, (event.at, 0))
            label = f"step {step}: {'accepted' if event.accepted else event.reason}"
            kind = "judging" if event.accepted else "rejected"
            judged = self._judged.setdefault(event.validator, [0, 0, 0.0])
            added = (1, not event.accepted, event.at - came)
            judged[:] = (sum(pair) for pair in zip(judged, added, strict=True))
            self._spans.append((f"validator {event.validator[:8]}", came, event.at, kind, label))
        elif isinstance(event, events.NonceDrawn):
            self._opened.setdefault(event.step, event.at)
        elif isinstance(event, events.StepClosed):
            opened = self._opened.pop(event.step, event.at)
            label = f"step {event.step}: {len(event.trained)} groups"
            self._spans.append(("coordinator", opened, event.at, "filling", label))
        elif isinstance(event, events.VersionPublished):
            label = f"version {event.version} is published"
            self._spans.append(("publisher", event.at, event.at, "published", label))

    def _lease_ended(self, digest: str, at: float, kind: str) -> None:
        if (granted := self._leases.pop(digest, None)) is None:
            return
        lease = granted.lease
        label = f"step {lease.step}: {lease.groups} groups by version {lease.version}"
        lane = f"{lease.pool} {lease.worker[:8]}"
        self._spans.append((lane, granted.at, at, kind, label))
        if kind == "sampling":
            self._received[digest] = at, lease.step

    def validators(self, seen: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return all validators: what the coordinator saw of them, and what they judged."""
        known = {each["key"]: each for each in seen}
        away: dict[str, Any] = {"alive": False, "silent_s": None, "state": {}}
        found = []
        for key in {**known, **self._judged}:
            count, rejected, took_s = self._judged.get(key, (0, 0, 0.0))
            judged = {"judged": count, "rejected": rejected, "verdict_s": took_s / max(1, count)}
            found.append({"key": key, **away, **known.get(key, {}), **judged})
        return found

    def spans(self, rows: Sequence[Row], evaluations: Iterable[Evaluated]) -> dict[str, Any]:
        """Return the spans by lane, each in order of time, and the least time.

        Args:
            rows: metrics.jsonl, a row a step, in order.
            evaluations: results of evaluations.
        """
        spans = [*_learner(rows[-MOST:]), *self._spans, *_evaluator(evaluations)]
        lanes: dict[str, list[tuple[float, float, str, str]]] = {}
        origin = min((start for _, start, *_ in spans), default=0.0)
        for lane, start, end, kind, label in spans:
            lanes.setdefault(lane, []).append(
                (round(start - origin, 2), round(max(end, start) - origin, 2), kind, label)
            )
        first = ("learner", "publisher", "coordinator")
        rank = {lane: first.index(lane) if lane in first else len(first) for lane in lanes}
        ordered = sorted(lanes, key=lambda lane: (rank[lane], lane))
        return {"origin": origin, "lanes": [[lane, sorted(lanes[lane])] for lane in ordered]}


def _learner(rows: Sequence[Row]) -> Iterable[Span]:
    """Yield a step's waits, then its work; within a step their order is not recorded."""
    for row in rows:
        end, worked = row.get("time"), row.get("train_s") or 0.0
        if not isinstance(end, int | float):
            continue
        step = f"step {row['step']}"
        waits = {whom: s for whom, s in (row.get("waits") or {}).items() if s}
        at = end - worked - sum(waits.values())
        for whom, seconds in waits.items():
            yield "learner", at, at + seconds, "waiting", f"{step}: waits for the {whom}"
            at += seconds
        yield "learner", end - worked, end, "training", f"{step}: trains"


def _evaluator(evaluations: Iterable[Evaluated]) -> Iterable[Span]:
    for each in (each for each in evaluations if each.wall_s > 0.0):  # others are the learner's
        label = f"{each.evaluation} of version {each.version}, {each.cpu_s:.1f} s of processors"
        yield "evaluator", each.finished - each.wall_s, each.finished, "evaluating", label


MAX_POINTS = 1000
"""Points of a curve; those of longer runs are means of neighbours."""
SECTIONS = ("head", "figures", "timeline")
READ_S = 1.0
_UNKNOWN: dict[str, Any] = {"reason": "", "waiting_for": None, "crowd": None, "stages": {}}
_LISTS = ("conditions", "roles", "events", "routine", "workers", "validators")
_UNKNOWN |= {key: [] for key in _LISTS}
_UNKNOWN |= {"weights_bytes_sent": 0, "shares_bytes_sent": 0}
"""What a source may leave out of a run's head."""


class PageData:
    """A run, brought up to date by `refresh`; answers are ready at once.

    Args:
        source: of the run.
        trusted: keys of watchers whose findings whoever reads the page believes.
    """

    def __init__(self, source: Source, trusted: Collection[str] = ()) -> None:
        self.source, self.name, self._trusted = source, source.spec.name, trusted
        self.rollouts = Rollouts(source)
        self._timeline, self._seq = Timeline(), 0
        self._sections = dict.fromkeys(SECTIONS, (0, "null"))
        """Revision and JSON by section."""
        self._rows: Sequence[Row] = []
        self._results: Sequence[Evaluated] = []
        """What the figures are of."""
        self.trouble = ""
        """Why the run cannot be read now; empty if it can."""

    def refresh(self, read_s: float = READ_S) -> None:
        """Read what is new. A run that cannot be read now keeps what was read."""
        try:
            self._follow(read_s)
            self.trouble = ""
        except UserError as error:
            self.trouble = f"{error.place}: {error.thing}"

    def _follow(self, read_s: float) -> None:
        for seq, event in self.source.events(self._seq):
            self._timeline.take(event)
            self.rollouts.take(event)
            self._seq = seq
        self.rollouts.read(read_s)
        spec, rows, results = self.source.spec, self.source.rows(), self.source.evaluations()
        now = {**_UNKNOWN, **self.source.head()}
        sent = {key: now.pop(key) for key in ("weights_bytes_sent", "shares_bytes_sent")}
        summary = summarise(rows, wall_s=now["wall_s"], **sent) if rows else None
        work = work_line(summary) if summary else ""
        head = {
            "name": self.name,
            "kind": spec.algorithm.kind,
            "steps": spec.steps,
            "changes": [[each.step, _settings(each)] for each in spec.changes],
            "step": int(rows[-1]["step"]) + 1 if rows else 0,
            "left_s": time_left_s(rows, spec.steps),
            "now": standing(now, rows, spec.steps, work),
            "tiles": [*map(plain_tile, tiles(spec, rows, results, now))],
            "ends": end_figures(summary) if summary else [],
            "facts": facts(summary) if summary else [],
            "evaluations": evaluation_tables(results),
            "findings": findings_shown(self.source.findings(), self._trusted),
            "busy": {
                of: mean(rows[-ENDS:], f"{of}_busy_fraction") for of in ("learner", "sampler")
            },
            "pools": [pool.name for pool in spec.samplers],
            **now,
            "validators": self._timeline.validators(now["validators"]),
        }
        self._set("head", head)
        if rows is not self._rows or results != self._results:
            self._rows, self._results = rows, results
            plots = {SECTION: evaluation_plots(results)} if results else {}
            plots |= figures(rows)
            self._set("figures", {title: [*map(_figure, of)] for title, of in plots.items()})
        self._set("timeline", self._timeline.spans(rows, results))

    def _set(self, name: str, value: Any) -> None:
        text, (revision, before) = json.dumps(value, separators=(",", ":")), self._sections[name]
        if text != before:
            self._sections[name] = revision + 1, text

    def answer(self, known: Mapping[str, int]) -> str:
        """Return a JSON object of what changed: sections as [revision, value].

        Args:
            known: revision by section that the page has.
        """
        parts = [f'"trouble":{json.dumps(self.trouble)}']
        for name, (revision, text) in self._sections.items():
            if revision > known.get(name, 0):
                parts.append(f'"{name}":[{revision},{text}]')
        since = known.get("rollouts", -1)
        if since < self.rollouts.revision:
            changes = self.rollouts.changes(since)
            text = json.dumps(changes, separators=(",", ":"))
            parts.append(f'"rollouts":[{changes["revision"]},{text}]')
        return "{" + ",".join(parts) + "}"


def _settings(change: TrainingChange) -> str:
    """Return what a change sets, like lr 1e-06, delta 2."""
    values = change.model_dump(exclude={"name", "step"}, exclude_none=True, exclude_defaults=True)
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _figure(figure: Figure) -> dict[str, Any]:
    """Return a figure as plain data for the page."""
    return vars(figure) | {"curves": [*map(_curve, figure.curves)]}


def _curve(curve: Curve) -> dict[str, Any]:
    # Each point is the mean of its share of neighbours, at the last x.
    parts = parted(curve.points, MAX_POINTS)
    return {
        "label": curve.label,
        "x": [part[-1][0] for part in parts],
        "y": [rounded(fmean(y for _, y in part)) for part in parts],
        "averaged": curve.averaged,
        "band": [[x, rounded(low), rounded(high)] for x, low, high in curve.band],
    }


MAX_EXPORT_BYTES = 20_000_000
SCRIPTS = (
    "uPlot.iife.min.js",
    "text.js",
    "data.js",
    "curves.js",
    "overview.js",
    "timeline.js",
    "rollouts.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "style.css")
MAX_DECODING_S = 10.0
"""Seconds after which an export takes no more rollouts of a run."""
_TOKEN_BYTES = 5
"""Least number of bytes of a token in an export: a piece of text and a log-prob, with commas."""
_ROWS_SHARE = 0.2
"""Share of an export's room for rows without tokens."""
_ROOM = 2_000
"""Bytes left for the policy and the title."""


def live_page(names: Sequence[str]) -> str:
    """Return the page that asks its server for the runs of these names, in order."""
    return html_page(
        " and ".join(names), json.dumps({"live": True, "names": list(names)}), "'self'"
    )


def exported_page(views: Sequence[PageData], most: int = MAX_EXPORT_BYTES) -> str:
    """Return a page that holds all of its data.

    Args:
        views: runs, brought up to date.
        most: bytes of the page; rollouts that do not fit are left out, and the page says so.

    Raises:
        UserError: a file cannot be read.
    """
    frame = len(html_page("", "", "'none'").encode()) + _ROOM
    # All but the rollouts, of which the ones that fit are added.
    runs = [json.loads(view.answer({"rollouts": view.rollouts.revision})) for view in views]
    left = most - frame - sum(len(_json(run).encode()) for run in runs)
    for view, run in zip(views, runs, strict=True):
        _add_rollouts(view, run, left // len(views))
    data = _json({"live": False, "names": [view.name for view in views], "runs": runs})
    return html_page(" and ".join(view.name for view in views), data, "'none'")


def _add_rollouts(view: PageData, run: dict[str, Any], room: int) -> None:
    """Add rollouts to a run's data while there is room and time: whole groups, the rejected ones
    first, then the newest and the oldest steps in turn. Of a group that does not fit, or for which
    there is no time, only the listed rows are added, while they take little room."""
    deadline = time.monotonic() + MAX_DECODING_S
    changes = view.rollouts.changes(-1)
    groups: dict[str, list[list[Any]]] = {}
    at = {name: i for i, name in enumerate(changes["fields"])}
    for row in sorted(changes["rows"], key=lambda row: (row[at["step"]], row[at["id"]])):
        groups.setdefault(row[at["group"]], []).append(row)
    sizes = {name: len(_json(members).encode()) for name, members in groups.items()}
    reserve = min(room * _ROWS_SHARE, sum(sizes.values()))  # for rows without their text
    rows, details = [], {}
    for members in _by_interest(groups.values(), at["outcome"]):
        listed = sizes[members[0][at["group"]]]
        free, found, size = room - max(0.0, reserve - listed), None, listed
        least = _TOKEN_BYTES * sum(min(row[at["length"]], MAX_TOKENS) for row in members)
        if free >= least and time.monotonic() <= deadline:
            found = {row[at["id"]]: view.rollouts.detail(row[at["id"]]) for row in members}
            size += len(_json(found).encode())
        if found is not None and size <= free:
            details.update(found)
        elif (size := listed) > reserve:
            continue
        room, reserve = room - size, max(0.0, reserve - listed)
        rows += members
    left_out = len(changes["rows"]) - len(rows)
    run["rollouts"] = [1, {**changes, "rows": rows, "unread": 0, "left_out": left_out}]
    run["details"] = details


def _by_interest(groups: Iterable[list[list[Any]]], outcome: int) -> list[list[list[Any]]]:
    """Return groups of rows in the order in which they are added; `outcome` is a row's column."""
    rejected, others = list[list[list[Any]]](), list[list[list[Any]]]()
    for group in groups:
        was_rejected = any(row[outcome] == "rejected" for row in group)
        (rejected if was_rejected else others).append(group)
    half = (len(others) + 1) // 2
    newest, oldest = others[::-1][:half], others[: len(others) - half]
    turns = [group for pair in zip(newest, oldest, strict=False) for group in pair]
    return rejected[::-1] + turns + newest[len(oldest) :]


def _json(value: object) -> str:
    """Return JSON that may stand in a script element: no `<`, so no tag can begin or end in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def html_page(
    title: str,
    data: str,
    connect: str,
    frame: str = "page.html",
    scripts: Sequence[str] = SCRIPTS,
    styles: Sequence[str] = STYLES,
) -> str:
    """Return a page as one document, which may load nothing.

    Args:
        title: as HTML.
        data: JSON that its scripts read.
        connect: whom the scripts may ask, as the content security policy names it.
        frame, scripts, styles: files of the folder `page`.
    """
    texts = [_file(name) for name in scripts]
    hashes = (hashlib.sha256(script.encode()).digest() for script in texts)
    digests = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return Template(_file(frame)).substitute(
        policy=policy,
        title=title,
        style="\n".join(map(_file, styles)),
        data=data.replace("<", "\\u003c"),
        scripts="".join(f"<script>{script}</script>\n" for script in texts),
    )


def _file(name: str) -> str:
    return (resources.files("runspec.local.dashboard") / "page" / name).read_text(encoding="utf-8")
