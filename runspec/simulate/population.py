"""The population of a simulated run: the swarm file, and the members that it makes.

The file says who works, when they come and go, and who is hostile. A member has an engine, links,
and a strategy that decides how leases are answered. A strategy sees what a worker sees: its leases,
and the verdicts on its submissions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from runspec.core.errors import BadUsage, UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import Hardware, RunSpec, SamplerPool, fields
from runspec.core.schema.findings import Finding, format_finding
from runspec.core.schema.schema_fields import close_match
from runspec.core.schema.validate import locate, schema_finding, to_python
from runspec.core.schema.yaml_nodes import MapNode, parse_yaml
from runspec.estimate import assumed
from runspec.estimate.broadcast import VersionSize, arrivals
from runspec.estimate.fit import Devices, Unfit, fitted
from runspec.estimate.speed import decode_speed
from runspec.simulate import Content, Lengths
from verify.formats.lease import Lease

StrategyKind = Literal[
    "honest",
    "refuse",
    "rubbish",
    "wrong",
    "withhold",
    "delay",
    "alternate",
    "sleeper",
    "collude",
    "late",
]
Misdeed = Literal["withhold", "rubbish", "wrong", "refuse"]


class StrategyBlock(fields.Block):
    """How the workers of a group answer a lease (`runspec.simulate.population.Strategy`)."""

    kind: StrategyKind = "honest"
    misdeed: Misdeed = "withhold"
    """How `alternate`, `sleeper`, `collude` and `late` answer where they are not honest."""
    honest: fields.Count = 1
    """`alternate`: leases of every `of` that are answered honestly."""
    of: fields.Count = 4
    """`alternate`: leases of a round."""
    record: fields.Count = 1
    """`sleeper`, `collude`, `late`: accepted submissions of a member before its first misdeed."""
    margin: fields.Duration = 1.0
    """`delay`: time before the end of a lease at which it is answered."""
    after: fields.Duration | None = None
    """`delay`: time from a lease to its answer, in place of `margin`. `late`: time from a published
    version until it asks for a lease."""
    think: fields.Duration = 0.05
    """Time until a lease is refused, or answered with rubbish."""


class Absence(fields.Block):
    """A time in which a share of a group is away, again and again: a night."""

    begins: fields.Duration
    lasts: fields.Duration
    every: fields.Duration = 86400.0
    share: fields.Share = 1.0
    """Share of the group; who it is, is drawn each time."""


class Group(fields.Block):
    """Workers of one kind."""

    name: fields.Name
    count: fields.ProcessesOrNone
    pool: fields.Name | None = None
    """The pool of the spec; null: the first."""
    hardware: Hardware | None = None
    """Devices of one worker, which has the pool's model: `runspec plan` says how fast they are.
    Null: the pool's."""
    tokens_per_s: fields.Positive | None = None
    """Measured speed of one worker, in place of the roofline."""
    speed: fields.Positive = 1.0
    """Speed over that which pool or hardware give."""
    download: fields.Rate | None = None
    """Link of one worker; null: the pool's links."""
    known: bool = False
    """Whether its keys are the run's own or invited."""
    arrives: fields.Duration | None = None
    """When its workers register first; null: at the start."""
    over: fields.Duration | None = None
    """Time over which they arrive, each at a moment that is drawn; null: all at once."""
    stays: fields.Duration | None = None
    """Mean time that a worker stays, drawn exponentially; null: to the end."""
    away: fields.Duration = 3600.0
    """Mean time until it comes back."""
    crashes: fields.Share = 0.0
    """Share of its departures that are crashes: leases are not given back."""
    absent: list[Absence] = []
    strategy: StrategyBlock = StrategyBlock()


class ValidatorsBlock(fields.Block):
    """The validators."""

    count: fields.ProcessesOrNone | None = None
    """Null: `verify.validators`."""
    speed: fields.Positive = 1.0
    """Speed over that of the spec's."""
    fails: fields.Duration | None = None
    """Mean time until a validator's process ends, drawn exponentially; null: never."""
    restarts: fields.Duration = 60.0
    """Time until it works again."""


class Swarm(fields.Block):
    """A swarm file."""

    workers: Annotated[list[Group], Field(min_length=1)]
    validators: ValidatorsBlock = ValidatorsBlock()
    request: fields.Duration | None = None
    """Time of one request to the coordinator; null: none."""


def read_swarm(path: Path) -> Swarm:
    """Reads a swarm file.

    Raises:
        BadUsage: it cannot be read, or does not fit, with each place.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsage(
            f"cannot be read: {error}", place=str(path), remedy="name a swarm file"
        ) from error
    document = parse_yaml(text, str(path))
    findings = list(document.findings)
    swarm, root = None, document.root
    if isinstance(root, MapNode):
        try:
            swarm = Swarm.model_validate(to_python(root))
        except ValidationError as error:
            findings += [_finding(root, item) for item in error.errors(include_url=False)]
    if swarm is None or findings:
        said = "\n".join(format_finding(finding) for finding in findings) or "a map was expected"
        raise BadUsage(
            f"the swarm file has errors\n{said}", place=str(path), remedy="see docs/simulate.md"
        )
    names = [group.name for group in swarm.workers]
    if len(set(names)) < len(names):
        raise BadUsage("two groups of one name", place=f"{path}: workers", remedy="rename one")
    return swarm


def _finding(root: MapNode, error: ErrorDetails) -> Finding:
    """An error at its place; of an unknown key with the keys that there are."""
    if error["type"] != "extra_forbidden":
        return schema_finding(root, error)
    *where, key = error["loc"]
    place, path, node, _ = locate(root, tuple(where))
    blocks: list[type[fields.Block]] = [
        Swarm,
        Group,
        StrategyBlock,
        Absence,
        ValidatorsBlock,
        Hardware,
    ]
    known = sorted({name for block in blocks for name in block.model_fields})
    match = close_match(str(key), known)
    if isinstance(node, MapNode) and key in node.entries:
        place = node.entries[key].key_place
    hint = f"did you mean {match}?" if match else ""
    return Finding(place, "unknown-key", f"{key} is not known", path=path, suggestion=hint)


@dataclass(frozen=True)
class Answer:
    """Answer of a worker to a lease."""

    what: Content | Literal["withhold", "refuse"]
    """`refuse`: the lease is released."""
    not_before: float = 0.0
    """Earliest time at which it is submitted or released."""


class Strategy:
    """One worker's strategy.

    Args:
        block: of the swarm file.
        group: strategies of the workers of its group that exist already; it adds itself.
    """

    def __init__(self, block: StrategyBlock, group: list[Strategy]) -> None:
        self._block, self._seen = block, 0
        self._members = group if block.kind == "collude" else [self]
        self.missing = block.record if block.kind in ("sleeper", "collude", "late") else 0
        """Accepted submissions that it wants before its first misdeed."""
        group.append(self)

    def answer(self, lease: Lease, now: float) -> Answer:
        """Return the answer to a lease that was just granted."""
        block = self._block
        turn, self._seen = self._seen % block.of, self._seen + 1
        match block.kind:
            case "honest" | "wrong":
                return Answer("wrong" if block.kind == "wrong" else "rollouts", now)
            case "refuse" | "rubbish" | "withhold":
                return Answer(block.kind, now + block.think)
            case "delay":
                end = lease.expires - block.margin
                return Answer("rollouts", end if block.after is None else now + block.after)
            case "alternate":
                honest = turn < block.honest
            case "sleeper" | "collude" | "late":
                honest = not self.ready()
        return Answer("rollouts") if honest else Answer(block.misdeed, now + block.think)

    def judged(self, accepted: bool) -> None:
        """Handle a verdict on one of the worker's submissions."""
        self.missing -= accepted

    def ready(self) -> bool:
        """Return whether it has its record; of colluders, whether all of the group have."""
        return all(member.missing <= 0 for member in self._members)

    def pause_s(self) -> float | None:
        """Return the seconds from a published version to its request; None: it always asks."""
        return (self._block.after or 0.0) if self._block.kind == "late" and self.ready() else None


@dataclass(frozen=True)
class Member:
    """One worker of a population."""

    key: str
    group: Group
    pool: str
    fetch_s: float
    """Seconds until it has a version, from publication or from when its link is free."""
    first_fetch_s: float
    """Seconds until it has its first version, if it joins after version 0."""
    load_s: float
    """Seconds to switch its engine to a fetched version."""
    sample_s: Callable[[Lengths], float]
    """Seconds to sample a lease."""
    strategy: Strategy
    rng: Random

    @property
    def honest(self) -> bool:
        return self.group.strategy.kind == "honest"


def planned_swarm(spec: RunSpec) -> Swarm:
    """Return the population of `runspec plan`: the spec's replicas, honest and always present."""
    return Swarm(
        workers=[
            Group(name=pool.name, count=pool.replicas, pool=pool.name, known=True)
            for pool in spec.samplers
        ]
    )


def members(
    swarm: Swarm, spec: RunSpec, config: ModelConfig, size: VersionSize, seed: int
) -> list[Member]:
    """Return every worker of a population.

    Args:
        swarm: the population.
        spec: spec of the run.
        config: shape of the model.
        size: sizes of a version.
        seed: seed of all random numbers.

    Raises:
        UserError: a pool or hardware is unknown.
    """
    pools = {pool.name: pool for pool in spec.samplers}
    arrival_s = {node.name: node.seconds for node in arrivals(spec, size.follower)}
    rebuild_s = size.whole / assumed.REBUILD_BYTES_S if size.follower < size.whole else 0.0
    load_s, found = size.whole / assumed.LOAD_BYTES_S, []
    for group in swarm.workers:
        name = group.pool or spec.samplers[0].name
        if name not in pools:
            raise UserError(
                f"the run has no pool {name!r}", place=group.name, remedy=f"one of {sorted(pools)}"
            )
        sample_s = _sampling(group, pools[name], spec, config)
        alike: list[Strategy] = []
        for index in range(group.count):
            key = f"{group.name}-{index}"
            link_s = arrival_s.get(f"{name}-{index % max(pools[name].replicas, 1)}", 0.0)
            if group.download is not None:
                link_s = 8 * size.follower / group.download
            fetch_s = link_s + rebuild_s
            found.append(
                Member(
                    key,
                    group,
                    name,
                    fetch_s=fetch_s,
                    first_fetch_s=fetch_s * size.joiner / size.follower,
                    load_s=load_s,
                    sample_s=sample_s,
                    strategy=Strategy(group.strategy, alike),
                    rng=Random(f"{seed}/{key}"),
                )
            )
    return found


def _sampling(
    group: Group, pool: SamplerPool, spec: RunSpec, config: ModelConfig
) -> Callable[[Lengths], float]:
    """Return the seconds of a lease on one worker of a group, as a function of lengths."""
    if group.hardware is not None:
        here = group.hardware.model_copy(update={"count": group.hardware.count or 1})
        fit = fitted(pool, spec, config, Devices(here))
        if isinstance(fit, Unfit):
            raise UserError(
                f"such a machine cannot serve pool {pool.name}: {fit.reason}",
                place=f"workers.{group.name}.hardware",
                remedy=f"give it other devices, or change {fit.path}",
            )
        pool = fit
    if group.tokens_per_s is not None:
        pool = pool.model_copy(update={"tokens_per_s": group.tokens_per_s})
    rate = decode_speed(pool, spec, config)
    if rate is None:
        raise UserError(
            f"the speed of {pool.hardware.kind} is not known",
            place=f"workers.{group.name}.hardware",
            remedy="give tokens_per_s, or memory_bandwidth and peak_flops",
        )
    decode, prompt = rate, assumed.mean_prompt_tokens(spec).value
    return lambda lengths: decode.lease_seconds(lengths, prompt) / group.speed
