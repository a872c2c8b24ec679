"""Rules on data: fields and rows of sources, and prompts that begin the thinking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from runspec.core.errors import UserError
from runspec.core.spec.plugins import missing_plugins
from runspec.core.spec.schema import Data
from runspec.core.spec.schema_fields import close_match
from runspec.core.spec.source_files import PARAMS, ROW_KINDS, source_files, whole_uri
from runspec.lint.registry import Context, Violation, found_by_loader, rule
from runspec.lint.tokenizer_files import TokenizerFiles

_COLUMNS = ("problem_id", "task_type", "prompt", "verification_info", "type", "instruction")
_OPENED = re.compile(r"<think>(?:\\n|\s)*['\"]?\s*(?:-?[}%]\}\s*)*(?:\{%-?\s*endif\s*-?%\}\s*)*$")

Thinking = Literal["required", "none"]

LIKENESS = 0.75
"""Of a kind to an installed one that is taken for a slip (`close_match`)."""


@rule("unknown-kind", "reward", "warning")
def unknown_kind(context: Context) -> Iterator[Violation]:
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


@rule("source-fields", "reward")
def source_fields(context: Context) -> Iterator[Violation]:
    """A source of problems must name what its kind reads.

    `reasoning_gym` makes `size` problems with the generator `dataset`; `jsonl`, `parquet`,
    `hf_dataset`, `gsm8k` and `livecodebench` read rows from `uri`. Kinds of installed packages say
    for themselves what they need.
    """
    needed = {"reasoning_gym": ("dataset", "size"), **dict.fromkeys(ROW_KINDS, ("uri",))}
    examples = {"dataset": "spell_backward", "size": "20000", "uri": "problems.parquet"}
    for source in context.spec.data.sources:
        for field in needed.get(source.kind, ()):
            if getattr(source, field) is None:
                yield Violation(
                    ("data", "sources", source.name),
                    f"kind {source.kind} needs {field}",
                    suggestion=f"such as {field}: {examples[field]}",
                )


@rule("source-columns", "reward")
def source_columns(context: Context) -> Iterator[Violation]:
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
        for key in source.params if source.kind in ROW_KINDS else ():
            if key not in allowed:
                yield Violation(
                    ("data", "sources", source.name, "params", key),
                    f"{key[:80]} is no column that kind {source.kind} maps",
                    suggestion=", ".join(allowed) or "take it out",
                )


@rule("source-files", "reward", "warning", runs="all")
def found_files(context: Context) -> Iterator[Violation]:
    """The files that a source reads ought to be there where the spec is linted.

    A `uri` without `://` names a file, a folder, or files by a pattern; a relative one starts
    beside the spec or, where nothing is there, where the command runs. Sources fetch nothing: what
    is not on the coordinator's machine, or of documents on the learner's, stops the run before its
    first step. A warning, for a spec may be linted elsewhere.
    """
    for source in context.spec.data.sources:
        kinds = ROW_KINDS if context.spec.supervised is None else PARAMS
        if source.uri is None or "://" in source.uri or source.kind not in kinds:
            continue
        local = source.model_copy(update={"uri": whole_uri(source.uri, context.folder)})
        try:
            source_files(local)
        except UserError as error:
            yield Violation(
                ("data", "sources", source.name, "uri"),
                error.thing,
                suggestion=error.remedy or "name a file, or a folder that has any",
            )


@found_by_loader("problems", group="reward")
def problems() -> None:
    """Every problem can be read, every task type is graded, and every grader can grade.

    `runspec lint --data` looks at it, and so do `apply` and `doctor`: a process imports the
    plug-ins, reads every row of every source and grades two answers to a problem of each task
    type. It finds plug-ins that do not import, malformed rows, task types without a reward, sources
    of which no prompt fits `data.max_prompt_tokens`, and graders that raise. Each would end the run
    or leave it without rewards. Rows that are left out are counted, and no fault. Of a run that
    trains on documents it reads the first document of each file.
    """


@rule("solve-rate", "reward")
def solve_rate(context: Context) -> Iterator[Violation]:
    """The offline filter must have rows to filter, and bounds of which the lower is not above.

        min <= max

    Problems are kept whose recorded solve rate lies in [min, max]; with the bounds the wrong way
    round none does. A generator records none: `python -m sampler solve-rates` measures those of
    its problems and writes them as rows. INTELLECT-2 kept 0.125 to 0.5 of eight tries by a 7B
    model.
    """
    for source in context.spec.data.sources:
        rate = source.solve_rate
        where = ("data", "sources", source.name, "solve_rate")
        if rate is not None and source.kind == "reasoning_gym":
            yield Violation(
                where,
                "kind reasoning_gym makes problems, of which no solve rate is recorded",
                suggestion="measure them with `python -m sampler solve-rates`, and read its file",
            )
        elif rate is not None and rate.min > rate.max:
            yield Violation(
                (*where, "min"),
                f"{rate.min:g} is above max = {rate.max:g}: no problem is kept",
                numbers={"min": rate.min, "max": rate.max},
                suggestion=f"{{min: {rate.max:g}, max: {rate.min:g}}}",
            )


@rule("think-prefill", "reward", "warning")
def think_prefill(context: Context) -> Iterator[Violation]:
    """Prompts ought to open the thinking once: in the chat template or by `data.think_prefill`.

    With `think_prefill` a prompt ends with `<think>` and a line break where the template leaves the
    model's turn empty. Where the template ends with `<think>` itself (QwQ's, DeepSeek-R1's, and
    that of a `model.shape`) nothing is added, and the setting says what is not so. Looked at where
    the tokenizer is in a local directory.
    """
    spec, files = context.spec, context.tokenizer
    opened = spec.model.shape is not None or (files is not None and opens_thinking(files))
    if spec.data.think_prefill and opened and spec.data.thinking != "none":
        yield Violation(
            ("data", "think_prefill"),
            "the chat template opens the thinking itself; nothing is added",
            suggestion="take it out",
        )


@rule("thinking", "reward", "warning")
def thinking(context: Context) -> Iterator[Violation]:
    """Answers must be looked for where the model writes them.

    With `data.thinking: required` an output without `</think>` earns no task reward, so a model
    that does not think earns none at all; `none` grades all of its output. Where the field is not
    set it is taken from the chat template, which must be here to be read; else `required` is
    assumed. `none` rules out `think_prefill`, which opens a thinking that nothing ends.
    """
    spec, files, data = context.spec, context.tokenizer, context.spec.data
    where = ("data", "thinking")
    if data.thinking == "none" and data.think_prefill:
        yield Violation(
            where,
            "none, but think_prefill opens the thinking",
            suggestion="required",
            severity="error",
        )
    if spec.model.shape is not None:
        return
    found = None if files is None else thinking_of(files, data)
    if data.thinking is None and found is None:
        yield Violation(
            where,
            "not set, and there is no chat template here that tells",
            suggestion="required for a model that ends its thinking with </think>, else none",
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
