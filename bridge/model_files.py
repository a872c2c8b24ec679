"""Model directories: the files beside the weights, and how a whole directory is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import new_directory
from runspec.core.models.config import CONFIG_NAME, read_config
from runspec.core.object_store import Folder

GENERATION_NAME = "generation_config.json"
MODEL_FOLDER = "hugging_face"
"""The folder of a checkpoint that `import` writes them to."""
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_model_files(source: Path, target: Path) -> None:
    """Copies the config, the defaults of generation and the tokenizer: those that there are."""
    target.mkdir(exist_ok=True)
    for name in (CONFIG_NAME, GENERATION_NAME, *TOKENIZER_NAMES):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def model_directory(checkpoint: Folder) -> Path:
    """Where the config of a checkpoint lies: in it, or beside it.

    Raises:
        UserError: nowhere there.
    """
    if isinstance(checkpoint, Path):
        for folder in (checkpoint / MODEL_FOLDER, checkpoint, checkpoint.parent):
            if (folder / CONFIG_NAME).is_file():
                return folder
    raise UserError(
        f"no {CONFIG_NAME} in it or beside it",
        place=str(checkpoint),
        remedy="name the model's Hugging Face directory: --model-dir DIR",
    )


def stated_dtype(model_dir: Path) -> str:
    """The type that a config.json names for the weights.

    Raises:
        UserError: it names none.
    """
    config = read_config(model_dir)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if not isinstance(dtype, str):
        raise UserError(
            "names no dtype", place=str(model_dir / CONFIG_NAME), remedy="choose one: --dtype D"
        )
    return dtype


@contextmanager
def output_directory(
    path: Path, faults: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[Path]:
    """Yields a folder that becomes `path` by one rename when the block succeeds.

    Args:
        path: must not exist.
        faults: errors which mean that the disk did not take something.

    Raises:
        UserError: `path` exists, or cannot be written.
    """
    try:
        with new_directory(path) as folder:
            yield folder
    except FileExistsError as error:
        raise UserError(
            "exists already", place=str(path), remedy="name a new directory, or remove it"
        ) from error
    except faults as error:
        raise UserError(
            f"cannot write: {getattr(error, 'strerror', None) or error}",
            place=str(path),
            remedy="free disk space or mend the permissions, then try again",
        ) from error
