"""`runspec explain`: pages on fields of the spec, rules of the linter, and kinds of plug-ins.

A page is a list of lines of at most 80 columns; a line that is not indented is a heading. The page
of a kind comes from the docstring in its package's file; no plug-in is imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

import runspec.lint.rules  # noqa: F401  (registers them)
from runspec.core.entry_points import entry_points_of
from runspec.core.models import DEVICES, Device
from runspec.core.schema import RunSpec, field_docs
from runspec.core.schema.fields import CHANGE_CLASSES
from runspec.core.schema.schema_fields import (
    SchemaField,
    close_match,
    field_at,
    fields_in,
    named_item,
    schema_fields,
)
from runspec.core.schema.source_files import (
    ENVIRONMENT_GROUP,
    MONITOR_GROUP,
    REWARD_GROUP,
    SOURCE_GROUP,
)
from runspec.lint import RULES, Group, Rule

_KINDS = {
    ENVIRONMENT_GROUP: ("environment", "reward: [{{name: ..., kind: {}}}]"),
    MONITOR_GROUP: ("monitor", "monitors: [{{name: ..., kind: {}}}]"),
    REWARD_GROUP: ("reward", "reward: [{{name: ..., kind: {}}}]"),
    SOURCE_GROUP: ("source", "data: {{sources: [{{name: ..., kind: {}, ...}}]}}"),
}
Page = list[str]
WIDTH = 80
_LABEL = 11
_EXAMPLES = resources.files("runspec.lint") / "examples"
EXIT_USAGE = 2


def kinds() -> dict[tuple[str, str], EntryPoint]:
    """The installed kinds by what they are kinds of and their name."""
    found = {(title, p.name): p for g, (title, _) in _KINDS.items() for p in entry_points_of(g)}
    return dict(sorted(found.items()))


def kind_paragraphs(point: EntryPoint) -> Iterator[str]:
    """Yields the docstring of a kind's class, how a spec names it, and which package brings it."""
    said = inspect.cleandoc(_docstring(point) or "Its package does not say what it is.")
    yield from said.partition("\n\nRaises:")[0].partition("\n\nArgs:")[0].split("\n\n")
    example = _KINDS[point.group][1].format(point.name)
    source = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
    yield f"In a spec: `{example}`. Comes with {source}."


def _docstring(point: EntryPoint) -> str | None:
    """Return the docstring of what an entry point names, which is not imported for it."""
    top, *inner = point.module.split(".")
    if (found := find_spec(top)) is None:
        return None
    paths = [Path(folder, *inner) for folder in found.submodule_search_locations or []]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    for file in [*files, *([Path(found.origin)] if found.origin else [])]:
        with suppress(OSError, ValueError, SyntaxError):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == point.attr:
                    return ast.get_docstring(node)
    return None


@cache
def topics() -> list[str]:
    """Everything that has a page."""
    named = dict.fromkeys(name for _, name in kinds())
    others = (*get_args(Group), "hardware", *DEVICES, "Run", "Placement", *named)
    return [*schema_fields(), *RULES, *others]


def field_page(field: SchemaField) -> Page:
    """One field: what it is, what it may be, and what changing it does."""
    lines = [field.path, *_wrapped(field_docs.field_doc(field), "  "), ""]
    lines += _labelled("type", field_docs.type_words(field))
    if field.unit:
        lines += _labelled("unit", field.unit)
    lines += _labelled("default", field_docs.default_words(field) or "that of its keys")
    lines += _labelled("change", f"{field.change}: {CHANGE_CLASSES[field.change]}")
    may = "may set it" if field.site else "may not set it"
    below = (f for path, f in schema_fields().items() if path.startswith(f"{field.path}."))
    if not field.site and any(child.site for child in below):
        may = "may set some of it"
    lines += _labelled("placement", f"a file of kind Placement {may}")
    children = fields_in(f"{field.path}.<name>" if named_item(field.annotation) else field.path)
    return [*lines, "", *_keys(children)] if children else lines


def run_page() -> Page:
    """The spec itself: its top keys."""
    text = (
        f"{field_docs.block_doc(RunSpec).splitlines()[0]} `runspec explain KEY` says more of each."
    )
    return ["Run", *_wrapped(text, "  "), "", *_keys(fields_in(""))]


def placement_page() -> Page:
    """The fields that a placement file may set."""
    text = (
        "One site's part of a run, given with --placement over a spec and its profile: `version`, "
        "`kind: Placement`, a `name` for people, and any of these. It adds no pools."
    )
    fields = schema_fields()
    above = {path: path.rpartition(".")[0].removesuffix(".<name>") for path in fields}
    outermost = [
        path
        for path in fields
        if fields[path].site and not (above[path] and fields[above[path]].site)
    ]
    return ["Placement", *_wrapped(text, "  "), "", *(f"  {path}" for path in outermost)]


def hardware_page() -> Page:
    """The kinds of hardware whose figures ship with runspec."""
    intro = (
        "Kinds that `hardware.kind` may name without figures of their own; of another kind, give "
        "`memory`, `peak_flops` and `memory_bandwidth`. One device each; FLOP/s are dense bfloat16."
    )
    lines = ["hardware", *_wrapped(intro, "  "), ""]
    lines.append(f"  {'kind':<12}{'memory':>10}{'peak':>16}{'bandwidth':>14}")
    return lines + [
        f"  {d.kind:<12}{_giga(d.memory, 'B'):>10}{_tera(d.peak_flops):>16}"
        f"{_giga(d.memory_bandwidth, 'B/s'):>14}"
        for d in DEVICES.values()
    ]


def device_page(device: Device) -> Page:
    """One kind of hardware."""
    return [
        device.kind,
        *_labelled("memory", _giga(device.memory, "B")),
        *_labelled("peak", _tera(device.peak_flops) + " dense bfloat16"),
        *_labelled("bandwidth", _giga(device.memory_bandwidth, "B/s")),
    ]


def group_page(group: str) -> Page:
    """The rules of a group."""
    rules = [rule for rule in RULES.values() if rule.group == group]
    return [f"rules of the group {group}", *(_row(rule.code, rule.summary, 30) for rule in rules)]


def rule_page(rule: Rule) -> Page:
    """A rule: what must hold and why, how to accept it, and a file of each kind."""
    runs = {"all": "", "grpo": ", runs of grpo", "supervised": ", runs of pretrain and sft"}
    lines = [f"{rule.code}  ({rule.severity}, group {rule.group}{runs[rule.runs]})"]
    lines += _joined(map(_paragraph, rule.page.split("\n\n")))
    if rule.check is not None:  # much of what the loader finds is in the way of everything else
        accept = f'# runspec: ignore[{rule.code}] reason="..."'
        said = "  To accept it where it is said, behind the line or above it:"
        lines += ["", said, f"    {accept}"]
    for name in ("bad", "good"):
        example = _EXAMPLES / rule.code / f"{name}.yaml"
        if example.is_file():
            text = example.read_text(encoding="utf-8")
            lines += ["", name, *(f"  {line}".rstrip() for line in text.splitlines())]
    return lines


def index() -> Page:
    """Every topic in a line."""
    fields = schema_fields().values()
    lines = ["fields"]
    lines += [_row(f.path, field_docs.field_doc(f), 46) for f in fields]
    for group in get_args(Group):
        lines += ["", *group_page(group)]
    for (of, name), point in kinds().items():
        heading = f"kinds of {of}"
        lines += [] if heading in lines else ["", heading]
        lines.append(_row(name, next(kind_paragraphs(point)), 30))
    return [*lines, "", *hardware_page()]


def _keys(fields: Iterable[SchemaField]) -> Page:
    lines = ["keys"]
    for field in fields:
        default = field_docs.default_words(field) or "that of its keys"
        said = default if field.required else f"default {default}"
        lines += _wrapped(f"{field.key}: {field_docs.counted_type(field)}; {said}", "  ", "      ")
        lines += _wrapped(field_docs.field_doc(field), "      ")
    return lines


def _joined(pages: Iterable[Page]) -> Page:
    """Pages with an empty line between them."""
    return [line for page in pages for line in ("", *page)][1:]


def _row(name: str, text: str, width: int) -> str:
    left = f"  {name:<{width}} "
    return (left + textwrap.shorten(text, max(20, WIDTH - len(left)), placeholder=" ...")).rstrip()


def _labelled(label: str, text: str) -> Page:
    return _wrapped(text, f"  {label:<{_LABEL}}", " " * (_LABEL + 2))


def _paragraph(text: str) -> Page:
    """A paragraph filled anew; one with indented lines (formulas, lists) stays as it is."""
    lines = text.splitlines()
    if any(line.startswith((" ", "- ", "| ")) for line in lines):
        return [f"  {line}".rstrip() for line in lines]
    return _wrapped(" ".join(lines), "  ")


def _wrapped(text: str, first: str, rest: str | None = None) -> Page:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _giga(value: float | None, unit: str) -> str:
    return "not known" if value is None else f"{value / 1e9:g} G{unit}"


def _tera(value: float | None) -> str:
    return "not known" if value is None else f"{value / 1e12:g} TFLOP/s"


def explain_command(
    topic: Annotated[str | None, typer.Argument(help="A path of the schema, rule or kind.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Every path, rule and kind.")] = False,
) -> int:
    """Prints the page of a topic, or all topics; returns the exit code."""
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


def schema_command(
    draft: Annotated[Literal["07", "2020-12"], typer.Option(help="07 is for editors.")] = "07",
) -> int:
    """Prints the JSON Schema; returns the exit code."""
    print(json.dumps(field_docs.json_schema(draft), indent=2, ensure_ascii=False))
    return 0


def find_pages(topic: str) -> list[Page]:
    """Return the pages of a name; a group of rules and a block of the spec can share one."""
    found = []
    if field := find_field(topic):
        found.append(field_page(field))
    if topic in get_args(Group):
        found.append(group_page(topic))
    whole: dict[str, Callable[[], Page]] = {
        "hardware": hardware_page,
        "Run": run_page,
        "Placement": placement_page,
    }
    if topic in whole:
        found.append(whole[topic]())
    if topic in DEVICES:
        found.append(device_page(DEVICES[topic]))
    if topic in RULES:
        found.append(rule_page(RULES[topic]))
    found += [
        [f"{name}  (kind of {of})", *_joined(map(_paragraph, kind_paragraphs(point)))]
        for (of, name), point in kinds().items()
        if name == topic
    ]
    return found


def find_field(path: str) -> SchemaField | None:
    """The field of a path with the names in it (`samplers.volunteers.dtype`) or without them."""
    known, full = schema_fields(), ""
    for step in path.split("."):
        nameless = f"{full}.<name>.{step}"
        full = nameless if nameless in known else f"{full}.{step}".removeprefix(".")
    return known.get(full) or field_at(path)


def suggestion(topic: str) -> str:
    """Return a hint with the topic that is nearest by its letters."""
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
