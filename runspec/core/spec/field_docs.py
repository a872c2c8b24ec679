"""Docstrings under the schema's fields, read from its source when somebody asks.

pydantic could collect them (`use_attribute_docstrings`), but does so at import, which every command
would pay for.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path

from runspec.core.spec.schema import Block


def field_doc(block: type[Block], attribute: str) -> str:
    """What stands under a field of a block, as one paragraph; empty where nothing does."""
    return _documented(block.__module__).get((block.__qualname__, attribute), "")


def block_doc(block: type[Block]) -> str:
    """A block's docstring."""
    return inspect.cleandoc(block.__doc__ or "")


@cache
def _documented(module: str) -> dict[tuple[str, str], str]:
    """(class, field) to docstring, of one module."""
    source = sys.modules[module].__file__
    assert source is not None, "the schema is a package of files"
    classes = [
        node
        for node in ast.parse(Path(source).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    return {
        (node.name, field.target.id): " ".join(str(below.value.value).split())
        for node in classes
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
