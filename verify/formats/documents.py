"""Signed documents beside the work: spec and site for workers that join, results of evaluations.

The coordinator signs spec and site, which it gives a joining worker. The site has the URLs of
weights and the digests of the data's files. The URLs need no trust, because the publisher's
signature verifies weights from any server. The listed digests verify the files. The evaluator signs
its results. docs/coordinator.md says what a page of the run is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.schema import RunSpec
from runspec.core.schema.fields import NAME_PATTERN
from runspec.core.schema.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.schema.load import dump_resolved, parse_resolved
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    Time,
    open_document,
    open_payload,
    sign_document,
)

SITE_KIND = "site"
MAX_FILES = 4096
MAX_RELAYS = 64
MAX_SITE_BYTES = 2 * 1024 * 1024
SPEC_KIND = "spec"
MAX_SIGNED_SPEC_BYTES = MAX_SPEC_BYTES + 4 * 1024


def _path(path: str) -> str:
    """Require a relative path that stays below its start on every system."""
    parts = PurePosixPath(path).parts
    plain = "\\" not in path and "\0" not in path
    if not (plain and len(parts) > 0 and not path.startswith("/") and ".." not in parts):
        raise ValueError("a path below where it starts is needed")
    return path


_SourcePath = Annotated[str, Field(max_length=400), AfterValidator(_path)]
Url = Annotated[str, Field(min_length=1, max_length=400)]


@dataclass(frozen=True)
class SiteFile:
    """One file of a source of the spec."""

    __pydantic_config__ = STRICT

    source: _SourcePath
    """`data.sources[].name`."""
    path: _SourcePath
    """As `runspec.core.schema.source_files` names it, below the source's own folder."""
    bytes: Annotated[int, Field(ge=0, le=1 << 40)]
    digest: Digest


@dataclass(frozen=True)
class Site:
    """Payload of the site document."""

    __pydantic_config__ = STRICT

    run: str
    weights: Annotated[list[Url], Field(max_length=256)]
    """Base URLs of relays and origin, in no order that matters."""
    files: Annotated[list[SiteFile], Field(max_length=MAX_FILES)]
    data: Literal[""] | Digest
    """`runspec.core.schema.source_files.data_digest` there; empty if the coordinator has none."""
    relays: Annotated[list[Url], Field(max_length=MAX_RELAYS)] = field(default_factory=list)
    """Relays of volunteers that serve now, for chunks alone; the fastest first."""


_SITE = TypeAdapter(Site)


def sign_site(site: Site, key: SigningKey) -> bytes:
    return sign_document(SITE_KIND, asdict(site), key)


def open_site(data: bytes, *, coordinators: frozenset[str], run: str) -> Site:
    """Check a site document and return it; no path in it leaves the directory of its source.

    Raises:
        BadSignature: it is not signed by a coordinator of the run, or its fields are not valid.
    """
    site, _ = open_payload(_SITE, data, kind=SITE_KIND, keys=coordinators, max_bytes=MAX_SITE_BYTES)
    if site.run != run:
        raise BadSignature(f"site: of run {site.run[:80]!r}, not {run!r}")
    return site


def sign_spec(spec: RunSpec, key: SigningKey) -> bytes:
    return sign_document(
        SPEC_KIND, parse_object(dump_resolved(spec), max_bytes=MAX_SPEC_BYTES), key
    )


def open_spec(data: bytes, *, coordinators: frozenset[str], place: str) -> RunSpec:
    """Check and read a signed spec.

    Args:
        data: the document.
        coordinators: public keys that may sign it.
        place: source of the document, for the message.

    Raises:
        BadSignature: it is not signed by a coordinator.
        UserError: it is signed, but this release cannot read the spec.
    """
    payload = open_document(
        data, kind=SPEC_KIND, keys=coordinators, max_bytes=MAX_SIGNED_SPEC_BYTES
    ).payload
    return parse_resolved(canonical_json(payload), place=place)


MAX_PIECE_BYTES = 4 * 1024 * 1024
"""About the largest piece of the ledger or of metrics.jsonl in one answer."""
MAX_ROW_BYTES = 64 * 1024 * 1024
"""Largest row of the ledger, which is in a piece of its own."""
TOKENIZER_FILE = "tokenizer.json"


EVALUATION_KIND = "evaluation"
MAX_EVALUATION_BYTES = 16 * 1024 * 1024
MAX_PROBLEMS = 100_000
Value = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


@dataclass(frozen=True)
class Figure:
    """A mean over problems, and its 95 % interval."""

    __pydantic_config__ = STRICT

    value: Value
    low: Value | None
    """None if there is only one problem."""
    high: Value | None


@dataclass(frozen=True)
class ProblemResult:
    """The answers to one problem, in the order of their noise."""

    __pydantic_config__ = STRICT

    problem_id: Annotated[str, Field(max_length=400)]
    target: Natural | None
    """Length that the prompt asked for, in tokens."""
    rewards: Annotated[list[Value | None], Field(min_length=1, max_length=1024)]
    """Task reward of each answer; None if the grader failed."""
    lengths: Annotated[list[Natural], Field(min_length=1, max_length=1024)]
    """Output tokens of each, the end token included."""
    majority: Value | None
    """Mean reward of the most frequent answer, or of those that are equally frequent; None if no
    answer was graded."""


@dataclass(frozen=True)
class Evaluated:
    """Payload of the document."""

    __pydantic_config__ = STRICT

    run: str
    evaluation: Name
    """`evaluations[].name`."""
    version: Natural
    model_digest: Digest | None
    """Digest of the version's tensors, if its manifest has one."""
    figures: Annotated[dict[Name, Figure], Field(max_length=64)]
    """Figures by the names of `sampler.evaluation.ask`."""
    faults: Natural
    """Answers that the grader failed at; they count nowhere."""
    problems: Annotated[list[ProblemResult], Field(max_length=MAX_PROBLEMS)]
    finished: Time
    wall_s: Annotated[float, Field(ge=0)]
    cpu_s: Annotated[float, Field(ge=0)]
    """Seconds of processors that sampling and grading took, the engine's processes included."""


_EVALUATED = TypeAdapter(Evaluated)


def read_evaluations(files: Iterable[Path]) -> list[Evaluated]:
    """Return stored results, such as those of `runspec.core.run_files.evaluation_files`.

    Raises:
        UserError: a file is not a result.
    """
    found = []
    for path in files:
        try:
            found.append(open_evaluation(read_bounded(path, MAX_EVALUATION_BYTES), evaluators=None))
        except (OSError, BadSignature) as error:
            raise UserError(
                f"cannot be read: {error}", place=str(path), remedy="delete it: it is made again"
            ) from error
    return found


def sign_evaluation(result: Evaluated, key: SigningKey) -> bytes:
    return sign_document(EVALUATION_KIND, asdict(result), key)


def open_evaluation(data: bytes, *, evaluators: frozenset[str] | None) -> Evaluated:
    """Check a result and return it.

    Args:
        data: the document.
        evaluators: public keys that may have signed it; None: any, in files of one's own run.

    Raises:
        BadSignature: it is not signed by one of them, or its fields are not valid.
    """
    result, _ = open_payload(
        _EVALUATED, data, kind=EVALUATION_KIND, keys=evaluators, max_bytes=MAX_EVALUATION_BYTES
    )
    return result
