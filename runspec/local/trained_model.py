"""Where the model that a run has trained lies, and how others load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from broadcast.layout import stored_versions
from runspec.core.errors import UserError
from runspec.core.run_files import versions_in, weights_folder
from runspec.core.spec.schema import RunSpec
from runspec.lint.tokenizer_files import TokenizerFiles


def trained_model(run_dir: Path, spec: RunSpec) -> list[str]:
    """Lines on the newest published version after 0: its Hugging Face directory, what it lacks, and
    a line of Python for transformers and for vLLM. Empty where none is published.

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
