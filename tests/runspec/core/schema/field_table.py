"""Table of the schema's fields in docs/spec.md.

`python -m tests.runspec.core.schema.field_table docs/spec.md` rewrites it between its marks; a test
compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runspec.core.schema.field_docs import block_doc, counted_type, default_words, field_doc
from runspec.core.schema.fields import Block
from runspec.core.schema.schema_fields import SchemaField, fields_in, schema_fields

BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"


def field_table() -> str:
    """Return Markdown: a heading and a table for each block; a block that recurs is shown once."""
    blocks: dict[str, dict[type[Block], None]] = {}
    for path, field in schema_fields().items():
        blocks.setdefault(path.rpartition(".")[0], {})[field.block] = None
    homes: dict[type[Block], list[str]] = {}
    for path, found in blocks.items():
        homes.setdefault(_common(*found), []).append(path)
    return "\n".join(_block(block, paths) for block, paths in homes.items())


def _common(first: type[Block], *others: type[Block]) -> type[Block]:
    """Return the block itself, or what alternatives have in common."""
    return next(base for base in first.__mro__ if all(issubclass(each, base) for each in others))


def with_table(page: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{field_table()}{END}{after}"


def _block(block: type[Block], homes: list[str]) -> str:
    first = homes[0]
    title = ", ".join(f"`{home}`" for home in homes) if first else "The spec"
    rows = [_row(field) for field in fields_in(first)]
    head = "| key | what it is | type | default | change |\n|---|---|---|---|---|\n"
    return f"### {title}\n{block_doc(block).splitlines()[0]}\n\n{head}{''.join(rows)}"


def _row(field: SchemaField) -> str:
    default = default_words(field)
    change = field.change + (", site" if field.site else "")
    cells = (
        f"`{field.key}`",
        field_doc(field),
        counted_type(field),
        default if default in ("", "required") else f"`{default}`",
        change,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
