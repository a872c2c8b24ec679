"""First tab of a run's page: tiles, evaluations, figures, what the run waits for, its events."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from runspec.core.errors import duration, latency, number, per_second, share
from runspec.core.schema import RunSpec
from runspec.estimate.assumed import hourly_price
from runspec.local.diagnosis import LOSS, figure_title, in_order, main_figure
from runspec.local.metrics import (
    ENDS,
    Row,
    input_wait_share,
    mean,
    step_gaps,
    summary_pairs,
    time_left_s,
    tokens_per_s,
)
from runspec.local.state import EventRow
from verify.formats.documents import Evaluated
from verify.formats.findings import Signed, weigh

LIVE = ("starting", "running")
"""States of a run whose processes work."""
POINTS = 60
"""Most points of a tile's small curve; each is a mean of neighbours."""
MOST_REJECTED = 0.1
"""Share of rejected rollouts from which a tile is red."""
MOST_EVENTS, MOST_ROUTINE, MOST_FINDINGS = 10, 30, 20
_ROUTINE = re.compile(r"starting\b|running$|ended with exit code 0\b")
_RESULT = re.compile(r"\S+ of version \d+: [^,]*")
_GRPO = {
    "task_reward": ("Task reward", 1),
    "length_error": ("Length error, tokens", -1),
}
_SUPERVISED = {
    "nll": ("Loss, nats a token", -1),
    "bits_per_byte": ("Bits a byte", -1),
}
"""Name of a figure, and whether it is to rise or to fall, by key of a row."""
T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """One figure at a glance."""

    name: str
    value: str
    note: str
    state: str = ""
    """`good`, `warn`, `bad`; empty if the figure is neither."""
    points: Sequence[float] = ()
    """Small curve."""


def parted(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Return consecutive parts of about equal size: as many as items, and `most` at most."""
    count = min(most, len(items))
    edges = [i * len(items) // count for i in range(count + 1)] if count else []
    return [items[a:b] for a, b in pairwise(edges)]


def tiles(
    spec: RunSpec, rows: Sequence[Row], results: Sequence[Evaluated], head: Mapping[str, Any]
) -> Iterator[Tile]:
    """Yield the tiles of the figures that the run has.

    Args:
        spec: of the run.
        rows: metrics.jsonl, a row a step, in order.
        results: of evaluations, in the order of versions.
        head: `state`, `diagnosis` and `wall_s` of the run.
    """
    yield from _evaluated(results)
    for key, (name, sign) in (_GRPO if spec.supervised is None else _SUPERVISED).items():
        known = [row[key] for row in rows if row.get(key) is not None]
        if known:
            first, last = fmean(known[:ENDS]), fmean(known[-ENDS:])
            state = "good" if (last - first) * sign > 0 and not head["diagnosis"] else "warn"
            if key == "task_reward" and last == 0:
                state = "bad"
            early = len(known) < 2 * ENDS
            note = f"{number(first)} in the first {ENDS} steps"
            yield Tile(name, number(last), "" if early else note, "" if early else state, known)
    if speeds := [found for row in rows if (found := tokens_per_s(row)) is not None]:
        newest = fmean(speeds[-ENDS:])
        busy = share(mean(rows[-ENDS:], "learner_busy_fraction"))
        state = "warn" if newest < 0.5 * fmean(speeds) else "good"
        yield Tile(
            "Learner, tokens/s", per_second(newest), f"{busy} of the time busy", state, speeds
        )
    if spec.supervised is None:
        yield from _asynchrony(spec, rows)
    else:
        waits = [found for row in rows if (found := input_wait_share(row)) is not None]
        if waits:
            yield Tile("Waits for input", share(fmean(waits[-ENDS:])), "of the time", "", waits)
    yield from _time_and_cost(spec, rows, head)


def _evaluated(results: Sequence[Evaluated]) -> Iterator[Tile]:
    for name in dict.fromkeys(each.evaluation for each in results):
        own = [each for each in results if each.evaluation == name]
        known = [(each.version, each.figures.get(main_figure(each))) for each in own]
        found = [(version, figure) for version, figure in known if figure is not None]
        if not found:
            continue
        (version, first), (_, last) = found[0], found[-1]
        loss = LOSS in own[-1].figures
        note = f"{number(first.value)} at version {version}" if len(found) > 1 else ""
        rises = (last.value - first.value) * (-1 if loss else 1) > 0
        state = "" if len(found) < 2 else "good" if rises else "warn"
        title = f"{name}, {figure_title(main_figure(own[-1]))}"
        yield Tile(title.capitalize(), number(last.value), note, state, [f.value for _, f in found])


def _asynchrony(spec: RunSpec, rows: Sequence[Row]) -> Iterator[Tile]:
    if lags := [row["lag_mean"] for row in rows if row.get("lag_mean") is not None]:
        most, allowed = max(row.get("lag_max") or 0 for row in rows), spec.grpo.async_level
        note = f"at most {most} steps, {allowed} allowed"
        state = "good" if most <= allowed else "warn"
        yield Tile("Lag, steps", number(fmean(lags[-ENDS:]), 2), note, state, lags)
    if rows:
        rejected = [float(row.get("rejected_rollouts") or 0) for row in rows]
        lost, good = sum(rejected), sum(row.get("accepted_rollouts") or 0 for row in rows)
        part = lost / max(1.0, lost + good)
        state = "good" if not lost else "bad" if part > MOST_REJECTED else "warn"
        note = f"{share(part)} of {lost + good:,.0f}"
        yield Tile("Rejected rollouts", f"{lost:,.0f}", note, state, rejected)


def _time_and_cost(spec: RunSpec, rows: Sequence[Row], head: Mapping[str, Any]) -> Iterator[Tile]:
    up, live = head["wall_s"], head["state"] in LIVE
    left, gaps = time_left_s(rows, spec.steps), step_gaps(rows, len(rows))
    if live and left is not None:
        yield Tile("Time left", duration(left), f"about; up for {duration(up)}", "", gaps)
    elif rows:
        yield Tile("Time", duration(up), f"up, for {len(rows):,} steps", "", gaps)
    if price := hourly_price(spec):
        note = f"{price:g} an hour"
        if live and left is not None:
            note += f", about {price * (up + left) / 3600:,.2f} in the end"
        yield Tile("Cost", f"{price * up / 3600:,.2f}", note)


def plain_tile(tile: Tile) -> dict[str, Any]:
    """Return a tile as plain data for the page."""
    return vars(tile) | {"points": [float(f"{fmean(p):.4g}") for p in parted(tile.points, POINTS)]}


def evaluation_tables(results: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """Return each evaluation: its first and newest version, with title, first value, newest value,
    95 % interval and all values of each figure."""
    found = []
    for name in dict.fromkeys(each.evaluation for each in results):
        own = [each for each in results if each.evaluation == name]
        first, last = own[0], own[-1]
        rows = []
        for key in in_order(last.figures):
            then, now = first.figures.get(key), last.figures[key]
            interval = "" if now.low is None else f"{number(now.low)} to {number(now.high)}"
            values = [each.figures[key].value for each in own if key in each.figures]
            ends = number(then and then.value), number(now.value)
            rows.append([figure_title(key), *ends, interval, values])
        versions = {"first": first.version, "newest": last.version}
        found.append({"name": name, **versions, "faults": last.faults, "rows": rows})
    return found


def findings_shown(found: Sequence[Signed], trusted: Collection[str]) -> dict[str, Any]:
    """Return how much of a run watchers trained again, in words, and their findings: the refuted
    and the newest ones first."""
    order = sorted(found, key=lambda each: (each[0].outcome != "refuted", -each[0].finished))
    rows = [
        [
            f"{each.first} to {each.last - 1}",
            each.outcome,
            f"{'checked' if key in trusted else 'reported'} by {key[:16]}",
        ]
        for each, key in order[:MOST_FINDINGS]
    ]
    return {"words": weigh(found, trusted) if found else "", "rows": rows}


def standing(head: Mapping[str, Any], rows: Sequence[Row], steps: int, work: str) -> str:
    """Return in words what a run does and waits for now, or how it ended.

    Args:
        head: `state`, `reason`, `waiting_for` and `stages` (by role) of the run.
        rows: metrics.jsonl, a row a step, in order.
        steps: of the run.
        work: what it has done.
    """
    if head["state"] not in LIVE:
        reason = f": {head['reason']}" if head["reason"] else ""
        return f"The run is {head['state']}{reason}. {work}".strip()
    parts = [f"{role}: {stage}" for role, stage in head["stages"].items()]
    if head["waiting_for"]:
        parts.append(f"waits for {head['waiting_for']}")
    if rows and (busy := rows[-1].get("learner_busy_fraction")) is not None:
        awaited = rows[-1].get("waited_for")
        most = f", and waited most for the {awaited}" if awaited and busy < 1.0 else ""
        parts.append(f"the learner trained {share(busy)} of the last step{most}")
    return f"Step {len(rows) + 1} of {steps}: {'; '.join(parts) or 'no role has said yet'}."


def events_shown(events: Sequence[EventRow]) -> dict[str, list[tuple[float, str, str]]]:
    """Return `events`, those that matter, and `routine`, starts and ends; newest first."""
    shown: dict[str, list[tuple[float, str, str]]] = {"events": [], "routine": []}
    for event in reversed(events):
        # A result's other figures are in the evaluations' table.
        text = found[0] if (found := _RESULT.match(event.text)) else event.text
        kind = "routine" if event.kind == "state" and _ROUTINE.match(text) else "events"
        shown[kind].append((event.time, event.role, text))
    return {"events": shown["events"][:MOST_EVENTS], "routine": shown["routine"][:MOST_ROUTINE]}


def work_line(summary: Mapping[str, Any]) -> str:
    """Return what the run has done, as one sentence.

    Args:
        summary: as `metrics.summarise` makes it.
    """
    if "tokens" in summary:
        work = f"{summary['tokens']:,} tokens, {number(summary['epoch'])} epochs"
    else:
        work = f"{summary['rollouts_accepted']:,} rollouts accepted, "
        work += f"{summary['rollouts_rejected']:,} rejected"
    return f"{summary['steps']} steps in {duration(summary['wall_s'])}, {work}."


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of the known figures of a summary that are no curve's ends."""
    if "tokens" in summary:
        of_kind = [
            ("Trained tokens", f"{summary['trained_tokens']:,}"),
            ("Padding", share(summary["padding_share"])),
            ("Learner waited for input", share(summary["input_wait_share"])),
        ]
    else:
        of_kind = [
            ("Mean lag", f"{number(summary['mean_lag'])} steps"),
            ("Samplers busy", share(summary["sampler_busy_fraction"])),
            ("Submission to verdict, p50 / p99", " / ".join(latency(summary, "verdict"))),
            ("Submission to batch, p50 / p99", " / ".join(latency(summary, "manifest"))),
        ]
    found = [
        *of_kind,
        ("Learner busy", share(summary["learner_busy_fraction"])),
        ("Learner, tokens/s without padding", per_second(summary["learner_tokens_per_s"])),
        ("Learner, MFU", share(summary["mfu"])),
        ("Updates skipped", number(summary["skipped_updates"])),
        ("Weights sent", f"{summary['weights_bytes_sent'] / 1e6:,.1f} MB"),
        *(summary_pairs(summary["islands"]) if summary["islands"] else ()),
    ]
    return [(name, value) for name, value in found if value.strip("- /") not in ("", "steps")]
