"""What a volunteer needs besides the spec: where weights are, and the data's files by digest.

Signed by the coordinator. The addresses are a convenience (weights are believed by the publisher's
signature, wherever they come from); the files are believed by the digests that are listed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document
from verify.formats.payload import STRICT, Digest, open_payload

KIND = "site"
MAX_FILES = 4096
MAX_BYTES = 2 * 1024 * 1024


def is_inside(path: str) -> bool:
    """Whether a relative path names something below where it starts, however it is read."""
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
    """As `runspec.core.spec.source_files` names it, below the source's own folder."""
    bytes: Annotated[int, Field(ge=0, le=1 << 40)]
    digest: Digest


@dataclass(frozen=True)
class Site:
    """Payload of the document."""

    __pydantic_config__ = STRICT

    run: str
    weights: Annotated[list[Url], Field(max_length=256)]
    """Base URLs of relays and origin, in no order that matters."""
    files: Annotated[list[SiteFile], Field(max_length=MAX_FILES)]
    data: Literal[""] | Digest
    """`runspec.core.spec.source_files.data_digest` there; empty if the coordinator has none."""


_CODEC = TypeAdapter(Site)


def sign_site(site: Site, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(site), key)


def open_site(data: bytes, *, coordinators: frozenset[str], run: str) -> Site:
    """Checks a site document and returns it; no path in it leads out of its source's directory.

    Raises:
        BadSignature: not signed by a coordinator of the run, or its fields are not a site's.
    """
    payload = open_document(data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES).payload
    site = open_payload(_CODEC, payload, KIND)
    if site.run != run:
        raise BadSignature(f"site: of run {site.run[:80]!r}, not {run!r}")
    return site
