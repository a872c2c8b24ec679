"""Kinds of sources of documents, and their parameters. Nothing here reads documents."""

from __future__ import annotations

from runspec.core.spec.schema import Source

COLUMNS = ("text", "messages", "tokens")
"""Parameters that name the column of a row that is a document: text, a conversation, or token
ids."""
_ROW: dict[str, type] = {**dict.fromkeys(COLUMNS, str), "id_offset": int}
GENERATED: dict[str, type] = dict.fromkeys(("organisms", "reads", "length", "seed"), int)
"""Parameters of `generated_reads`, which reads no file."""
PARAMS: dict[str, dict[str, type]] = {
    "text": {"whole": bool},
    "jsonl": _ROW,
    "parquet": _ROW,
    "fasta": {},
    "fastq": {},
    "generated_reads": GENERATED,
}
"""Parameters by kind of source, and the type of each."""


def is_generated(source: Source) -> bool:
    """Return whether a source of documents reads no file."""
    return source.kind == "generated_reads"


def column_of(source: Source, kind: str) -> tuple[str, str]:
    """Return what a source's documents are, one of `COLUMNS`, and the column that holds them.

    Args:
        source: of documents; of kinds that have no columns the documents are text.
        kind: of the algorithm; rows without a named column are conversations for `sft`, else text.
    """
    named = next((key for key in COLUMNS if key in source.params), None)
    if named is not None:
        return named, str(source.params[named])
    rows = PARAMS.get(source.kind) is _ROW
    usual = "messages" if rows and kind == "sft" else "text"
    return usual, usual
