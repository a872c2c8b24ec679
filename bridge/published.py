"""Checks a Hugging Face directory against the signed manifest of the version that it holds."""

from __future__ import annotations

from pathlib import Path

from bridge.safetensors_io import wrong_tensor
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from broadcast.store import TENSORS_NAME
from runspec.core.errors import UserError, one_line
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_file
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import issued_at, open_roles
from runspec.core.signed import BadSignature

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
