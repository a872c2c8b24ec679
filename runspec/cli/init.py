"""`runspec init`: a commented spec to start from, with what editors, commits and CI need for it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from runspec.cli.options import TemplateName
from runspec.cli.sums import data_files, tokenizer_files
from runspec.core.errors import UserError, bad_usage
from runspec.core.files import expand_user, temporary_name
from runspec.core.models.family import load_config
from runspec.core.models.hardware import jax_device
from runspec.core.models.spec_model import named_config
from runspec.core.spec.field_docs import json_schema
from runspec.core.spec.fields import NAME_WORDS, Name
from runspec.core.spec.yaml_text import yaml_scalar
from runspec.lint.rules.data import opens_thinking, thinking_of
from runspec.lint.tokenizer_files import TokenizerFiles
from runspec.local.machine import find_model, gpu_names
from runspec.lock.cache import is_repository

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
    folder: Path, template: TemplateName, name: str | None, model: str | None, force: bool
) -> int:
    """Writes the files; returns the exit code."""
    files = initial_files(template, run_name(folder, name), model)
    for data in (PROBLEMS, CONVERSATIONS):
        if (folder / data).exists():
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
    values = {"name": yaml_scalar(name), "gpu": _gpu_kind()}
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
    if f"uri: {PROBLEMS}" in spec:
        files[PROBLEMS] = "".join(json.dumps(row) + "\n" for row in _additions())
    if f"uri: {CONVERSATIONS}" in spec:
        talks = ({"messages": _talk(row)} for row in _additions())
        files[CONVERSATIONS] = "".join(json.dumps(talk) + "\n" for talk in talks)
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


def _additions() -> list[dict[str, Any]]:
    """500 problems to start with, until a person has put their own in their place."""
    return [
        {
            "problem_id": f"{a}+{b}",
            "task_type": "math",
            "prompt": f"What is {a} + {b}?",
            "verification_info": {"ground_truth": str(a + b)},
        }
        for a in range(20)
        for b in range(25)
    ]


def _talk(problem: dict[str, Any]) -> list[dict[str, str]]:
    """A problem of `_additions`, asked and answered."""
    answer = problem["verification_info"]["ground_truth"]
    return [
        {"role": "user", "content": problem["prompt"]},
        {"role": "assistant", "content": f"{answer}."},
    ]


def _gpu_kind() -> str:
    """`hardware.kind` of the GPUs here; of the usual node where there are none that are known."""
    device = next(filter(None, map(jax_device, gpu_names())), None)
    return device.kind if device else "h100-80g"


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
