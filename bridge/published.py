"""Checks a Hugging Face directory against the signed manifest of the version that it holds."""

from __future__ import annotations

from pathlib import Path

from bridge.safetensors_io import wrong_tensor
from broadcast.manifest import FILE_NAME, MAX_BYTES, WeightsManifest, open_manifest
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_file
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import issued_at, open_roles
from runspec.core.signed import BadSignature

ROLES_NAME = "roles.json"


def require_published(folder: Path, manifest: WeightsManifest) -> None:
    """Require that every tensor, and every file that the manifest lists whole, has its digest.

    Args:
        folder: Hugging Face directory; files beside those of the version do not count.
        manifest: of the version; its signature was checked.

    Raises:
        UserError: one is missing or differs.
    """
    digests = {name: record["blake3"] for name, record in manifest.tensors.items()}
    wrong = wrong_tensor(folder, digests)
    for name, info in manifest.objects.items():
        if wrong is None and name not in manifest.files:
            path = folder / name
            if not path.is_file() or digest_file(path) != info.blake3:
                wrong = f"{name} is missing or not what was published"
    if wrong is not None:
        raise UserError(
            f"not version {manifest.version} of {manifest.run}: {wrong}",
            place=str(folder),
            remedy="fetch or export it again",
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
