"""Rules that are one row of a table, and rules whose findings the loader makes: `rules/*.toml`.

A table `[CODE]` is a rule:

    group, severity, runs   those of `registry.rule`
    page                    what `runspec explain` shows: what must hold, the reason, the source
    each                    `pool in samplers`: what follows is looked at for each, by that name
    values                  values that later texts use by name, in order
    when                    whether the rule is about this spec
    holds                   what must hold
    at                      where a finding points
    message, suggestion     of a finding
    also                    further relations, a list: what one leaves out it has from the row

`each`, `values`, `when` and `holds` are Python expressions; the other texts have some in braces.
They name the spec's top fields, `spec`, `FUNCTIONS`, and `config`, the model's shape. A relation
that names `config` is silent if the shape is unknown. The numbers that `holds` names are the
finding's.

A row without `holds` is the page of what the loader finds. Its `suggestion` is for findings without
one; `{path}` is the finding's.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from math import lcm
from pathlib import Path
from types import CodeType
from typing import Any

from runspec.core.spec.findings import Number
from runspec.core.spec.islands import members, step_overlap
from runspec.lint.registry import Context, Rule, Violation, add, divisors, runs_of
from verify.thresholds import precision_of

FUNCTIONS = {each.__name__: each for each in (divisors, lcm, members, precision_of, step_overlap)}
"""What expressions may call besides Python's own."""
_KEYS = {
    *("group", "severity", "runs", "page", "each", "values", "when", "holds", "at"),
    *("message", "suggestion", "also"),
}


def read_rows(path: Path) -> None:
    """Register the rules of a file.

    Args:
        path: a TOML file of this package. Its texts are trusted as the package's code is; values of
            a spec reach them as values only.
    """
    for code, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        assert row.keys() <= _KEYS, f"{code} in {path.name}: {row.keys() - _KEYS}"
        relations = [{**row, **one} for one in ({}, *row.get("also", ()))]
        loader = "holds" not in row
        add(
            Rule(
                code,
                row["group"],
                row.get("severity", "error"),
                row["page"].strip(),
                None if loader else partial(_check, relations),
                suggestion=row.get("suggestion", "") if loader else "",
                runs=row.get("runs") or runs_of(row["group"]),
            )
        )


def _check(relations: list[dict[str, Any]], context: Context) -> Iterator[Violation]:
    spec, config = context.spec, context.config
    fields = {name: getattr(spec, name) for name in type(spec).model_fields}
    names = {**FUNCTIONS, **fields, "spec": spec, "config": config}
    for relation in relations:
        values, holds = relation.get("values", {}), relation["holds"]
        when = relation.get("when", "True")
        if config is None and any("config." in text for text in (*values.values(), when, holds)):
            continue
        for here in _each(relation.get("each", ""), names):
            for name, text in values.items():
                here[name] = _value(text, here)
            if not _value(when, here) or _value(holds, here):
                continue
            yield Violation(
                tuple(_shown(relation["at"], here).split(".")),
                _shown(relation["message"], here),
                numbers=dict(_numbers(holds, here)),
                suggestion=_shown(relation["suggestion"], here),
                severity=relation.get("severity"),
            )


def _each(text: str, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the names of a relation, with each item by its name."""
    name, _, items = text.partition(" in ")
    for item in _value(items, names) if items else [None]:
        yield {**names, name: item}


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, text, "eval")


def _value(text: str, names: dict[str, Any]) -> Any:
    return eval(_compiled(text), names)  # noqa: S307  (a text of this package)


def _shown(text: str, names: dict[str, Any]) -> str:
    """Return a text with the values of the expressions in its braces."""
    return str(_value(f'f"""{text}"""', names))


def _numbers(text: str, names: dict[str, Any]) -> Iterator[tuple[str, Number]]:
    """Yield the numbers that an expression names, by the last part of each name."""
    nodes: list[ast.AST] = [ast.parse(text, mode="eval").body]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Name | ast.Attribute):
            value = _value(ast.unparse(node), names)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield node.attr if isinstance(node, ast.Attribute) else node.id, value
        elif not isinstance(node, ast.Call):
            nodes += ast.iter_child_nodes(node)
