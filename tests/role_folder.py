"""A folder from which `python -m runspec.role` starts a process."""

from __future__ import annotations

from pathlib import Path

from runspec.core.files import write_atomic
from runspec.core.process import Endpoints, save_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME, dump_resolved


def write_folder(
    folder: Path, spec: RunSpec, endpoints: Endpoints, root_public_key: str | None = None
) -> Path:
    """Writes spec.json, which pins the root if one is given, and endpoints.json."""
    if root_public_key is not None:
        identity = spec.identity.model_copy(update={"root_public_key": root_public_key})
        spec = spec.model_copy(update={"identity": identity})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE_NAME, dump_resolved(spec))
    save_endpoints(folder, endpoints)
    return folder
