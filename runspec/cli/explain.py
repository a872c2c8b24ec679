"""`runspec explain`: pages on fields of the spec, rules of the linter, and kinds of things."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

import typer

if TYPE_CHECKING:
    from runspec.cli.explain_pages import Page
    from runspec.core.spec.schema_fields import SchemaField

EXIT_USAGE = 2


def explain_command(topic: str | None, list_all: bool) -> int:
    """Prints the page of a topic, or all topics; returns the exit code."""
    from runspec.cli.explain_pages import index, run_page

    if list_all:
        _show(index())
        return 0
    if topic is None:
        _show(run_page())
        return 0
    pages = find_pages(topic)
    if not pages:
        print(f"error: nothing is called {topic[:80]!r}; {suggestion(topic)}", file=sys.stderr)
        return EXIT_USAGE
    for number, page in enumerate(pages):
        _show([*([""] if number else []), *page])
    return 0


def find_pages(topic: str) -> list[Page]:
    """What is called so; a group of rules and a block of the spec can share a name."""
    from runspec.cli import explain_pages as pages
    from runspec.cli.explain_kinds import kinds
    from runspec.core.models.hardware import DEVICES
    from runspec.lint.registry import RULES, Group

    found = []
    if field := find_field(topic):
        found.append(pages.field_page(field))
    if topic in get_args(Group):
        found.append(pages.group_page(topic))
    whole: dict[str, Callable[[], Page]] = {
        "hardware": pages.hardware_page,
        "Run": pages.run_page,
        "Placement": pages.placement_page,
    }
    if topic in whole:
        found.append(whole[topic]())
    if topic in DEVICES:
        found.append(pages.device_page(DEVICES[topic]))
    if topic in RULES:
        found.append(pages.rule_page(RULES[topic]))
    found += [pages.kind_page(of, p) for (of, name), p in kinds().items() if name == topic]
    return found


def find_field(path: str) -> SchemaField | None:
    """The field of a path with the names in it (`samplers.volunteers.dtype`) or without them."""
    from runspec.core.spec.schema_fields import field_at, schema_fields

    known, full = schema_fields(), ""
    for step in path.split("."):
        nameless = f"{full}.<name>.{step}"
        full = nameless if nameless in known else f"{full}.{step}".removeprefix(".")
    return known.get(full) or field_at(path)


def suggestion(topic: str) -> str:
    """What may have been meant."""
    from runspec.cli.explain_pages import topics
    from runspec.core.spec.schema_fields import close_match

    known = topics()
    by_key: dict[str, str] = {}
    for path in known:
        by_key.setdefault(path.rpartition(".")[2], path)
    key = topic.rpartition(".")[2]
    meant = (
        by_key.get(key) or close_match(topic, known) or by_key.get(close_match(key, by_key) or "")
    )
    return f"did you mean {meant}?" if meant else "`runspec explain --list` names everything"


def _show(page: Page) -> None:
    colour = False if os.environ.get("NO_COLOR") else None  # None: where it is a terminal
    for line in page:
        heading = line and not line.startswith(" ")
        typer.echo(typer.style(line, bold=True) if heading else line, color=colour)
