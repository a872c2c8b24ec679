"""The starting model of `model.hf`: a link to its files, or a folder of links where the spec names
another tokenizer than the model's own."""

from __future__ import annotations

import shutil
from pathlib import Path

from bridge.tokenizer_files import TOKENIZER_NAMES
from runspec.core.errors import UserError
from runspec.core.files import new_directory
from runspec.core.models.config import load_config
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
