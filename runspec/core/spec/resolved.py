"""The resolved spec on disk: canonical JSON that every role of a run reads, and its digest."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.spec.schema import RunSpec

FILE_NAME = "spec.json"
MAX_BYTES = 1024 * 1024


def dump_resolved(spec: RunSpec) -> bytes:
    """Canonical JSON with every default written out."""
    return canonical_json(spec.model_dump(mode="json", by_alias=True))


def spec_digest(spec: RunSpec) -> str:
    return digest_bytes(dump_resolved(spec))


def parse_resolved(data: bytes, *, place: str) -> RunSpec:
    """Reads a resolved spec from bytes (a file, or a coordinator's answer).

    Raises:
        UserError: it is not one.
    """
    try:
        return RunSpec.model_validate(parse_object(data, max_bytes=MAX_BYTES))
    except (ValueError, ValidationError) as error:
        raise UserError(
            f"not a resolved run spec: {error}", place=place, remedy="make it with `runspec apply`"
        ) from error


def load_resolved(run_dir: Path) -> RunSpec:
    """Reads `spec.json` of a run directory."""
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
