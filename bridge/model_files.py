"""Hugging Face directories: how one is written, and checked against its version's manifest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.safetensors_io import wrong_tensor
from broadcast.layout import TENSORS_NAME
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from runspec.core.canonical import digest_file
from runspec.core.errors import UserError, one_line
from runspec.core.files import Folder, new_directory, read_bounded
from runspec.core.models import CONFIG_NAME, TOKENIZER_NAMES, read_config
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import issued_at, open_roles
from runspec.core.signed import BadSignature

GENERATION_NAME = "generation_config.json"
MODEL_FOLDER = "hugging_face"
"""The folder of a checkpoint that `import` writes them to."""


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


ROLES_NAME = "roles.json"
CARD_NAME = "README.md"
"""Name of the model card."""
_BESIDE = {FILE_NAME, TENSORS_NAME, ROLES_NAME, CARD_NAME}
"""Files that may lie beside those of the version. No library reads a model from them."""


def require_published(folder: Path, manifest: WeightsManifest) -> None:
    """Require that every tensor, and every file that the manifest lists whole, has its digest, and
    that nothing else is there: libraries load a `model.safetensors` before an index of shards, or
    a `chat_template.jinja` that happens to be there.

    Args:
        folder: Hugging Face directory; manifest, roles and model card may lie in it, too.
        manifest: of the version; its signature was checked.

    Raises:
        UserError: a file is missing, differs, or does not belong to the version.
    """
    digests = {name: record["blake3"] for name, record in manifest.tensors.items()}
    wrong = wrong_tensor(folder, digests)
    for name, info in manifest.objects.items():
        if wrong is None and name not in manifest.files:
            path = folder / name
            if not path.is_file() or digest_file(path) != info.blake3:
                wrong = f"{name} is missing or not what was published"
    remedy = "fetch or export it again"
    known = {*manifest.objects, *manifest.files, *_BESIDE}
    if wrong is None and (others := sorted({path.name for path in folder.iterdir()} - known)):
        wrong = f"{one_line(others[0], 80)!r} is none of its files"
        remedy = "remove what does not belong to it, or export it to a new folder"
    if wrong is not None:
        raise UserError(
            f"not version {manifest.version} of {manifest.run}: {wrong}",
            place=str(folder),
            remedy=remedy,
        )


def check_signed(folder: Path, *, run: str, root_public_key: str) -> WeightsManifest:
    """Check a directory that has `manifest.json` and `roles.json` beside the model's files.

    Keys are valid as of the date of roles.json: a model outlives the run whose keys expire.

    Args:
        folder: as `runspec export` makes it.
        run: name of the run.
        root_public_key: the run's root key, in hexadecimal.

    Returns:
        The manifest of the version.

    Raises:
        UserError: a signature or a digest is wrong.
    """
    try:
        data = read_bounded(folder / ROLES_NAME, MAX_ROLES_BYTES)
        manifest = read_bounded(folder / FILE_NAME, MAX_BYTES)
        roles = open_roles(data, root_public_key=root_public_key, run=run, now=issued_at(data))
        opened = open_manifest(manifest, run=run, publishers=roles.publisher)
    except (OSError, BadSignature) as error:
        raise UserError(
            f"cannot be believed: {error}",
            place=str(folder),
            remedy="compare the public key with the one that the run's owner publishes",
        ) from error
    require_published(folder, opened)
    return opened
