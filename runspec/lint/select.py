"""Which rules a person asked for, by code or by group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from runspec.core.errors import UserError
from runspec.core.spec.schema_fields import close_match
from runspec.lint.registry import RULES, Group


def selection(select: Sequence[str], ignore: Sequence[str]) -> frozenset[str]:
    """Codes of the rules of `--select` (all where it names none), less those of `--ignore`.

    Args:
        select: codes and groups, several in one text between commas.
        ignore: likewise.

    Raises:
        UserError: a word is neither a code nor a group.
    """
    chosen = _codes(select, "--select") if select else set(RULES)
    return frozenset(chosen - _codes(ignore, "--ignore"))


def _codes(texts: Iterable[str], option: str) -> set[str]:
    groups = get_args(Group)
    found: set[str] = set()
    for word in (part.strip() for text in texts for part in text.split(",")):
        if word in RULES:
            found.add(word)
        elif word in groups:
            found |= {code for code, rule in RULES.items() if rule.group == word}
        else:
            match = close_match(word, [*RULES, *groups])
            raise UserError(
                f"no rule or group {word[:80]!r}" + (f"; did you mean {match}?" if match else ""),
                place=option,
                remedy=f"name a code of `runspec explain --list`, or one of: {', '.join(groups)}",
            )
    return found
