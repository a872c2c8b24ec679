"""Makes a run ready to start: asks what this machine lacks, then completes the run directory."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runspec.core.errors import UserError
from runspec.core.files import require_writable, write_atomic
from runspec.core.process import Endpoints, load_endpoints, save_endpoints
from runspec.core.run_files import FOLDERS, initial_model, state_folder, warm_start_cache
from runspec.core.schema import RunSpec, role_names
from runspec.local.backend import LOCAL, end_leftovers
from runspec.local.endpoints import named, plan_endpoints, port_is_free
from runspec.local.identity import make_identity
from runspec.local.machine import Machine, find_files, this_machine
from runspec.local.model_folders import link_model, link_tokenizer
from runspec.local.planning import RunPlan, current, refuse_stale, starts_anew
from runspec.local.processes import PreparedRun, roles_here
from runspec.local.rollback import complete_rollback, start_anew
from runspec.local.run_dir import hold, write_spec
from runspec.local.state import RunState
from runspec.local.supervisor import record_applied


class NotReady(UserError):
    """The machine lacks things that the run needs."""

    def __init__(self, plan: RunPlan) -> None:
        self.name, self.lacking = plan.spec.name, plan.lacking
        listed = "\n".join(f"  {item.path}: {item.thing}" for item in plan.lacking)
        super().__init__(f"{self.name} cannot start on this machine:\n{listed}")


@contextmanager
def prepare_run(plan: RunPlan) -> Iterator[PreparedRun]:
    """Makes or opens a run's directory and holds it, with all that its roles are started from.

    Roles that a killed supervisor left behind are ended first.

    Args:
        plan: what the run is to be, and what that changes.

    Raises:
        StalePlan: the run's state is another than was approved.
        NotReady: this machine cannot start it; nothing was made.
        RunLocked: it is alive elsewhere.
        UserError: a port is taken, a key is damaged, or the directory is another spec's.
    """
    spec, run_dir = plan.spec, plan.run_dir
    if plan.new:
        # Asked before the first file is made: a run that cannot start leaves nothing behind.
        require_ready(plan)
        _plan(spec, run_dir)
    _require_folders(spec, run_dir)
    with hold(run_dir) as lock:
        complete_rollback(run_dir)
        plan = current(plan)
        refuse_stale(plan)
        anew = not plan.new and starts_anew(plan.changes, run_dir)
        require_ready(plan)
        with closing(RunState(run_dir)) as state:
            end_leftovers(state.roles())
            endpoints = _plan(spec, run_dir)
            if anew:
                start_anew(run_dir, keep_keys=spec.identity.root_public_key is not None)
            machine, identity = this_machine(), make_identity(run_dir, spec)
            save_endpoints(run_dir, endpoints)
            write_targets(run_dir, spec, endpoints)
            link_starting_model(spec, run_dir, machine)
            write_spec(spec, run_dir, roles_here(spec))
            record_applied(state, spec, plan.changes)
        yield PreparedRun(spec, run_dir, endpoints, identity, machine, lock)


def require_ready(plan: RunPlan) -> None:
    """Raises NotReady, listing everything that this machine lacks for a run."""
    if plan.lacking:
        raise NotReady(plan)


def _plan(spec: RunSpec, run_dir: Path) -> Endpoints:
    return plan_endpoints(spec, load_endpoints(run_dir), port_is_free, random.Random())


def _require_folders(spec: RunSpec, run_dir: Path) -> None:
    """Makes the run's directory, and sees that roles can write there and where full states go.

    Raises:
        UserError: a folder cannot be written, with the reason.
    """
    remedy = "mend the permissions, or say another --runs-dir"
    new = not run_dir.exists()
    require_writable(run_dir, "the run's directory", remedy)
    try:
        for name in FOLDERS:
            if os.path.lexists(run_dir / name):
                require_writable(run_dir / name, f"the run's folder {name}", remedy)
        if spec.warm_start is not None and not initial_model(run_dir).exists():
            require_writable(warm_start_cache(run_dir), "the cache of warm starts", remedy)
        if spec.checkpoints.dir is not None:
            remedy = "mend the permissions, or name another folder"
            require_writable(state_folder(run_dir, spec), "checkpoints.dir", remedy)
    except UserError:
        if new:
            run_dir.rmdir()
        raise


def link_starting_model(spec: RunSpec, run_dir: Path, machine: Machine) -> None:
    """Version 0 of a run that starts from a model on this machine; a warm start makes its own, and
    of a drawn model the tokenizer is here."""
    initial = initial_model(run_dir)
    if spec.warm_start is not None or (initial / "config.json").exists():
        return
    found = find_files(spec.model, machine.env)
    if spec.model.shape is not None:
        assert found.tokenizer is not None, "the preflight sees to it"
        link_tokenizer(initial, found.tokenizer)
        return
    assert found.model is not None, "the preflight sees to it"
    link_model(initial, found.model, found.tokenizer)


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
        names = set(role_names.role_names(spec)) - role_names.elsewhere(spec)
        if spec.placement.backend != LOCAL:  # the nodes of the others are not known
            names = {*role_names.trunk_names(spec), *role_names.server_names(spec)}
    targets = list(_targets(spec, endpoints, names))
    write_atomic(folder / FILE_NAME, (json.dumps(targets, indent=1) + "\n").encode())


def _targets(
    spec: RunSpec, endpoints: Endpoints, names: Collection[str]
) -> Iterator[dict[str, Any]]:
    roles, pools = role_names.measured_roles(spec), role_names.worker_names(spec)
    for name, url in endpoints.all().items():
        if name in names and name not in role_names.rendezvous_names(spec):
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
