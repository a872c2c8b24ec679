"""A run on a Ray cluster: `placement: {backend: ray}`.

    caller --> Keeper, an actor on the trunk's node --> runspec apply: the supervisor
    supervisor --> RoleHost, an actor for each role, on any node --> the role's process

The backend carries commands to the trunk's node. That has the run directory, and the supervisor of
`runspec.local` watches all roles from there. Each role is an actor that watches one process. Ray
places the actors, reserves accelerators and tells of nodes that are gone. Ray is imported by what
uses it: the base install has none.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runspec.backends.ray.cluster import (
    ANSWER_S,
    Order,
    RoleHost,
    at_node,
    choose_trunk,
    connect,
    demands,
    find_keeper,
    keeper,
    line_of,
    make_keeper,
    options,
)
from runspec.core.address import is_loopback
from runspec.core.errors import UserError
from runspec.core.process import address, save_endpoints
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved, load_resolved
from runspec.core.schema.role_names import STAGES, TRUNK, learner_names, monitor_names, relay_names
from runspec.local.backend import Look, Processes, StopSignals
from runspec.local.endpoints import PORTS
from runspec.local.prepare import write_targets
from runspec.local.processes import PreparedRun, RoleSpec, secret_values
from runspec.local.run_dir import note_site, run_directory
from runspec.local.site import TRUNK_GROUP, groups_of, make_bundles, site_spec

_FIRST_HOST = ("learner", *STAGES)
"""Have the accelerators of the learner's first host, one after the other."""
LOOK_S = 0.2
"""Between two looks at a process."""
REPORT_WAIT_S = 10.0
"""How long a role may be without a node until its log says so."""
NODE_S = 1800.0
"""How long it may be: that counts as a death then."""
_TRIES = 100
GONE = -int(signal.SIGKILL)
"""Exit code of a role whose node is gone."""


@dataclass
class _Role:
    """One start of a role."""

    spec: RoleSpec
    actor: Any
    since: float
    asks_for: str
    placing: Any = None
    """Ray's promise of an address; None where the role has one, or needs none."""
    starting: Any = None
    """Ray's promise that the process is started; None before that, and after it is done."""
    looking: Any = None
    """Ray's promise of the next look."""
    next_look: float = 0.0
    read: int = 0
    """Bytes of its log that were read."""
    reported: bool = False
    """Whether its log says that it waits for a node."""
    look: Look = field(default_factory=partial(Look, None, ready=False))


class RayProcesses:
    """The roles of one run on a cluster.

    Args:
        run: of this node, which is the trunk's.

    Raises:
        UserError: no cluster answers, or no node takes a relay in time.
    """

    def __init__(self, run: PreparedRun) -> None:
        self._ray = ray = connect(run.spec.placement.address)
        self._groups = {member: group for group in groups_of(run.spec) for member in group.members}
        self._here = ray.get_runtime_context().get_node_id()
        self._on_trunk = {*TRUNK, *_FIRST_HOST, *monitor_names(run.spec)}
        self._roles: dict[str, _Role] = {}
        self._logs = run.directory / "logs"
        self._actors: dict[str, Any] = {}
        """Actors of relays that have a node and were not started yet."""
        self.run = run
        self._learners = self._reserve_learners(run)
        fixed = {f"relay-{each.name}" for each in run.spec.broadcast.relays if each.url is not None}
        self._movable = run.endpoints.all().keys() & set(relay_names(run.spec)) - fixed
        self._place_relays()

    def start(self, role: RoleSpec) -> None:
        placed = self._actors.pop(role.name, None)
        asks = ", ".join(f"{n:g} {what}" for what, n in self._demands(role.name).items())
        actor = placed or self._actor(role.name)
        mine = self._roles[role.name] = _Role(role, actor, time.monotonic(), asks)
        if placed is None and role.name in self._movable:
            before = address(self.run.endpoints.all()[role.name])[1]
            mine.placing = actor.place.remote([before, *random.sample(PORTS, _TRIES)])
        else:
            self._begin(mine)

    def look(self, role: str) -> Look:
        mine = self._roles[role]
        if mine.look.exit_code is None:
            try:
                self._advance(role, mine)
            except self._ray.exceptions.RayActorError as error:
                self._end(role, mine, GONE, f"its node or its actor is gone: {line_of(error)}")
            except self._ray.exceptions.RayError as error:
                self._end(role, mine, 1, line_of(error))
        return mine.look

    def stop(self, role: str, number: signal.Signals) -> None:
        mine = self._roles[role]
        if mine.look.exit_code is not None:
            return
        waiting = mine.placing is not None or mine.starting is not None
        if waiting and number == signal.SIGKILL:
            self._end(role, mine, GONE, "ended before a node had it")
        else:
            mine.actor.stop.remote(int(number))  # after its start, where that is still to come

    def logs(self) -> None:
        """`look` brings them."""

    def close(self, timeout_s: float) -> None:
        left = [name for name, role in self._roles.items() if role.look.exit_code is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in left:
                self.stop(name, number)
            ends = time.monotonic() + timeout_s
            while left and time.monotonic() < ends:
                left = [name for name in left if self.look(name).exit_code is None]
                time.sleep(LOOK_S)

    def _advance(self, name: str, mine: _Role) -> None:
        """Takes what Ray has by now, and asks for the next."""
        ray, now = self._ray, time.monotonic()
        promise = mine.starting if mine.placing is None else mine.placing
        if promise is not None:
            if not self._done(promise):
                self._wait_for_node(name, mine, now - mine.since)
                return
            kept = ray.get(promise)
            if mine.placing is not None:
                mine.placing = None
                self._address({name: kept})
                self._begin(mine)
                return
            mine.starting = None
        if mine.looking is not None and self._done(mine.looking):
            look, log = ray.get(mine.looking)
            mine.looking = None
            mine.read += len(log)
            if name not in self._on_trunk:
                self._log(name, log)
            if look.exit_code is not None:
                self._end(name, mine, look.exit_code, "")
            else:
                mine.look = look
                mine.next_look = now + LOOK_S
        if mine.looking is None and now >= mine.next_look and mine.look.exit_code is None:
            mine.looking = mine.actor.look.remote(mine.read)

    def _begin(self, mine: _Role) -> None:
        if mine.spec.name in self._on_trunk:
            mine.starting = mine.actor.start.remote(mine.spec, self._logs)
        else:
            mine.starting = mine.actor.start.remote(self._order(mine.spec), None)

    def _done(self, promise: Any) -> bool:
        return bool(self._ray.wait([promise], timeout=0)[0])

    def _wait_for_node(self, name: str, mine: _Role, waited_s: float) -> None:
        what = f"waits for a node of the cluster with {mine.asks_for or 'room for it'}"
        if waited_s >= NODE_S:
            self._end(name, mine, 1, f"{what} for {waited_s:.0f} s, and gives up")
        elif waited_s >= REPORT_WAIT_S and not mine.reported:
            mine.reported = True
            self._log(name, f"--- {what}\n".encode())

    def _end(self, name: str, mine: _Role, code: int, why: str) -> None:
        mine.look = Look(code, ready=False)
        if why:
            self._log(name, f"--- {name}: {why}\n".encode())
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(mine.actor)

    def _log(self, name: str, data: bytes) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            log.write(data)

    def _order(self, role: RoleSpec) -> Order:
        """Return the inputs from which another node starts a role, with the current spec."""
        run = replace(self.run, spec=load_resolved(self.run.directory))
        spec = site_spec(run.spec, run.identity.root_public_key)
        bundles = {bundle.group: bundle for bundle in make_bundles(spec, run.identity)}
        data, secrets = bundles[role.name].encode(), secret_values(run.spec, run.machine)
        return Order(role.name, data, run.endpoints, secrets, role.cores or None)

    def _demands(self, name: str) -> dict[str, float]:
        group = self._groups.get(TRUNK_GROUP if name in _FIRST_HOST else name)
        return {} if group is None else demands(self.run.spec, group)

    def _actor(self, name: str) -> Any:
        """Makes the actor of a role; Ray places it now, or once a node has what it asks for."""
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: Any = "SPREAD"
        hosts = dict.fromkeys(_FIRST_HOST, 0)
        hosts |= {each: i for i, each in enumerate(learner_names(self.run.spec))}
        if self._learners is not None and name in hosts:
            strategy = PlacementGroupSchedulingStrategy(self._learners, hosts[name])
        elif name in self._on_trunk:
            strategy = NodeAffinitySchedulingStrategy(self._here, soft=False)
        asked = options(self._demands(name))
        return self._ray.remote(RoleHost).options(**asked, scheduling_strategy=strategy).remote()

    def _reserve_learners(self, run: PreparedRun) -> Any:
        """Reserves a node for each of several learner hosts at once; None for a single one."""
        if run.spec.learner.hosts == 1:
            return None
        ray = self._ray
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        mine = nodes[self._here]
        asked = [
            {"CPU": 0.01, **demands(run.spec, self._groups[member])}
            for member in (TRUNK_GROUP, *learner_names(run.spec)[1:])
        ]
        asked[0] |= at_node(mine["NodeManagerAddress"])
        # The hosts of a TPU slice must be of one; Ray says which one a node is of.
        within = {k: v for k, v in mine.get("Labels", {}).items() if k == "ray.io/tpu-slice-name"}
        labels = [within] * len(asked) if within else None
        return ray.util.placement_group(asked, "STRICT_SPREAD", bundle_label_selector=labels)

    def _place_relays(self) -> None:
        """Gives each relay a node, and with it an address, before anybody knows of it."""
        promises: dict[str, Any] = {}
        for name in self._movable:
            self._actors[name] = self._actor(name)
            promises[name] = self._actors[name].place.remote(random.sample(PORTS, _TRIES))
        placed: dict[str, tuple[str, int]] = {}
        for name, promise in promises.items():
            try:
                placed[name] = self._ray.get(promise, timeout=ANSWER_S)
            except self._ray.exceptions.RayError as error:
                raise UserError(
                    f"no node of the cluster has taken it within {ANSWER_S:g} s: {line_of(error)}",
                    place=name,
                    remedy="`ray status` lists what the nodes have",
                ) from error
        self._address(placed)

    def _address(self, placed: Mapping[str, tuple[str, int]]) -> None:
        """Notes where relays are reached, for whatever starts from now on."""
        relays = dict(self.run.endpoints.relays)
        for name, (host, port) in placed.items():
            relays[name.removeprefix("relay-")] = f"http://{host}:{port}"
        self.run = replace(self.run, endpoints=replace(self.run.endpoints, relays=relays))
        save_endpoints(self.run.directory, self.run.endpoints)
        write_targets(self.run.directory, self.run.spec, self.run.endpoints)


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
