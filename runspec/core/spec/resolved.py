"""Resolved spec: canonical JSON that every role of a run reads, and its digest.

It contains the signed profiles that the spec names. So a validator on another machine receives them
with the spec that the coordinator signs, and nobody can exchange one later. `verify.profile`
checks their signatures.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import expand_user, read_bounded
from runspec.core.hashing import digest_bytes
from runspec.core.spec.schema import CalibrationProfile, RunSpec

FILE_NAME = "spec.json"
MAX_BYTES = 1024 * 1024
MAX_PROFILE_BYTES = 64 * 1024


def dump_resolved(spec: RunSpec) -> bytes:
    """Return canonical JSON with every default written out."""
    return canonical_json(spec.model_dump(mode="json", by_alias=True))


def spec_digest(spec: RunSpec) -> str:
    return digest_bytes(dump_resolved(spec))


def parse_resolved(data: bytes, *, place: str) -> RunSpec:
    """Parse a resolved spec from bytes (a file, or a coordinator's answer).

    Raises:
        UserError: `data` is not a resolved spec.
    """
    try:
        return RunSpec.model_validate(parse_object(data, max_bytes=MAX_BYTES))
    except (ValueError, ValidationError) as error:
        raise UserError(
            f"not a resolved run spec: {error}", place=place, remedy="make it with `runspec apply`"
        ) from error


def load_resolved(run_dir: Path) -> RunSpec:
    """Read `spec.json` of a run directory.

    Raises:
        UserError: it cannot be read.
    """
    path = run_dir / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the resolved spec: {error}",
            place=str(path),
            remedy="start the run with `runspec apply`",
        ) from error
    return parse_resolved(data, place=str(path))


def profile_text(profile: CalibrationProfile, folder: Path) -> str:
    """Return the signed document of a profile, from the resolved spec or else from its file.

    Args:
        profile: an entry of `verify.profiles`.
        folder: folder of the spec's file, the base of relative paths.

    Raises:
        UserError: no file is named, or it cannot be read as text within the bound.
    """
    if profile.document is not None:
        return profile.document
    if profile.file is None:
        raise UserError(
            "names no file",
            place=f"verify.profiles.{profile.name}",
            remedy="file: what `python -m verify calibrate` wrote",
        )
    path = folder / expand_user(Path(profile.file))
    try:
        return read_bounded(path, MAX_PROFILE_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: invalid path or UTF-8
        reason = getattr(error, "strerror", None) or str(error)
    except UserError as error:
        reason = error.thing
    raise UserError(
        f"cannot read {str(path)[:200]}: {reason}",
        place=f"verify.profiles.{profile.name}",
        remedy="name the file that `python -m verify calibrate` wrote; a relative path starts from "
        "the spec's folder",
    )


def with_profiles(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec with the contents of its profiles' files."""
    profiles = [
        profile.model_copy(update={"document": profile_text(profile, folder)})
        for profile in spec.verify.profiles
    ]
    verify = spec.verify.model_copy(update={"profiles": profiles})
    return spec.model_copy(update={"verify": verify})
