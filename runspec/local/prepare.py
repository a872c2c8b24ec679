"""Makes a run ready to start, and takes a stopped run back to a policy version.

To prepare is to ask what this machine lacks, then to complete the run directory.

A version number is published once. What was signed before a rollback must therefore count no more:
the run's keys and roles.json are removed with everything that they signed, and the next start makes
new ones. Only a run with a throw-away root can do that; where strangers have pinned a root, they
hold the versions, and a rollback is refused.

What stays of version N: its full state and those before it, batch manifests, metrics and samples of
the steps below N, and the ledger, which gets a row that says what happened. weights/v<N> goes and
comes again: the learner writes it from the full state, with the same bits.

A run that has trained no step may start anew with another spec: then version 0, the starting model
and the rows of the ledger go too, since they are of the old one.

An intent file is written first and removed last, and every act between may be repeated. The next
command that opens the run completes a rollback that was cut short.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from broadcast.layout import states_run
from runspec.core import run_files
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError, reported
from runspec.core.files import (
    Folder,
    ObjectPath,
    read_bounded,
    remove_leftovers,
    require_writable,
    temporary_name,
    write_atomic,
)
from runspec.core.process import Endpoints, load_endpoints, save_endpoints
from runspec.core.run_files import FOLDERS, initial_model, state_folder, warm_start_cache
from runspec.core.schema import RunSpec, role_names
from runspec.core.schema.load import load_resolved, spec_digest
from runspec.core.schema.role_names import island_names, step_overlap
from runspec.local.apply import REPORT_FILE, SUMMARY_FILE, write_summary
from runspec.local.backend import LOCAL, end_leftovers
from runspec.local.endpoints import named, plan_endpoints, port_is_free
from runspec.local.identity import make_identity
from runspec.local.machine import Machine, find_files, this_machine
from runspec.local.model_folders import full_states, link_model, link_tokenizer
from runspec.local.planning import STARTS_ANEW, RunPlan, current, refuse_stale, starts_anew
from runspec.local.processes import PreparedRun, roles_here
from runspec.local.run_dir import hold, write_spec
from runspec.local.state import RunState
from runspec.local.supervisor import record_applied
from verify.coordinator.ledger import closed_steps, open_ledger, record_rollback
from verify.formats.batch import FILE_NAME as BATCH_FILE


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


INTENT_FILE = "rollback.json"
_MAX_INTENT_BYTES = 4096


def roll_back(run_dir: Path, version: int) -> None:
    """Takes a run back; whoever calls it holds the run's lock.

    Args:
        run_dir: the run directory.
        version: policy version that is to be the newest.

    Raises:
        UserError: there is no whole full state of it, the root is pinned, or a file cannot be
            removed; where the last, the next command completes it.
    """
    spec = load_resolved(run_dir)
    if spec.identity.root_public_key is not None:
        raise UserError(
            "others have pinned this run's root and hold its versions: a version number is "
            "published once",
            place="identity.root_public_key",
            remedy="start a run of another name from that version, as long as its weights are "
            f"there: model.hf: {run_files.weights_folder(run_dir) / f'v{version}'}",
        )
    _require_state(run_dir, spec, version)
    # The ledger agrees that the steps below were closed, or the coordinator would never start; and
    # no coordinator is at work on it.
    closed = closed_steps(run_dir, spec)
    if version > closed:
        raise UserError(
            f"the ledger has closed {closed} steps only",
            place=str(run_dir / run_files.STATE_FILE),
            remedy="restore it from the copy that the full states are from",
        )
    with closing(RunState(run_dir)) as state:
        # First, so that a run that was finished does not look so once its files are going.
        state.set_run("paused", f"a rollback to version {version} has begun")
    write_atomic(run_dir / INTENT_FILE, canonical_json({"to": version}))
    complete_rollback(run_dir)


def start_anew(run_dir: Path, *, keep_keys: bool) -> None:
    """Removes what was made from the spec of a run that has trained no step; whoever calls it holds
    the run's lock.

    Args:
        run_dir: the run directory.
        keep_keys: whether keys/ holds those of a root that the next spec pins.

    Raises:
        UserError: another process writes the ledger, or a file cannot be removed; where the last,
            the next command completes it.
    """
    with closing(open_ledger(run_dir, load_resolved(run_dir))) as ledger:
        ledger.own()
    intent = {"to": 0, "anew": True, "keep_keys": keep_keys}
    write_atomic(run_dir / INTENT_FILE, canonical_json(intent))
    complete_rollback(run_dir)


def complete_rollback(run_dir: Path) -> int | None:
    """Does what a rollback left undone; whoever calls it holds the run's lock.

    Returns:
        The version that it went back to; None where no rollback was under way.
    """
    path = run_dir / INTENT_FILE
    if not path.exists():
        return None
    kinds = (MalformedJson, KeyError, TypeError, ValueError)
    with reported("not the intent of a rollback", path, "delete the run", *kinds):
        intent = parse_object(read_bounded(path, _MAX_INTENT_BYTES), max_bytes=_MAX_INTENT_BYTES)
        version, anew = int(intent["to"]), bool(intent.get("anew"))
    spec = load_resolved(run_dir)
    thing = f"the rollback to version {version} cannot go on"
    remedy = "mend the permissions, then run the command again: it completes the rollback"
    with reported(thing, run_dir, remedy, OSError):
        for entry in _doomed(run_dir, spec, version, anew=anew):
            if not (intent.get("keep_keys") and entry.name == "keys"):
                _remove(entry)
        if anew:
            _remove(run_files.initial_model(run_dir))
        # In these a removal that was cut short leaves temporary names.
        cleared: list[Folder] = [run_dir, run_dir / "rollouts", *(run_dir / "store").glob("*")]
        cleared += [run_files.state_folder(run_dir, spec), run_files.weights_folder(run_dir)]
        cleared += [run_files.checkpoints_folder(run_dir, spec), *_island_states(run_dir, spec)]
        for folder in cleared:
            if isinstance(folder, Path):  # the learner clears an object store
                remove_leftovers(folder)
        for name in (run_files.METRICS_FILE, run_files.SAMPLES_FILE):
            _keep_steps_below(run_dir / name, version)
        made_on = run_dir / "checkpoints" / run_files.FINGERPRINTS_FILE
        _keep_steps_below(made_on, 0 if anew else version + 1)
    if anew:
        with closing(open_ledger(run_dir, spec)) as ledger:
            ledger.clear()
    else:
        record_rollback(run_dir, spec, version)
    with closing(RunState(run_dir)) as state:
        text = STARTS_ANEW if anew else f"rolled back to version {version}"
        state.set_run("paused", text)
        state.add_event("run", text, "change")
        if not anew:  # whoever changes the spec records that
            state.add_applied(spec_digest(spec), [text])
        write_summary(run_dir, state.wall_s(), partial(state.add_event, "report"))
    path.unlink()
    return version


def _require_state(run_dir: Path, spec: RunSpec, version: int) -> None:
    """Refuses a version that has no whole full state; 0 needs the starting model."""
    states = full_states(run_dir, spec)
    found = [s.step for s in states if s.is_committed() and spec.publishes(s.step)]
    if (run_files.initial_model(run_dir) / "config.json").exists():
        found = [0, *found]
    if version not in found:
        listed = ", ".join(str(each) for each in found) or "none"
        why = ""
        if step_overlap(spec):
            why = ": with learner.islands.overlap only the last step's holds a committed version"
        raise UserError(
            f"no full state of version {version}{why}",
            place=str(run_files.state_folder(run_dir, spec)),
            remedy=f"there is one of: {listed}",
        )
    for state in states:
        if state.step == version:
            state.require_whole()


def _doomed(run_dir: Path, spec: RunSpec, version: int, *, anew: bool) -> Iterator[Folder]:
    """Yield the paths to remove, whole folders where possible."""
    states, weights = run_files.state_folder(run_dir, spec), run_files.weights_folder(run_dir)
    yield from (states / f"step_{n}" for n in run_files.numbered(states, "step_") if n > version)
    yield from (weights / f"v{n}" for n in run_files.versions_in(weights) if n >= version)
    yield from (path for path, n in run_files.evaluated_versions(run_dir) if anew or n > version)
    yield run_files.params_folder(run_dir, spec)
    for states in _island_states(run_dir, spec):  # those islands join anew
        yield from (states / f"step_{n}" for n in run_files.numbered(states, "step_"))
    # Byte counts of what was served (served.json) stay, for the summary.
    for run in (spec.name, states_run(spec.name)):
        yield from sorted((run_dir / "store").glob(f"*/{run}"))
    yield run_dir / run_files.FINDINGS_NAME  # they name states that are removed
    yield run_dir / "checkpoints" / "versions"
    yield from _work(run_dir, anew=anew)
    yield run_dir / "keys"
    for step in run_files.numbered(run_dir / "rollouts", "step_"):
        folder = run_files.step_folder(run_dir, step)
        if step >= version:
            yield folder
        else:  # files that no signature vouches for any more; no full state needs them
            yield from (path for path in folder.iterdir() if path.name != BATCH_FILE)
    # Of steps that are gone; made anew from what is left.
    yield from (run_dir / SUMMARY_FILE, run_dir / REPORT_FILE)


def _work(run_dir: Path, *, anew: bool) -> Iterator[Path]:
    """Yield what goes of the roles' own folders.

    Islands keep the starting model: its version is not served again.
    """
    folder = run_dir / "work"
    if anew or not folder.is_dir():
        yield folder
        return
    for own in sorted(folder.iterdir()):
        if run_files.initial_model(own).exists():
            yield from (
                path for path in sorted(own.iterdir()) if path != run_files.initial_model(own)
            )
        else:
            yield own


def _island_states(run_dir: Path, spec: RunSpec) -> list[Folder]:
    """Return the folders outside the run directory in which other islands keep full states."""
    if spec.checkpoints.dir is None:
        return []
    return [run_files.state_folder(run_dir, spec, name) for name in island_names(spec)[1:]]


def _remove(path: Folder) -> None:
    if isinstance(path, ObjectPath):
        path.remove()
    elif path.is_dir() and not path.is_symlink():
        # Renamed first, so that a removal cut short leaves nothing that looks whole.
        doomed = temporary_name(path)
        path.rename(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


def _keep_steps_below(path: Path, end: int) -> None:
    """Keeps a file's whole lines of steps before `end`, byte for byte."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # torn by a crash
            step = json.loads(line)["step"]
            if isinstance(step, int) and step < end and line.endswith(b"\n"):
                kept.append(line)
    if path.exists():
        write_atomic(path, b"".join(kept))
