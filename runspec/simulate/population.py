"""The swarm file: who works in a simulated run, when they come and go, and who is hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from runspec.core.errors import BadUsage
from runspec.core.spec import fields
from runspec.core.spec.findings import Finding, format_finding
from runspec.core.spec.schema import Hardware
from runspec.core.spec.schema_fields import close_match
from runspec.core.spec.validate import locate, schema_finding, to_python
from runspec.core.spec.yaml_nodes import MapNode, parse_yaml

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
    """How the workers of a group answer a lease (`runspec.simulate.fleet.Strategy`)."""

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
