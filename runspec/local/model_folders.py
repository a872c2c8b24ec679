"""Model folders of a run: the starting model, linked into it, and the model that it trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from bridge.model_files import TOKENIZER_NAMES
from broadcast.layout import stored_versions
from runspec.core.errors import UserError
from runspec.core.files import new_directory
from runspec.core.models.family import load_config
from runspec.core.run_files import versions_in, weights_folder
from runspec.core.spec.schema import RunSpec
from runspec.lint.tokenizer_files import TokenizerFiles


def link_model(initial: Path, model: Path, tokenizer: Path | None) -> None:
    """Makes `initial/`, in place of one that was left unfinished or lost its files.

    Args:
        initial: what is made.
        model: directory with config.json and safetensors.
        tokenizer: directory whose tokenizer and chat template are taken; None: the model's own.

    Raises:
        UserError: the tokenizer knows tokens that the model has no rows for.
    """
    if initial.is_symlink():
        initial.unlink()
    elif initial.exists():
        shutil.rmtree(initial)
    if tokenizer is None:
        initial.symlink_to(model)
        return
    require_fitting(tokenizer, model)
    present = (path for path in model.iterdir() if path.is_file())  # of a version, no delta/
    files = {path.name: path for path in present if path.name not in TOKENIZER_NAMES}
    named = (tokenizer / name for name in TOKENIZER_NAMES)
    files |= {path.name: path for path in named if path.is_file()}
    with new_directory(initial) as folder:
        for name, path in files.items():
            (folder / name).symlink_to(path.resolve())


def link_tokenizer(initial: Path, tokenizer: Path) -> None:
    """Makes `initial/` with the files of a tokenizer alone, to which the weights are added."""
    initial.mkdir(exist_ok=True)
    for name in TOKENIZER_NAMES:
        if (tokenizer / name).is_file() and not (initial / name).is_symlink():
            (initial / name).symlink_to((tokenizer / name).resolve())


def require_fitting(tokenizer: Path, model: Path) -> None:
    """Raises UserError where the tokenizer's largest token id is beyond the model's vocabulary."""
    place, files = str(tokenizer / "tokenizer.json"), TokenizerFiles.read(tokenizer)
    if files is None or not files.ids:
        raise UserError("not a tokenizer", place=place, remedy="a tokenizer.json is needed")
    largest, rows = max(files.ids.values()), load_config(model).vocab_size
    if largest >= rows:
        raise UserError(
            f"its largest token id is {largest}, the model's vocabulary has {rows} rows",
            place=place,
            remedy="model.tokenizer must be of the model's vocabulary",
        )


def trained_model(run_dir: Path, spec: RunSpec) -> list[str]:
    """Return lines on the newest published version after 0: its Hugging Face directory, what it
    lacks, and a line of Python for transformers and for vLLM. Empty where none is published.

    transformers' AutoTokenizer takes a tokenizer of its own for some architectures, so the line
    names the class that goes by tokenizer.json. vLLM has that fault too: where the run made the
    tokenizer, it is to be given token ids.
    """
    published = stored_versions(run_dir / "store" / "origin", spec.name)
    version = max({*published} & {*versions_in(weights_folder(run_dir))}, default=0)
    if version == 0:
        return []
    folder = weights_folder(run_dir) / f"v{version}"
    which = "the last" if version == spec.steps else f"the newest published of {spec.steps}"
    place = json.dumps(str(folder))
    by_ids = ", skip_tokenizer_init=True" if spec.model.hf is None else ""
    return [
        f"version {version}, {which}, as a Hugging Face directory: {folder}",
        *_lacking(folder),
        "transformers: from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast; "
        f"model = AutoModelForCausalLM.from_pretrained({place}); "
        f"tokenizer = PreTrainedTokenizerFast.from_pretrained({place})",
        f"vLLM: from vllm import LLM; model = LLM({place}{by_ids})",
    ]


def _lacking(folder: Path) -> Iterator[str]:
    """Yields a line for each part that the directory lacks."""
    from bridge.safetensors_io import read_headers  # draws numpy

    try:
        read_headers(folder)
    except UserError as error:
        yield f"it is damaged: {error.place}: {error.thing}"
    if not (folder / "config.json").is_file():
        yield "it has no config.json"
    tokenizer = TokenizerFiles.read(folder)
    if tokenizer is None:
        yield "it has no tokenizer.json"
    elif not tokenizer.has_template:
        yield "it has no chat template, as the model that it started from"
