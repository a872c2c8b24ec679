"""Rules on data: sources, their kinds, columns and files, documents, and the thinking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import Data, Source
from runspec.core.schema import source_files as sources
from runspec.core.schema.role_names import members
from runspec.core.schema.schema_fields import close_match
from runspec.core.schema.source_files import missing_plugins
from runspec.estimate.speed import corpus_seconds, learner_seconds
from runspec.lint import Context, Found, TokenizerFiles, Violation, model_rule, relation, rule

_COLUMNS = ("problem_id", "task_type", "prompt", "verification_info", "type", "instruction")
_OPENED = re.compile(r"<think>(?:\\n|\s)*['\"]?\s*(?:-?[}%]\}\s*)*(?:\{%-?\s*endif\s*-?%\}\s*)*$")

Thinking = Literal["required", "none"]

LIKENESS = 0.75
"""Of a kind to an installed one that is taken for a slip (`close_match`)."""


@rule("reward", "warning")
def unknown_kind(context: Context) -> Found:
    """Kinds of sources, rewards and monitors must be those that installed packages offer.

    Packages offer kinds as entry points of `runspec.sources`, `runspec.rewards` and
    `runspec.monitors`; the linter reads their names and imports nothing. A kind that is spelt
    nearly like an installed one is an error. Any other is a warning, for a spec may be linted where
    the package that offers it is not installed: `apply` does not start such a run. A kind of yours
    whose name is so near to another is suppressed where its package is missing.
    """
    for plugin in missing_plugins(context.spec):
        match = close_match(plugin.kind, plugin.installed, LIKENESS)
        yield Violation(
            (*plugin.location, "kind"),
            str(plugin),
            suggestion=f"did you mean {match}?" if match else plugin.remedy,
            severity="error" if match else None,
        )


@rule("reward")
def source_fields(context: Context) -> Found:
    """A source of problems must name what its kind reads.

    `reasoning_gym` makes `size` problems with the generator `dataset`; `jsonl`, `parquet`,
    `hf_dataset`, `gsm8k` and `livecodebench` read rows from `uri`. Kinds of installed packages say
    for themselves what they need.
    """
    needed = {
        "reasoning_gym": ("dataset", "size"),
        **dict.fromkeys(sources.ROW_KINDS, ("uri",)),
    }
    examples = {"dataset": "spell_backward", "size": "20000", "uri": "problems.parquet"}
    for source in context.spec.data.sources:
        for field in needed.get(source.kind, ()):
            yield from relation(
                getattr(source, field) is not None,
                f"data.sources.{source.name}",
                f"kind {source.kind} needs {field}",
                f"such as {field}: {examples[field]}",
            )


@rule("reward")
def source_columns(context: Context) -> Found:
    """Params of a source that reads rows must be columns that it maps.

        params: {problem_id: id, task_type: type, prompt: question, verification_info: check}

    Each says what one of the four columns is called in the files; `verification_info` may be an
    object of columns, `type` stands for `task_type`, and `instruction` goes before each prompt. A
    `hf_dataset` also takes `split`, and `gsm8k` and `livecodebench`, whose columns are fixed, take
    none. Any other key is a misspelling, and the column that it was meant for would be looked for
    under its usual name.
    """
    known = {"gsm8k": (), "livecodebench": (), "hf_dataset": (*_COLUMNS, "split")}
    for source in context.spec.data.sources:
        allowed = known.get(source.kind, _COLUMNS)
        for key in source.params if source.kind in sources.ROW_KINDS else ():
            if key not in allowed:
                yield Violation(
                    ("data", "sources", source.name, "params", key),
                    f"{key[:80]} is no column that kind {source.kind} maps",
                    suggestion=", ".join(allowed) or "take it out",
                )


@rule("reward", "warning", runs="all")
def source_files(context: Context) -> Found:
    """The files that a source reads ought to be there where the spec is linted.

    A `uri` without `://` names a file, a folder, or files by a pattern; a relative one starts
    beside the spec or, where nothing is there, where the command runs. Sources fetch nothing: what
    is not on the coordinator's machine, or of documents on the learner's, stops the run before its
    first step. A warning, for a spec may be linted elsewhere.
    """
    for source in context.spec.data.sources:
        kinds = sources.ROW_KINDS if context.spec.supervised is None else sources.PARAMS
        if source.uri is None or "://" in source.uri or source.kind not in kinds:
            continue
        local = source.model_copy(update={"uri": sources.whole_uri(source.uri, context.folder)})
        try:
            sources.source_files(local)
        except UserError as error:
            yield Violation(
                ("data", "sources", source.name, "uri"),
                error.thing,
                suggestion=error.remedy or "name a file, or a folder that has any",
            )


@rule("reward", "warning")
def think_prefill(context: Context) -> Found:
    """Prompts ought to open the thinking once: in the chat template or by `data.think_prefill`.

    With `think_prefill` a prompt ends with `<think>` and a line break where the template leaves the
    model's turn empty. Where the template ends with `<think>` itself (QwQ's, DeepSeek-R1's, and
    that of a `model.shape`) nothing is added, and the setting says what is not so. Looked at where
    the tokenizer is in a local directory.
    """
    spec, files = context.spec, context.tokenizer
    opened = spec.model.shape is not None or (files is not None and opens_thinking(files))
    return relation(
        not (spec.data.think_prefill and opened) or spec.data.thinking == "none",
        "data.think_prefill",
        "the chat template opens the thinking itself; nothing is added",
        "take it out",
    )


@rule("reward", "warning")
def thinking(context: Context) -> Found:
    """Answers must be looked for where the model writes them.

    With `data.thinking: required` an output without `</think>` earns no task reward, so a model
    that does not think earns none at all; `none` grades all of its output. Where the field is not
    set it is taken from the chat template, which must be here to be read; else `required` is
    assumed. `none` rules out `think_prefill`, which opens a thinking that nothing ends.
    """
    spec, files, data = context.spec, context.tokenizer, context.spec.data
    yield from relation(
        data.thinking != "none" or not data.think_prefill,
        "data.thinking",
        "none, but think_prefill opens the thinking",
        "required",
        severity="error",
    )
    told = data.thinking or (thinking_of(files, data) if files else None)
    yield from relation(
        spec.model.shape is not None or told is not None,
        "data.thinking",
        "not set, and there is no chat template here that tells",
        "required for a model that ends its thinking with </think>, else none",
    )


def thinking_of(files: TokenizerFiles, data: Data | None = None) -> Thinking | None:
    """Return `data.thinking` as a model's chat template, or a prompt of the spec, suggests it:
    whether one knows `<think>`; None where there are several templates."""
    if files.has_template and files.template is None:
        return None
    texts = [re.sub(r"\{#.*?#\}", "", files.template or "", flags=re.DOTALL)]
    if data is not None:
        opened = "<think>" if data.think_prefill else ""
        texts += [data.system_prompt or "", data.length_prompt, opened]
    return "required" if any("think>" in text for text in texts) else "none"


def opens_thinking(files: TokenizerFiles) -> bool:
    """Whether the chat template ends a prompt with `<think>` itself."""
    return _OPENED.search(files.template or "") is not None


_LEAST = {**dict.fromkeys(sources.GENERATED, 1), "seed": 0}
"""Least value of a parameter."""


@rule("algorithm", runs="supervised")
def tokens_per_update(context: Context) -> Found:
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
        of = f"{count} islands x " if islands else ""
        sizes = {"packing.tokens": packing.tokens, "packing.rows": rows}
        yield from relation(
            asked % least == 0,
            "algorithm.tokens_per_update",
            f"{asked} is no multiple of {of}packing.tokens {packing.tokens} x rows {rows} = "
            f"{least}",
            f"{max(round(asked / least), 1) * least}",
            {"tokens_per_update": asked} | sizes | ({"islands": count} if islands else {}),
        )


@rule("algorithm", runs="supervised")
def document_kind(context: Context) -> Found:
    """A source of documents must be of a kind that the learner reads.

        text, jsonl, parquet, fasta, fastq     files, plain or compressed by gzip
        generated_reads                        reads of random organisms, made when they are asked

    Kinds that installed packages offer make problems, which runs of `grpo` are graded on. A
    document is text, a conversation or token ids, and nothing grades it.
    """
    for source in context.spec.data.sources:
        match = close_match(source.kind, sources.PARAMS)
        yield from relation(
            source.kind in sources.PARAMS,
            f"data.sources.{source.name}.kind",
            f"{source.kind[:80]!r} is no kind of documents",
            f"did you mean {match}?" if match else ", ".join(sources.PARAMS),
        )


@rule("algorithm", runs="supervised")
def document_params(context: Context) -> Found:
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
        if source.kind not in sources.PARAMS:
            continue  # `document-kind` says so
        where = ("data", "sources", source.name)
        if source.uri is None and not sources.is_generated(source):
            yield Violation(
                where, f"kind {source.kind} needs uri", suggestion="such as uri: documents.jsonl"
            )
        if source.uri is not None and sources.is_generated(source):
            yield Violation(
                (*where, "uri"), f"kind {source.kind} reads no file", suggestion="remove it"
            )
        for key, message, suggestion in _faulty(source, kind):
            yield Violation((*where, "params", key), message, suggestion=suggestion)


def _faulty(source: Source, kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and suggestion for each parameter that is wrong."""
    known, columns = (
        sources.PARAMS[source.kind],
        [key for key in sources.COLUMNS if key in source.params],
    )
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


_SOON_S = 600.0
"""Time for a corpus that nobody minds."""


@model_rule("algorithm", "warning", "supervised")
def corpus_time(context: Context, config: ModelConfig) -> Found:
    """A corpus should be made in a tenth of the time that it trains.

        corpus_s <= max(600, steps x learner_s / 10)

    The learner makes its corpus before the first step, and its devices wait. Its host tokenizes
    about 450k tokens/s on each of 16 cores, or reads 25M token ids/s of Parquet. The corpus counts
    as many tokens as the run trains: more epochs need less. Silent where the learner's speed is not
    known, and on CPUs.
    """
    spec = context.spec
    step_s = learner_seconds(spec, config)
    if spec.learner.hardware.kind == "cpu" or step_s is None:
        return
    made_s, trained_s = corpus_seconds(spec), spec.steps * step_s
    yield from relation(
        made_s <= max(_SOON_S, trained_s / 10),
        "data.sources",
        f"a corpus of {spec.steps} steps is made in {made_s:,.0f} s, and trained in "
        f"{trained_s:,.0f} s",
        "Parquet of token ids (params: {tokens: NAME}), or the corpus of another run in the cache",
        {"corpus_s": float(f"{made_s:.4g}"), "trained_s": float(f"{trained_s:.4g}")},
    )
