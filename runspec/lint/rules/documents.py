"""Rules on runs that train on documents: their sources, rows and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.spec.islands import members
from runspec.core.spec.schema import Source
from runspec.core.spec.schema_fields import close_match
from runspec.core.spec.source_files import COLUMNS, GENERATED, PARAMS, is_generated
from runspec.lint.registry import Context, Violation, rule

_LEAST = {**dict.fromkeys(GENERATED, 1), "seed": 0}
"""Least value of a parameter."""


@rule("tokens-per-update", "algorithm", runs="supervised")
def tokens_per_update(context: Context) -> Iterator[Violation]:
    """An update must be whole microbatches of every island.

        tokens_per_update = n x islands x packing.tokens x packing.rows,  n whole

    `packing.rows` rows of `packing.tokens` positions are a microbatch, the shape for which the
    program is compiled. An update adds the gradients of n of them. Islands have equal parts of an
    update, each in microbatches of its own `rows`; one learner is one island. METAGENE-1 (arXiv
    2501.02045): 30,720 sequences of 128 tokens, 3.9 million tokens an update.
    """
    spec, packing = context.spec, context.spec.learner.packing
    assert spec.supervised is not None
    asked, islands = spec.supervised.tokens_per_update, members(spec)
    count = max(len(islands), 1)
    for rows in sorted({member.rows or packing.rows for member in islands} or {packing.rows}):
        least = count * packing.tokens * rows
        if asked % least == 0:
            continue
        of = f"{count} islands x " if islands else ""
        yield Violation(
            ("algorithm", "tokens_per_update"),
            f"{asked} is no multiple of {of}packing.tokens {packing.tokens} x rows {rows} = "
            f"{least}",
            numbers={
                "tokens_per_update": asked,
                "packing.tokens": packing.tokens,
                "packing.rows": rows,
            }
            | ({"islands": count} if islands else {}),
            suggestion=f"{max(round(asked / least), 1) * least}",
        )


@rule("row-positions", "algorithm", runs="supervised")
def row_positions(context: Context) -> Iterator[Violation]:
    """A document of a packed row must not be longer than the model's positions.

        learner.packing.tokens <= model.max_context

    Positions count from the start of each document, and a document may fill its row. Past the
    positions that a model covers its rotary frequencies were never trained.
    """
    packed, positions = context.spec.learner.packing.tokens, context.spec.model.max_context
    if packed > positions:
        yield Violation(
            ("learner", "packing", "tokens"),
            f"{packed} is more than model.max_context = {positions}",
            numbers={"packing.tokens": packed, "max_context": positions},
            suggestion=f"at most {positions}, or a larger max_context",
        )


@rule("shape-tokenizer", "model", runs="supervised")
def shape_tokenizer(context: Context) -> Iterator[Violation]:
    """A `model.shape` that trains on documents must name a tokenizer.

    A shape has no files, so no tokenizer comes with it. `python -m learner_jax tokenizer train`
    makes one from the documents themselves; `model.tokenizer.hf` names its directory, relative to
    the spec. The tokenizer becomes part of every version.
    """
    model = context.spec.model
    if model.shape is not None and model.tokenizer is None:
        yield Violation(
            ("model", "shape"),
            "has no tokenizer: model.tokenizer must name one",
            suggestion="tokenizer: {hf: DIRECTORY}, with its tokenizer.json",
        )


@rule("document-kind", "algorithm", runs="supervised")
def document_kind(context: Context) -> Iterator[Violation]:
    """A source of documents must be of a kind that the learner reads.

        text, jsonl, parquet, fasta, fastq     files, plain or compressed by gzip
        generated_reads                        reads of random organisms, made when they are asked

    Kinds that installed packages offer make problems, which runs of `grpo` are graded on. A
    document is text, a conversation or token ids, and nothing grades it.
    """
    for source in context.spec.data.sources:
        if source.kind not in PARAMS:
            match = close_match(source.kind, PARAMS)
            yield Violation(
                ("data", "sources", source.name, "kind"),
                f"{source.kind[:80]!r} is no kind of documents",
                suggestion=f"did you mean {match}?" if match else ", ".join(PARAMS),
            )


@rule("document-params", "algorithm", runs="supervised")
def document_params(context: Context) -> Iterator[Violation]:
    """A source of documents must name its files, and parameters that its kind has.

        text             uri   params {whole: true}: each file is one document, else each line
        jsonl, parquet   uri   params {text: COLUMN}, {messages: COLUMN} or {tokens: COLUMN};
                               {id_offset: N} is added to every id of `tokens`
        fasta, fastq     uri
        generated_reads        params {organisms: 8, reads: 20000, length: 100, seed: 1}

    A misspelt parameter would leave its default in place. `messages` are conversations, of which
    runs of `sft` train the assistant's part; `pretrain` has no use for who says what.
    """
    kind = context.spec.algorithm.kind
    for source in context.spec.data.sources:
        if source.kind not in PARAMS:
            continue  # `document-kind` says so
        where = ("data", "sources", source.name)
        if source.uri is None and not is_generated(source):
            yield Violation(
                where, f"kind {source.kind} needs uri", suggestion="such as uri: documents.jsonl"
            )
        if source.uri is not None and is_generated(source):
            yield Violation(
                (*where, "uri"), f"kind {source.kind} reads no file", suggestion="remove it"
            )
        for key, message, suggestion in _faulty(source, kind):
            yield Violation((*where, "params", key), message, suggestion=suggestion)


def _faulty(source: Source, kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and suggestion for each parameter that is wrong."""
    known, columns = PARAMS[source.kind], [key for key in COLUMNS if key in source.params]
    for key, value in source.params.items():
        if key not in known:
            match = close_match(key, known)
            yield (
                key,
                f"{key[:80]} is no parameter of kind {source.kind}",
                f"did you mean {match}?" if match else ", ".join(known) or "remove it",
            )
        elif type(value) is not known[key]:
            words = {bool: "true or false", int: "a whole number", str: "the name of a column"}
            yield key, f"{words[known[key]]} was expected, got {value!r}", "change it"
        elif key in _LEAST and isinstance(value, int) and value < _LEAST[key]:
            yield key, f"{value} is below {_LEAST[key]}", f"{_LEAST[key]} or more"
        elif key in columns[1:]:
            yield key, f"{columns[0]} names the column already", "remove one of them"
        elif key == "id_offset" and "tokens" not in columns:
            yield key, "is added to ids, and no column tokens is named", "tokens: COLUMN"
        elif key == "messages" and kind != "sft":
            yield key, f"are conversations, which {kind} does not read", "kind: sft, or text"
