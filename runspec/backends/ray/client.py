"""The caller's side: `runspec` commands are carried to the node that has the run directory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runspec.backends.ray.cluster import (
    ANSWER_S,
    choose_trunk,
    connect,
    find_keeper,
    keeper,
    line_of,
    make_keeper,
)
from runspec.backends.ray.processes import RayProcesses
from runspec.core.address import is_loopback
from runspec.core.errors import UserError
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import Processes, StopSignals
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import note_site, run_directory

LOOK_S = 0.2


class RayBackend:
    """`placement.backend: ray`."""

    def apply(self, spec: RunSpec, detach: bool, runs_dir: Path | None) -> int:
        ray = connect(spec.placement.address)
        run_dir = run_directory(spec, runs_dir)
        known = find_keeper(ray, spec.name)
        ip = known or choose_trunk(ray, spec)
        if is_loopback(spec.placement.host):
            placement = spec.placement.model_copy(update={"host": ip})
            spec = spec.model_copy(update={"placement": placement})
        if known is None:
            actor = make_keeper(ray, spec.name, ip, run_dir)
        else:
            actor = keeper(ray, spec.name, ip)
        note_site(run_dir, {"backend": "ray", "address": spec.placement.address, "run": spec.name})
        given = [(each.source.env, os.environ.get(each.source.env)) for each in spec.secrets]
        secrets = {name: value for name, value in given if value is not None}
        arguments = ["apply", "--resolved", "-", "--runs-dir", str(run_dir.parent)]
        arguments += ["--detach"] if detach else []
        return _carry(ray, actor, arguments, dump_resolved(spec), secrets)

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        ray = connect(site["address"])
        ip = find_keeper(ray, site["run"])
        if ip is None:
            raise UserError(
                "the cluster knows of no such run",
                place=f"run {site['run']}",
                remedy="`runspec apply` starts it",
            )
        actor = keeper(ray, site["run"], ip)
        code = _carry(ray, actor, arguments, b"", {})
        if code == 0 and arguments[0] == "delete":
            ray.kill(actor)
        return code

    def processes(self, run: PreparedRun) -> tuple[Processes, PreparedRun]:
        made = RayProcesses(run)
        return made, made.run


def _carry(
    ray: Any, actor: Any, arguments: Sequence[str], given: bytes, secrets: Mapping[str, str]
) -> int:
    """Runs a command through a keeper and prints what it prints; signals are carried too.

    Raises:
        UserError: the keeper does not answer in time.
    """
    with StopSignals() as stops:
        number, carried = _answer(ray, actor.begin.remote(list(arguments), given, dict(secrets))), 0
        while True:
            code, out, err = _answer(ray, actor.look.remote(number))
            for data, stream in ((out, sys.stdout), (err, sys.stderr)):
                stream.buffer.write(data)
                stream.flush()
            if code is not None:
                return int(code)
            while carried < stops():
                carried += 1
                _answer(ray, actor.stop.remote(number, int(signal.SIGINT)))
            if not (out or err):
                time.sleep(LOOK_S)


def _answer(ray: Any, promise: Any) -> Any:
    try:
        return ray.get(promise, timeout=ANSWER_S)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise UserError(
            f"the trunk's node does not answer: {line_of(error)}",
            place="placement.backend ray",
            remedy="the run goes on by itself when the node is back; see `ray status`",
        ) from error
