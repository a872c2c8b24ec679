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
They name the spec's top fields, `spec`, `NAMES`, and `config`, the model's shape. A relation
that names `config` is silent if the shape is unknown. The numbers that `holds` names are the
finding's.

A row without `holds` is the page of what the loader finds. Its `suggestion` is for findings without
one; `{path}` is the finding's.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import ceil, floor, lcm
from pathlib import Path
from types import CodeType
from typing import Any

from runspec.core.models.hardware import device_count, device_of
from runspec.core.models.memory import MAX_LOGITS, logits_chunk, prefill_bytes
from runspec.core.spec.findings import Number
from runspec.core.spec.islands import members, step_overlap
from runspec.estimate.broadcast import version_size
from runspec.estimate.learner import learner_memory
from runspec.estimate.price import hourly_price
from runspec.estimate.sampler import sampler_memory
from runspec.estimate.speed import step_seconds, tokens_to_check, validator_tokens_per_s
from runspec.lint.registry import (
    STATE_SHARE,
    Context,
    Rule,
    Violation,
    add,
    divisors,
    gb,
    runs_of,
)
from verify.thresholds import precision_of

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(ceil, device_count, device_of, divisors, floor, gb, hourly_price, lcm, learner_memory),
    *(logits_chunk, members, precision_of, prefill_bytes, sampler_memory, step_overlap),
    *(step_seconds, tokens_to_check, validator_tokens_per_s, version_size),
)
NAMES = {
    **{each.__name__: each for each in _FUNCTIONS},
    "MAX_LOGITS": MAX_LOGITS,
    "STATE_SHARE": STATE_SHARE,
}
"""Names of expressions besides the spec's and Python's own."""
_CONFIG = re.compile(r"\bconfig\b")
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
    names = {**NAMES, **fields, "spec": spec, "config": config}
    for relation in relations:
        values, holds = relation.get("values", {}), relation["holds"]
        when = relation.get("when", "True")
        if config is None and any(map(_CONFIG.search, (*values.values(), when, holds))):
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
            value = None if ast.unparse(node) in NAMES else _value(ast.unparse(node), names)
            if isinstance(value, int | float) and not isinstance(value, bool):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                yield name, value if abs(value) < 1e6 else round(value)
        elif not isinstance(node, ast.Call):
            nodes += ast.iter_child_nodes(node)
