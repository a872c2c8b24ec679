"""`runspec init`: a commented spec to start from, with what editors, commits and CI need for it."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, get_args

import typer
from pydantic import TypeAdapter, ValidationError

from runspec.core.errors import UserError, bad_usage
from runspec.core.files import expand_user, temporary_name
from runspec.core.models import jax_device, made_tokenizer_files
from runspec.core.models.family import load_config, named_config
from runspec.core.schema.field_docs import json_schema
from runspec.core.schema.fields import NAME_WORDS, Name
from runspec.core.schema.yaml_text import yaml_scalar
from runspec.lint import TokenizerFiles
from runspec.lint.rules.data import opens_thinking, thinking_of
from runspec.local.machine import find_model, gpu_names
from runspec.lock import is_repository

TemplateName = Literal[
    "laptop",
    "problems",
    "sums",
    "tools",
    "model",
    "node-8gpu",
    "tpu-and-volunteers",
    "pretrain",
    "sft",
]
SPEC, SECOND_SPEC, SCHEMA = "spec.yaml", "rl.yaml", "runspec.schema.json"
PROBLEMS, CONVERSATIONS = "problems.jsonl", "conversations.jsonl"
# For JetBrains' editors and for those with yaml-language-server; the first wants its line first.
MODELINES = f"# $schema: ./{SCHEMA}\n# yaml-language-server: $schema=./{SCHEMA}\n"
TEMPLATES: tuple[str, ...] = get_args(TemplateName)
_MODELS = {"model": None, "sft": None, "node-8gpu": "Qwen/Qwen3-4B"}
"""The templates that take `--model`, with the model that they name without it."""
_LONGEST = {"model": 512, "sft": 512, "node-8gpu": 8192}
"""Tokens of prompt and answer together, where the model's positions cover them."""
_LONGEST_PROMPT = 1024
_UNKNOWN_CONTEXT = 8192
_PROMPTS = {
    "required": r"Think first, and write </think>. Then give the answer in \boxed{}.",
    "none": r"Give the answer in \boxed{}.",
}
"""System's prompts, by what is graded."""
_NOT_PINNED = (
    '# runspec: ignore[unpinned-revision] reason="pin the commit that you use, or run `runspec '
    'lock`"'
)


@bad_usage()
def init_command(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")] = Path(),
    template: Annotated[
        TemplateName,
        typer.Option("--template", "-t", metavar="NAME", help=", ".join(get_args(TemplateName))),
    ] = "laptop",
    name: Annotated[
        str | None, typer.Option("--name", help="Of the run.", show_default="the folder's name")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="DIR or ORG/NAME, of model, sft and node-8gpu."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Writes over files, data too.")] = False,
) -> int:
    """Writes the files; returns the exit code."""
    files = initial_files(template, run_name(folder, name), model)
    for data in (PROBLEMS, CONVERSATIONS):
        if not force and (folder / data).exists():
            files.pop(data, None)
    write_all(folder, files, force=force)
    for written in files:
        print(folder / written)
    spec = folder / SPEC
    print(f"\nnext: runspec lint {spec}, then runspec apply {spec}", file=sys.stderr)
    return 0


def run_name(folder: Path, name: str | None) -> str:
    """The name that was asked for, else the folder's.

    Raises:
        UserError: no run can have that name.
    """
    asked = folder.resolve().name if name is None else name
    try:
        return TypeAdapter(Name).validate_python(asked)
    except ValidationError as error:
        near = re.sub(r"[^a-z0-9_-]+", "-", asked.lower()).strip("-_")[:63]
        raise UserError(
            f"{asked[:80]!r} cannot be a run's name: {NAME_WORDS}",
            place="--name" if name is not None else str(folder),
            remedy=f"--name {near or 'my-run'}",
        ) from error


def initial_files(template: TemplateName, name: str, model: str | None = None) -> dict[str, str]:
    """The files of a new project by their names.

    Args:
        template: one of `TEMPLATES`.
        name: of the run.
        model: a directory, or org/name; None: the template's own.

    Raises:
        UserError: the template wants a model, takes none, or cannot be made with this one.
    """
    device = next(filter(None, map(jax_device, gpu_names())), None)
    # Of the usual node where there is no GPU that is known.
    values = {"name": yaml_scalar(name), "gpu": device.kind if device else "h100-80g"}
    if template in _MODELS:
        values |= _model_values(model or _MODELS[template], _LONGEST[template])
    elif model is not None:
        raise UserError(
            f"the template {template} has a model of its own",
            place="--model",
            remedy=f"leave it out, or use --template {' or '.join(_MODELS)}",
        )
    spec = Template(_template(f"{template}.yaml")).substitute(values)
    files = {
        SPEC: MODELINES + spec,
        SCHEMA: json.dumps(json_schema("07"), indent=1, ensure_ascii=False) + "\n",
        ".pre-commit-config.yaml": _template("pre-commit.yaml"),
        ".github/workflows/runspec.yaml": _template("workflow.yaml"),
    }
    # 500 problems or conversations to start with, until a person has put others in their place.
    pairs = [(a, b) for a in range(20) for b in range(25)]
    if f"uri: {PROBLEMS}" in spec:
        rows = (_problem(a, b, f"What is {a} + {b}?") for a, b in pairs)
        if template == "tools":
            rows = (_product(a, b) for a in range(11, 99) for b in range(11, 99))
        files[PROBLEMS] = _lines(rows)
    if f"uri: {CONVERSATIONS}" in spec:
        talks = (_talk(f"What is {a} + {b}?", f"{a + b}.") for a, b in pairs)
        files[CONVERSATIONS] = _lines(talks)
    if template == "pretrain":
        bases = resources.files("runspec.lint") / "examples" / "models" / "bases"
        for file in ("tokenizer.json", "tokenizer_config.json"):
            files[f"tokenizer/{file}"] = (bases / file).read_text(encoding="utf-8")
    if template == "sums":
        # With `-rl` behind it a name needs no quotes.
        files[SECOND_SPEC] = MODELINES + Template(_template("sums-rl.yaml")).substitute(name=name)
        files |= {**data_files(seed=0), **tokenizer_files()}
        files["tokenizer/tokenizer.json"] = _template("digits.json")
    return files


def _model_values(named: str | None, longest: int) -> dict[str, str]:
    """The lines that name a model, and lengths that its positions cover."""
    if named is None:
        raise UserError(
            "the template starts from a model of yours, and none is named",
            place="--model",
            remedy="--model DIR (with config.json and *.safetensors), or --model ORG/NAME",
        )
    directory, found = expand_user(Path(named)), find_model(named, None, os.environ)
    local = directory.is_dir()
    if found is None and (local or "/" not in named or not is_repository(named)):
        raise UserError(
            f"no directory {str(directory.absolute())!r} with config.json and *.safetensors",
            place="--model",
            remedy="name such a directory, or a model of the Hugging Face Hub as ORG/NAME",
        )
    lines = [f"hf: {yaml_scalar(str(directory.absolute()) if local else named)}"]
    if not local:
        lines += [f"revision: {found.name}"] if found else [_NOT_PINNED, "revision: null"]
    config = load_config(found) if found else named_config(named)
    context = _UNKNOWN_CONTEXT
    if config is not None:
        context = min(filter(None, (config.max_position_embeddings, config.exact_length)))
    length = min(context, longest)
    prompt = min(length // 2, _LONGEST_PROMPT)
    tokenizer = TokenizerFiles.read(found) if found else None
    thinking = (tokenizer and thinking_of(tokenizer)) or "required"
    values = {
        "model": "\n  ".join(lines),
        "context": context,
        "length": length,
        "prompt": prompt,
        "answer": length - prompt,
        "update": 8 * length,
        "thinking": thinking,
        "system_prompt": yaml_scalar(_PROMPTS[thinking]),
        "think_prefill": yaml_scalar(
            thinking == "required" and not (tokenizer and opens_thinking(tokenizer))
        ),
    }
    return {key: str(value) for key, value in values.items()}


def write_all(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Writes files under temporary names and renames them once all are written.

    Raises:
        UserError: one is there already and `force` is false, or one cannot be written; then none
            is.
    """
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise UserError(
            f"already there: {', '.join(there)}",
            place=str(folder),
            remedy="choose another folder, or add --force to write over them",
        )
    written: dict[Path, Path] = {}
    try:
        for name, text in files.items():
            path = folder / name
            if path.is_dir():
                raise IsADirectoryError(f"{name} is a directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(path)
            written[temporary] = path
            temporary.write_text(text, encoding="utf-8")
        for temporary, path in written.items():
            temporary.rename(path)
    except OSError as error:
        for temporary in written:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write: {error.strerror or error}",
            place=str(folder),
            remedy="choose a folder that can be written",
        ) from error


def _template(name: str) -> str:
    return (resources.files("runspec.cli") / "templates" / name).read_text(encoding="utf-8")


SUMS_SHOWN, SUMS_ASKED, SUMS_HELD_OUT = 500, 3500, 500
"""Sums of each file; no sum is in two of them."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|eos|>{% endgeneration %}"
    "{% else %}<|bos|>{{ message.content }}{% endif %}{% endfor %}"
)
"""Marks what the assistant says, which is what `sft` trains."""


def sums(seed: int) -> list[tuple[int, int]]:
    """Return the summands of all files, in the files' order."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(pairs)
    return pairs[: SUMS_SHOWN + SUMS_ASKED + SUMS_HELD_OUT]


def worked(a: int, b: int) -> str:
    """Return ones, tens with the carry, and the answer.

    37 + 48 is `7+8=15;3+4+1=8</think>85`.
    """
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    carried = f"{a % 10}+{b % 10}={ones:02};{a // 10}+{b // 10}+{ones // 10}={tens}"
    return f"{carried}</think>{a + b}"


def data_files(seed: int) -> dict[str, str]:
    """Return the files of conversations and of problems by their names; a sum is in one of them."""
    drawn, end = sums(seed), SUMS_SHOWN + SUMS_ASKED
    return {
        "sft.jsonl": _lines(_talk(f"{a}+{b}=", worked(a, b)) for a, b in drawn[:SUMS_SHOWN]),
        "problems.jsonl": _lines(_problem(a, b, f"{a}+{b}=") for a, b in drawn[SUMS_SHOWN:end]),
        "held_out.jsonl": _lines(_problem(a, b, f"{a}+{b}=") for a, b in drawn[end:]),
    }


def tokenizer_files() -> dict[str, str]:
    """Return what goes with digits.json, a tokenizer that is trained on all `worked` sums."""
    tokens = {f"{kind}_token": f"<|{kind}|>" for kind in ("pad", "bos", "eos")}
    files = {**made_tokenizer_files(tokens), "chat_template.jinja": CHAT_TEMPLATE}
    return {f"tokenizer/{name}": text for name, text in files.items()}


def _problem(a: int, b: int, prompt: str) -> dict[str, Any]:
    return {
        "problem_id": f"{a}+{b}",
        "task_type": "math",
        "prompt": prompt,
        "verification_info": {"ground_truth": str(a + b)},
    }


def _product(a: int, b: int) -> dict[str, Any]:
    known = {"ground_truth": str(a * b), "expression": f"{a}*{b}"}
    about = {"problem_id": f"{a}*{b}", "task_type": "calculator", "prompt": f"{a}*{b}=?"}
    return {**about, "verification_info": known}


def _talk(prompt: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    }


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
