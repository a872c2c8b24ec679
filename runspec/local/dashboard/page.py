"""The page as one HTML document: markup, style, scripts and, in an export, the data.

A run's texts are a model's words, and so hostile. They reach the page as JSON and are shown as text
(`page/text.js`); the content security policy lets no script run but the page's own, by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from importlib import resources
from string import Template
from typing import Any

from runspec.local.dashboard.rollouts import MAX_TOKENS
from runspec.local.dashboard.view import PageData

MAX_EXPORT_BYTES = 20_000_000
SCRIPTS = (
    "uPlot.iife.min.js",
    "text.js",
    "data.js",
    "curves.js",
    "timeline.js",
    "rollouts.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "style.css")
MAX_DECODING_S = 10.0
"""Seconds after which an export takes no more rollouts of a run."""
_TOKEN_BYTES = 5
"""Least number of bytes of a token in an export: a piece of text and a log-prob, with commas."""
_ROOM = 2_000
"""Bytes left for the policy and the title."""


def live_page(names: Sequence[str]) -> str:
    """Return the page that asks its server for the runs of these names, in order."""
    return _page(" and ".join(names), json.dumps({"live": True, "names": list(names)}), "'self'")


def exported_page(views: Sequence[PageData], most: int = MAX_EXPORT_BYTES) -> str:
    """Return a page that holds all of its data.

    Args:
        views: runs, brought up to date.
        most: bytes of the page; rollouts that do not fit are left out, and the page says so.

    Raises:
        UserError: a file cannot be read.
    """
    frame = len(_page("", "", "'none'").encode()) + _ROOM
    # All but the rollouts, of which the ones that fit are added.
    known = [dict.fromkeys(("rollouts",), view.rollouts.revision) for view in views]
    runs = [json.loads(view.answer(at)) for view, at in zip(views, known, strict=True)]
    left = most - frame - sum(len(_json(run).encode()) for run in runs)
    for view, run in zip(views, runs, strict=True):
        _add_rollouts(view, run, left // len(views))
    data = _json({"live": False, "names": [view.name for view in views], "runs": runs})
    return _page(" and ".join(view.name for view in views), data, "'none'")


def _add_rollouts(view: PageData, run: dict[str, Any], room: int) -> None:
    """Add rollouts to a run's data while there is room and time: whole groups, the rejected ones
    first, then the newest and the oldest steps in turn. A group that does not fit is left out."""
    deadline = time.monotonic() + MAX_DECODING_S
    changes = view.rollouts.changes(-1)
    groups: dict[str, list[list[Any]]] = {}
    at = {name: i for i, name in enumerate(changes["fields"])}
    for row in sorted(changes["rows"], key=lambda row: (row[at["step"]], row[at["id"]])):
        groups.setdefault(row[at["group"]], []).append(row)
    rows, details = [], {}
    for members in _by_interest(list(groups.values()), lambda row: row[at["outcome"]]):
        if room < sum(_TOKEN_BYTES * min(row[at["length"]], MAX_TOKENS) for row in members):
            continue
        if time.monotonic() > deadline:
            break
        found = {row[at["id"]]: view.rollouts.detail(row[at["id"]]) for row in members}
        size = len(_json(members).encode()) + len(_json(found).encode())
        if size > room:
            continue
        room -= size
        rows += members
        details.update(found)
    left_out = len(changes["rows"]) - len(rows)
    run["rollouts"] = [1, {**changes, "rows": rows, "unread": 0, "left_out": left_out}]
    run["details"] = details


def _by_interest(
    groups: list[list[list[Any]]], outcome: Callable[[list[Any]], str]
) -> list[list[list[Any]]]:
    rejected = [g for g in groups if any(outcome(row) == "rejected" for row in g)]
    others = [g for g in groups if not any(outcome(row) == "rejected" for row in g)]
    half = (len(others) + 1) // 2
    newest, oldest = others[::-1][:half], others[: len(others) - half]
    turns = [group for pair in zip(newest, oldest, strict=False) for group in pair]
    return rejected[::-1] + turns + newest[len(oldest) :]


def _json(value: object) -> str:
    """Return JSON that may stand in a script element: no `<`, so no tag can begin or end in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _page(title: str, data: str, connect: str) -> str:
    scripts = [_file(name) for name in SCRIPTS]
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    digests = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return Template(_file("page.html")).substitute(
        policy=policy,
        title=title,
        style="\n".join(map(_file, STYLES)),
        data=data.replace("<", "\\u003c"),
        scripts="".join(f"<script>{script}</script>\n" for script in scripts),
    )


def _file(name: str) -> str:
    return (resources.files("runspec.local.dashboard") / "page" / name).read_text(encoding="utf-8")
