"""Findings of watchers: what came of steps that they trained again (`runspec watch`).

Anybody may sign one. A run's coordinator and `runspec watch --serve` hand on a list of them, to
readers who know which keys they trust.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.files import read_bounded
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    Natural,
    SigningKey,
    Time,
    open_payload,
    sign_document,
)

KIND = "finding"
MAX_BYTES = 16 * 1024
LONGEST_LINE = 2000
MOST = 1000
"""Findings in a list."""
MAX_LIST_BYTES = MOST * (MAX_BYTES + 1) + 1024
LIST_PATH = "/v1/findings"
FILES = "[0-9]*.json"
"""Names of findings in a folder, FIRST-LAST... .json; no file that is being written has one."""
Outcome = Literal["equal", "consistent", "refuted", "failed"]


@dataclass(frozen=True)
class Finding:
    """What came of steps that a watcher trained again."""

    __pydantic_config__ = STRICT

    run: str
    first: Natural
    last: Natural
    """Steps first .. last - 1, between two published full states."""
    manifests: Annotated[list[Digest], Field(min_length=2, max_length=2)]
    """Digests of the manifests of the two."""
    outcome: Outcome
    line: Annotated[str, Field(max_length=LONGEST_LINE)]
    """What the replay said."""
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    """Of the intervals that the watcher draws."""
    finished: Time


_FINDING = TypeAdapter(Finding)
Signed = tuple[Finding, str]
"""A finding, and the key that signed it."""


def sign_finding(finding: Finding, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(finding), key)


def open_finding(data: bytes) -> Signed:
    """Check a finding of anybody's.

    Raises:
        BadSignature: nobody signed it, or its fields are not valid.
    """
    return open_payload(_FINDING, data, kind=KIND, keys=None, max_bytes=MAX_BYTES)


def stored_findings(folder: Path) -> dict[str, bytes]:
    """Return the documents in a folder by name, at most `MOST`, the oldest first.

    Raises:
        OSError, UserError: one cannot be read.
    """
    paths = sorted(folder.glob(FILES), key=lambda path: path.stat().st_mtime_ns)[-MOST:]
    return {path.name: read_bounded(path, MAX_BYTES) for path in paths}


def list_findings(documents: Iterable[bytes]) -> bytes:
    return b'{"findings":[' + b",".join(documents) + b"]}"


def open_list(data: bytes) -> list[Signed]:
    """Check what `list_findings` made.

    Raises:
        BadSignature: it is no such list, or one of them is no finding.
    """
    try:
        found = parse_object(data, max_bytes=MAX_LIST_BYTES)["findings"]
        return [open_finding(canonical_json(each)) for each in found]
    except (MalformedJson, KeyError, TypeError) as error:
        raise BadSignature(f"no list of findings: {error}") from error


def weigh(found: Sequence[Signed], trusted: Collection[str]) -> str:
    """Say how many steps keys of `trusted` trained again, and how many more others say they did."""
    checked = _steps(finding for finding, key in found if key in trusted)
    reported = _steps(finding for finding, _ in found) - checked
    return f"{checked:,} steps checked by keys that you trust, {reported:,} more reported by others"


def _steps(found: Iterable[Finding]) -> int:
    """Return the number of steps in the union of intervals."""
    count = end = 0
    for first, last in sorted((f.first, f.last) for f in found if f.outcome != "failed"):
        count += max(0, last - max(first, end))
        end = max(end, last)
    return count
