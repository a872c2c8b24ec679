"""targets.json: where Prometheus finds the figures of a run's processes (`file_sd_configs`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runspec.core.files import write_atomic
from runspec.core.spec.role_names import (
    elsewhere,
    measured_roles,
    rendezvous_names,
    role_names,
    server_names,
    trunk_names,
    worker_names,
)
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import LOCAL
from runspec.local.endpoints import Endpoints, named

FILE_NAME = "targets.json"


def write_targets(
    folder: Path, spec: RunSpec, endpoints: Endpoints, names: Collection[str] | None = None
) -> None:
    """Write the file.

    Args:
        folder: of the run, or of a role that runs by itself.
        spec: of the run.
        endpoints: where its processes listen.
        names: processes of this machine; None: those of a run that this machine supervises.
    """
    if names is None:
        names = set(role_names(spec)) - elsewhere(spec)
        if spec.placement.backend != LOCAL:  # the nodes of the others are not known
            names = {*trunk_names(spec), *server_names(spec)}
    targets = list(_targets(spec, endpoints, names))
    write_atomic(folder / FILE_NAME, (json.dumps(targets, indent=1) + "\n").encode())


def _targets(
    spec: RunSpec, endpoints: Endpoints, names: Collection[str]
) -> Iterator[dict[str, Any]]:
    roles, pools = measured_roles(spec), worker_names(spec)
    for name, url in endpoints.all().items():
        if name in names and name not in rendezvous_names(spec):
            yield _target(spec, name, name.partition("-")[0], url)
    for relay, url in endpoints.elsewhere.items():
        yield _target(spec, f"relay-{relay}", "relay", url)
    for name, url in endpoints.metrics.items():
        if name in names:
            pool = {"pool": pools[name]} if name in pools else {}
            yield _target(spec, name, roles[name], url, pool)


def _target(
    spec: RunSpec, name: str, role: str, url: str, more: dict[str, str] | None = None
) -> dict[str, Any]:
    parts = urlsplit(named(url))
    labels = {"run": spec.name, "role": role, "process": name, **(more or {})}
    if parts.scheme == "https":
        labels["__scheme__"] = "https"
    if parts.path.rstrip("/"):
        labels["__metrics_path__"] = f"{parts.path.rstrip('/')}/metrics"
    return {"targets": [parts.netloc], "labels": labels}
