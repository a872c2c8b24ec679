"""The signed profiles that a spec names: read bounded, and kept in the resolved spec as they are.

So a validator on another machine has them with the spec that the coordinator signs, and none can be
exchanged after that. Whether one is to be believed is the business of `verify.calibration`.
"""

from __future__ import annotations

from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import expand_user, read_bounded
from runspec.core.spec.schema import CalibrationProfile, RunSpec

MAX_BYTES = 64 * 1024


def profile_text(profile: CalibrationProfile, folder: Path) -> str:
    """The signed document: that of a resolved spec, else its file's.

    Args:
        profile: of `verify.profiles`.
        folder: of the spec's file, where relative paths start from.

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
        return read_bounded(path, MAX_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: no path, or no UTF-8
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
    """The spec with the contents of its profiles' files in it."""
    profiles = [
        profile.model_copy(update={"document": profile_text(profile, folder)})
        for profile in spec.verify.profiles
    ]
    verify = spec.verify.model_copy(update={"profiles": profiles})
    return spec.model_copy(update={"verify": verify})
