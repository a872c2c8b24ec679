"""What the coordinator gives a joining worker (the resolved spec, the site) and a page of the run.

The coordinator signs spec and site. The site has the URLs of weights and the digests of the data's
files. The URLs need no trust, because the publisher's signature verifies weights from any server.
The listed digests verify the files. docs/coordinator.md says what a page is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.schema import RunSpec
from runspec.core.schema.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.schema.load import dump_resolved, parse_resolved
from runspec.core.signed import (
    STRICT,
    BadSignature,
    Digest,
    SigningKey,
    open_document,
    open_payload,
    sign_document,
)

SITE_KIND = "site"
MAX_FILES = 4096
MAX_SITE_BYTES = 2 * 1024 * 1024
SPEC_KIND = "spec"
MAX_SIGNED_SPEC_BYTES = MAX_SPEC_BYTES + 4 * 1024


def is_inside(path: str) -> bool:
    """Return whether a relative path stays below its start on every system."""
    parts = PurePosixPath(path).parts
    plain = "\\" not in path and "\0" not in path
    return plain and len(parts) > 0 and not path.startswith("/") and ".." not in parts


def _path(path: str) -> str:
    if not is_inside(path):
        raise ValueError("a path below where it starts is needed")
    return path


Path = Annotated[str, Field(max_length=400), AfterValidator(_path)]
Url = Annotated[str, Field(min_length=1, max_length=400)]


@dataclass(frozen=True)
class SiteFile:
    """One file of a source of the spec."""

    __pydantic_config__ = STRICT

    source: Path
    """`data.sources[].name`."""
    path: Path
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


_CODEC = TypeAdapter(Site)


def sign_site(site: Site, key: SigningKey) -> bytes:
    return sign_document(SITE_KIND, asdict(site), key)


def open_site(data: bytes, *, coordinators: frozenset[str], run: str) -> Site:
    """Check a site document and return it; no path in it leaves the directory of its source.

    Raises:
        BadSignature: it is not signed by a coordinator of the run, or its fields are not valid.
    """
    site, _ = open_payload(
        _CODEC, data, kind=SITE_KIND, keys=coordinators, max_bytes=MAX_SITE_BYTES
    )
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
