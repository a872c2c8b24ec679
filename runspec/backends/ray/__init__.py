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
from collections.abc import Iterator, Mapping, Sequence
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
from runspec.core.schema.role_names import (
    STAGES,
    island_processes,
    learner_names,
    relay_names,
    shares_name,
    trunk_names,
)
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
_APART = "STRICT_SPREAD"
"""Each of a group's processes is on a node of its own."""
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
        self._on_trunk = {*trunk_names(run.spec), *_FIRST_HOST}
        self._islands = {
            process: (shares_name(name), processes[0])
            for name, processes in island_processes(run.spec).items()
            for process in processes
        }
        """The server of shares and the first process of an island, by each of its processes."""
        self._roles: dict[str, _Role] = {}
        self._logs = run.directory / "logs"
        self._actors: dict[str, Any] = {}
        """Actors of relays that have a node and were not started yet."""
        self.run = run
        self._reserved = dict(self._reserve())
        """Placement group of a process and its bundle there, where it has such."""
        fixed = {f"relay-{each.name}" for each in run.spec.broadcast.relays if each.url is not None}
        self._relays = run.endpoints.all().keys() & set(relay_names(run.spec)) - fixed
        servers = {shares for shares, _ in self._islands.values()}
        self._placed_first = {*self._relays, *servers, *self._islands}
        """Get a node before they start, and the address that they or others have there."""
        self._place_relays()

    def start(self, role: RoleSpec) -> None:
        placed = self._actors.pop(role.name, None)
        asks = ", ".join(f"{n:g} {what}" for what, n in self._demands(role.name).items())
        actor = placed or self._actor(role.name)
        mine = self._roles[role.name] = _Role(role, actor, time.monotonic(), asks)
        if placed is None and role.name in self._placed_first:
            known = self.run.endpoints.all().get(role.name)
            ports = [] if known is None else [address(known)[1], *random.sample(PORTS, _TRIES)]
            mine.placing = actor.place.remote(ports)
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
                needs = f"a node of the cluster with {mine.asks_for or 'room for it'}"
                self._wait_for(needs, name, mine, now - mine.since)
                return
            kept = ray.get(promise)
            if mine.placing is not None:
                if other := self._unplaced(name, kept[0]):
                    self._wait_for(f"{other}, which is placed first", name, mine, now - mine.since)
                    return
                mine.placing, shares = None, self.run.endpoints.shares
                self._address({name: kept})
                if shares != self.run.endpoints.shares:  # its island may have told of the old one
                    for each, (server, _) in self._islands.items():
                        if server == name and each in self._roles:
                            self.stop(each, signal.SIGTERM)
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

    def _unplaced(self, name: str, host: str) -> str:
        """Return which process of its island a process on a host has to wait for; empty if none.

        The server of shares is on the node of the first process. Where that node was lost, both
        are placed anew, and so is the address at which all processes of the island meet.
        """
        for other in self._islands.get(name, ()):
            theirs = self._roles.get(other)
            if other == name:
                continue
            if theirs is None or theirs.placing is not None or theirs.look.exit_code is not None:
                return other
            url = self.run.endpoints.all().get(other)
            first = name == self._islands[name][1]
            if first and url is not None and address(url)[0] != host:
                return other
        return ""

    def _wait_for(self, whom: str, name: str, mine: _Role, waited_s: float) -> None:
        what = f"waits for {whom}"
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
        made = make_bundles(spec, run.identity)
        bundles = {name: bundle for bundle in made for name in bundle.roles}
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
        if name in self._reserved:
            strategy = PlacementGroupSchedulingStrategy(*self._reserved[name])
        elif name in self._on_trunk:
            strategy = NodeAffinitySchedulingStrategy(self._here, soft=False)
        asked = options(self._demands(name))
        return self._ray.remote(RoleHost).options(**asked, scheduling_strategy=strategy).remote()

    def _reserve(self) -> Iterator[tuple[str, tuple[Any, int]]]:
        """Reserve a node for each host of a learner with several, and of every island after the
        first, which has the server of its shares beside it."""
        spec, ray = self.run.spec, self._ray
        if spec.learner.hosts > 1:
            nodes = {node["NodeID"]: node for node in ray.nodes()}
            mine, names = nodes[self._here], learner_names(spec)
            asked = [self._bundle(member) for member in (TRUNK_GROUP, *names[1:])]
            asked[0] |= at_node(mine["NodeManagerAddress"])
            # The hosts of a TPU slice must be of one; Ray says which one a node is of.
            slice_name = "ray.io/tpu-slice-name"
            within = {k: v for k, v in mine.get("Labels", {}).items() if k == slice_name}
            labels = [within] * len(asked) if within else None
            placed = ray.util.placement_group(asked, _APART, bundle_label_selector=labels)
            yield from ((name, (placed, 0)) for name in _FIRST_HOST)
            yield from ((name, (placed, i)) for i, name in enumerate(names))
        for island, processes in island_processes(spec).items():
            if island in self.run.endpoints.shares:  # else it is left to other machines
                placed = ray.util.placement_group([*map(self._bundle, processes)], _APART)
                yield shares_name(island), (placed, 0)
                yield from ((name, (placed, i)) for i, name in enumerate(processes))

    def _bundle(self, member: str) -> dict[str, float]:
        return {"CPU": 0.01, **demands(self.run.spec, self._groups[member])}

    def _place_relays(self) -> None:
        """Gives each relay a node, and with it an address, before anybody knows of it."""
        promises: dict[str, Any] = {}
        for name in self._relays:
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
        """Notes where servers are reached, for whatever starts from now on."""
        ends, found = self.run.endpoints, {n: f"http://{h}:{p}" for n, (h, p) in placed.items()}
        ends = replace(
            ends,
            relays={n: found.get(f"relay-{n}", url) for n, url in ends.relays.items()},
            shares={n: found.get(shares_name(n), url) for n, url in ends.shares.items()},
            islands={n: found.get(n, url) for n, url in ends.islands.items()},
        )
        self.run = replace(self.run, endpoints=ends)
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
