"""What the schema says of keys: which a block knows, which lists are named, where a key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args, get_origin

from runspec.core.spec.schema import Block


@cache
def keys_of(block: type[Block]) -> dict[str, Any]:
    """The keys of a block as YAML writes them, each with its annotation."""
    return {field.alias or name: field.annotation for name, field in block.model_fields.items()}


def block_in(annotation: Any) -> type[Block] | None:
    """The block that `Block` or `Block | None` stands for, None for any other annotation."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate if get_origin(annotation) is not list else None
    return None


def named_item(annotation: Any) -> type[Block] | None:
    """The block of a list of named blocks (those that layers merge by name), else None."""
    if get_origin(annotation) is not list:
        return None
    block = block_in(get_args(annotation)[0])
    return block if block is not None and "name" in keys_of(block) else None


def is_nullable(annotation: Any) -> bool:
    """Whether null is one of the values that an annotation allows."""
    return type(None) in get_args(annotation)


def close_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that `word` was probably meant to be.

    Args:
        word: as it was written.
        known: words to choose from.
        cutoff: least likeness, from 0 to 1 (`difflib.SequenceMatcher.ratio`).
    """
    matches = difflib.get_close_matches(word[:80], list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def suggest_key(key: str, block: type[Block]) -> str:
    """A hint for an unknown key: a near spelling, its proper home, or the keys that there are."""
    if match := close_match(key, keys_of(block)):
        return f"did you mean {match}?"
    from runspec.core.spec.schema_fields import schema_fields  # it is made of what is here

    if homes := [path for path in schema_fields() if path.rpartition(".")[2] == key]:
        return f"did you mean {homes[0]}?"
    return f"known here: {', '.join(keys_of(block))}"
