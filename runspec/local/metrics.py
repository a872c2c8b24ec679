"""metrics.jsonl as it grows, what a whole run's rows add up to, and the figures of islands.

The rows are the first island's: its own share, its own waits. Who contributed and who was dropped
is the same for all islands.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import number, per_second, seconds, share, size
from runspec.core.files import read_bounded
from runspec.core.run_files import METRICS_FILE
from runspec.core.schema.role_names import shares_name

MAX_LINE_BYTES = 1024 * 1024
ENDS = 10
"""Rows at either end of a run that are averaged for `first` and `last`."""
_NEWEST = 20
"""Steps whose times say how long the others will take."""

Row = Mapping[str, Any]


class JsonLines:
    """Reads the whole lines that were appended to a file since the last look."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self._path = path
        self._offset = 0
        if newest_bytes is not None and path.exists():  # what is left of a cut line is no object
            self._offset = max(0, path.stat().st_size - newest_bytes)

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows since the last call; a line still being written waits for the next call.

        A line that is no JSON object (a crash in the middle of writing it) is left out. A number
        that is not finite (a diverged step) is None: strict JSON has no word for it. A file that
        became shorter is read from its start: the learner cut off steps that it trains again.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(size - self._offset)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return objects(whole)


def read_rows(run_dir: Path, newest_bytes: int | None = None) -> list[dict[str, Any]]:
    """A row a step, in order: the last one written where a step was trained again after a crash.

    With `newest_bytes` only the rows in so many bytes at the end of the file are read.
    """
    return latest_by_step(JsonLines(run_dir / METRICS_FILE, newest_bytes).new_rows())


def latest_by_step(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def is_supervised(row: Row) -> bool:
    """Return whether a row is of a run that trains on documents."""
    return "nll" in row


def input_wait_share(row: Row) -> float | None:
    """Return the share of a step's time that the learner waited for its input.

    Every wait but those for checkpoints and for other islands is one for the input. None where no
    time is known.
    """
    waits, total = row.get("waits") or {}, (row.get("train_s") or 0.0) + (row.get("wait_s") or 0.0)
    waited = sum(each for whom, each in waits.items() if whom not in ("checkpoint", "islands"))
    return waited / total if total > 0.0 else None


def last_known(rows: Sequence[Row], key: str) -> Any:
    """Return a figure of the last row that has it; None where none has."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def time_left_s(rows: Sequence[Row], steps: int) -> float | None:
    """Return about how many seconds the steps that are left will take, by the median of the newest
    ones; None while too few say when they were trained.

    Args:
        rows: metrics.jsonl, a row a step, in order.
        steps: of the run.
    """
    gaps = step_gaps(rows, _NEWEST)
    return max(0, steps - int(rows[-1]["step"]) - 1) * median(gaps) if len(gaps) > 1 else None


def step_gaps(rows: Sequence[Row], newest: int) -> list[float]:
    """Return the seconds between each of the newest steps and the one before, as far as known."""
    times = [row["time"] for row in rows[-newest - 1 :] if isinstance(row.get("time"), float)]
    return [later - earlier for earlier, later in pairwise(times)]


def end_figures(summary: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Return label, first and last value of the figures that a run is to improve, and has.

    Args:
        summary: as `summarise` makes it.
    """
    labels = _SUPERVISED if "tokens" in summary else _GRPO
    found, islands = [(summary, labels)], summary.get("islands")
    found += [(islands, _ISLANDS)] if islands else []
    return [
        (name, figures[f"{key}_first"], figures[f"{key}_last"])
        for figures, names in found
        for key, name in names.items()
        if (figures[f"{key}_first"], figures[f"{key}_last"]) != (None, None)
    ]


_GRPO = {"task_reward": "Task reward", "reward": "Reward", "length_error": "Length error, tokens"}
_SUPERVISED = {
    "loss": "Loss",
    "nll": "Cross entropy, nats a token",
    "bits_per_byte": "Bits a byte",
    "held_out_nll": "Held out, nats a token, measured once",
    "held_out_bits_per_byte": "Held out, bits a byte, measured once",
}
_ISLANDS = {
    "share_norm": "First island's share, norm",
    "cosine": "First island's share, cosine to the others'",
}
"""Labels of the figures by key."""


def summarise(
    rows: Sequence[Row], *, wall_s: float, weights_bytes_sent: int, shares_bytes_sent: int = 0
) -> dict[str, Any]:
    """The contents of summary.json.

    `first` and `last` are means over the first and last ten steps, and of a held-out loss its first
    and last measurement. The mean lag weighs each step by its rollouts; shares of time weigh each
    step by its time, and tokens a second and MFU by the time that the learner worked. Latencies, in
    seconds, are the mean of the steps' medians and the largest of their 99th percentiles. A figure
    that no row has is null.

    Args:
        rows: metrics.jsonl, a row a step, in order.
        wall_s: seconds that the run was up, over all its sessions.
        weights_bytes_sent: bytes of weights that origin and relays served.
        shares_bytes_sent: bytes that the servers of islands' shares in the run directory sent.
    """
    seconds = [(row.get("train_s") or 0.0) + (row.get("wait_s") or 0.0) for row in rows]
    working = [row.get("train_s") or 0.0 for row in rows]
    of_kind = _documents if rows and is_supervised(rows[-1]) else _rollouts
    return {
        "steps": len(rows),
        **of_kind(rows, seconds),
        "learner_busy_fraction": mean(rows, "learner_busy_fraction", seconds),
        "learner_tokens_per_s": mean(rows, "tokens_per_s", working),
        "mfu": mean(rows, "mfu", working),
        "skipped_updates": int(sum(row.get("skipped_updates") or 0 for row in rows)),
        "wall_s": round(wall_s, 3),
        "weights_bytes_sent": weights_bytes_sent,
        "islands": _summarise_islands(rows, shares_bytes_sent),
    }


def _rollouts(rows: Sequence[Row], seconds: Sequence[float]) -> dict[str, Any]:
    """Figures of a run that samples; `seconds` are those of each step."""
    rollouts = [float(row.get("trained_rollouts") or 0) for row in rows]
    return {
        **_ends(rows, "task_reward", "reward", "length_error"),
        "rollouts_accepted": sum(row.get("accepted_rollouts") or 0 for row in rows),
        "rollouts_rejected": sum(row.get("rejected_rollouts") or 0 for row in rows),
        "max_lag": largest(rows, "lag_max"),
        "mean_lag": mean(rows, "lag_mean", rollouts),
        "sampler_busy_fraction": mean(rows, "sampler_busy_fraction", seconds),
        "verdict_latency_p50": mean(rows, "verdict_latency_p50"),
        "verdict_latency_p99": largest(rows, "verdict_latency_p99"),
        "manifest_latency_p50": mean(rows, "manifest_latency_p50"),
        "manifest_latency_p99": largest(rows, "manifest_latency_p99"),
    }


def _documents(rows: Sequence[Row], seconds: Sequence[float]) -> dict[str, Any]:
    """Figures of a run that trains on documents; `seconds` are those of each step."""
    measured = [row for row in rows if row.get("held_out_nll") is not None]
    held_out = {
        f"{key}_{end}": row[0].get(key) if row else None
        for key in ("held_out_nll", "held_out_bits_per_byte")
        for end, row in (("first", measured[:1]), ("last", measured[-1:]))
    }
    waited = [{"share": input_wait_share(row)} for row in rows]
    return {
        **_ends(rows, "loss", "nll", "bits_per_byte"),
        **held_out,
        "tokens": sum(row.get("tokens") or 0 for row in rows),
        "trained_tokens": sum(row.get("trained_tokens") or 0 for row in rows),
        "epoch": rows[-1].get("epoch"),
        "padding_share": mean(rows, "padding_share"),
        "input_wait_share": mean(waited, "share", seconds),
    }


def _ends(rows: Sequence[Row], *keys: str) -> dict[str, float | None]:
    """Means over the first and last steps."""
    ends = (("first", rows[:ENDS]), ("last", rows[-ENDS:]))
    return {f"{key}_{end}": mean(part, key) for key in keys for end, part in ends}


def mean(rows: Sequence[Row], key: str, weights: Sequence[float] | None = None) -> float | None:
    """Weighted mean over the rows that have the figure; None where none has."""
    weights = [1.0] * len(rows) if weights is None else weights
    pairs = [
        (row[key], w) for row, w in zip(rows, weights, strict=True) if row.get(key) is not None
    ]
    total = sum(weight for _, weight in pairs)
    if not pairs:
        return None
    if total == 0.0:
        return float(sum(value for value, _ in pairs) / len(pairs))
    return float(sum(value * weight for value, weight in pairs) / total)


def largest(rows: Sequence[Row], key: str) -> float | None:
    """Return the largest figure of the rows that have it; None where none has."""
    return max((row[key] for row in rows if row.get(key) is not None), default=None)


def bytes_sent(run_dir: Path) -> dict[str, int]:
    """Return `weights_bytes_sent`, bytes that origin and relays served, and `shares_bytes_sent`,
    those that the servers of islands' shares served."""
    sent = {"weights_bytes_sent": 0, "shares_bytes_sent": 0}
    for store in (run_dir / "store").glob("*"):
        is_shares = store.name.startswith(shares_name(""))
        key = "shares_bytes_sent" if is_shares else "weights_bytes_sent"
        sent[key] += served_bytes(store) or 0
    return sent


def served_bytes(store: Path) -> int | None:
    """Return the bytes that a server served of its store; None where they are not known."""
    try:
        served = parse_object(read_bounded(store / "served.json", 4096), max_bytes=4096)
    except (OSError, MalformedJson):
        return None
    sent = served.get("bytes")
    return sent if isinstance(sent, int) else None


def objects(lines: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of lines; other lines are left out, and infinite numbers are None."""
    found = []
    for line in lines.splitlines():
        if len(line) > MAX_LINE_BYTES:
            continue
        try:
            value = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def island_figures(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a step's row says of the islands; None for a run with one learner.

    Keys: those of `islands` in the row (docs/learner_jax.md). Besides, of the first island:
    wait_s, seconds that it waited for the exchange; wait_share, their share of the step; busy, the
    share in which it trained. And tokens_per_s, about those of all islands.
    """
    commit = row.get("islands")
    if not isinstance(commit, Mapping):
        return None
    took_s = (row.get("train_s") or 0.0) + (row.get("wait_s") or 0.0)
    waited_s, part, tokens = (row.get("waits") or {}).get("islands"), commit.get("part"), None
    if part and took_s > 0.0 and row.get("tokens") is not None:
        tokens = row["tokens"] / part / took_s  # the islands have tokens as they have weight
    return {
        **commit,
        "wait_s": waited_s,
        "wait_share": waited_s / took_s if waited_s is not None and took_s > 0.0 else None,
        "busy": row.get("learner_busy_fraction"),
        "tokens_per_s": tokens,
    }


def tokens_per_s(row: Row) -> float | None:
    """Return the trained tokens a second, with those of other islands."""
    figures = island_figures(row)
    return row.get("tokens_per_s") if figures is None else figures["tokens_per_s"]


def wait_share(row: Row) -> float | None:
    """Return the share of a step's time in which the learner did not train."""
    busy = row.get("learner_busy_fraction")
    return None if busy is None else 1.0 - busy


def commit_text(row: Mapping[str, Any]) -> str:
    """Return how many islands are in the last commit, and who is not; empty for one learner."""
    figures = island_figures(row)
    if figures is None:
        return ""
    contributors, dropped = figures["contributors"], figures["dropped"]
    without = f" without {', '.join(dropped)}" if dropped else ""
    return f"islands {len(contributors)}/{len(contributors) + len(dropped)}{without}"


def island_pairs(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the islands' figures of a step, with their names, for people."""
    figures = island_figures(row)
    if figures is None:
        return []
    names = ", ".join(figures["contributors"]) or "nobody"
    dropped = "; ".join(f"{name}: {why}" for name, why in figures["dropped"].items())
    norm, cosine = number(figures.get("share_norm")), number(figures.get("cosine"))
    sent, received = (_size(figures.get(key)) for key in ("share_bytes", "received_bytes"))
    waited, part = seconds(figures["wait_s"]), share(figures["wait_share"])
    return [
        ("last commit", f"step {figures['step']}, shares of {names}"),
        ("dropped", dropped or "nobody"),
        ("first island's share", f"norm {norm}, cosine to the others' {cosine}"),
        ("bytes", f"{sent} up to each island that fetches it, {received} down"),
        ("exchange", f"waited for {waited} of the step ({part}); busy {share(figures['busy'])}"),
        ("all islands", f"about {per_second(figures['tokens_per_s'])} tokens/s"),
    ]


def missing_text(status: Mapping[str, Any] | None) -> str:
    """Return for whom the islands that have offered a share wait; empty if for nobody.

    Args:
        status: `islands` of the coordinator's status; None if it does not answer.
    """
    if not status or not any(member["offered"] for member in status["members"]):
        return ""  # the wait begins with the first share
    missing = "; ".join(f"{name}: {why}" for name, why in status["waiting_for"].items())
    return f"for the shares of step {status['committed']} ({missing})" if missing else ""


def _summarise_islands(rows: Sequence[Row], shares_bytes_sent: int) -> dict[str, Any] | None:
    """Return the islands' part of summary.json; None for a run with one learner.

    Args:
        rows: metrics.jsonl, a row a step, in order.
        shares_bytes_sent: bytes that the servers of shares in the run directory sent.
    """
    known = [(figures, row) for row in rows if (figures := island_figures(row)) is not None]
    if not known:
        return None
    dropped = Counter(name for figures, _ in known for name in figures["dropped"])
    commits = [figures for figures, _ in known]
    took_s = sum((r.get("train_s") or 0.0) + (r.get("wait_s") or 0.0) for _, r in known)
    waited_s = sum(figures["wait_s"] or 0.0 for figures in commits)
    rates = [figures["tokens_per_s"] for figures in commits if figures["tokens_per_s"] is not None]
    means: dict[str, float | None] = {}
    for key in _ISLANDS:
        values = [figures[key] for figures in commits if figures.get(key) is not None]
        means |= {f"{key}_first": _mean(values[:ENDS]), f"{key}_last": _mean(values[-ENDS:])}
    return {
        "dropped": dict(sorted(dropped.items())),
        "share_bytes": commits[-1].get("share_bytes"),
        "sent_bytes": shares_bytes_sent,
        "received_bytes": sum(figures.get("received_bytes") or 0 for figures in commits),
        **means,
        "wait_share": waited_s / took_s if took_s > 0.0 else None,
        "tokens_per_s": _mean(rates),
    }


def summary_pairs(islands: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return figures of the islands' part of summary.json, with their names, for people."""
    dropped = ", ".join(f"{name} in {steps} steps" for name, steps in islands["dropped"].items())
    sent, received = _size(islands["sent_bytes"]), _size(islands["received_bytes"])
    return [
        ("Islands dropped", dropped or "none"),
        ("An island's share", _size(islands["share_bytes"])),
        ("Shares sent from here / received by the first island", f"{sent} / {received}"),
        ("Waited for the exchange", share(islands["wait_share"])),
        ("All islands, about real tokens/s", per_second(islands["tokens_per_s"])),
    ]


def _size(count: object) -> str:
    return size(count) if isinstance(count, int | float) else "-"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
