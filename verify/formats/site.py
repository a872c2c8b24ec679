"""What a volunteer needs besides the spec: where weights are, and the data's files by digest.

Signed by the coordinator. The addresses are a convenience (weights are believed by the publisher's
signature, wherever they come from); the files are believed by the digests that are listed here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document

KIND = "site"
MAX_FILES = 4096
MAX_BYTES = 2 * 1024 * 1024
MAX_FILE_BYTES = 1 << 40
_MAX_WEIGHTS, _MAX_NAME = 256, 400


@dataclass(frozen=True)
class SiteFile:
    """One file of a source of the spec."""

    source: str
    """`data.sources[].name`."""
    path: str
    """As `runspec.core.spec.source_files` names it, below the source's own folder."""
    bytes: int
    digest: str
    """BLAKE3."""


@dataclass(frozen=True)
class Site:
    """Payload of the document."""

    run: str
    weights: list[str]
    """Base URLs of relays and origin, in no order that matters."""
    files: list[SiteFile]
    data: str
    """`runspec.core.spec.source_files.data_digest` there; empty if the coordinator has none."""


def sign_site(site: Site, key: SigningKey) -> bytes:
    return sign_document(KIND, asdict(site), key)


def open_site(data: bytes, *, coordinators: frozenset[str], run: str) -> Site:
    """Checks a site document and returns it; no path in it leads out of its source's directory.

    Raises:
        BadSignature: not signed by a coordinator of the run, or its fields are not a site's.
    """
    payload = open_document(data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES).payload
    if not all(isinstance(payload.get(name), list) for name in ("weights", "files")):
        raise BadSignature("site: weights and files must be lists")
    try:
        site = Site(
            payload["run"],
            payload["weights"],
            [SiteFile(**file) for file in payload["files"]],
            payload["data"],
        )
    except (KeyError, TypeError) as error:
        raise BadSignature(f"site: {error}") from error
    if site.run != run:
        raise BadSignature(f"site: of run {str(site.run)[:80]!r}, not {run!r}")
    if len(site.weights) > _MAX_WEIGHTS or not all(_is_name(url) for url in site.weights):
        raise BadSignature("site: weights must be a few URLs")
    if site.data != "" and not is_digest(site.data):
        raise BadSignature("site: data must be a digest")
    if len(site.files) > MAX_FILES or not all(_is_file(file) for file in site.files):
        raise BadSignature("site: a file's source, path, size or digest is none")
    return site


def _is_file(file: SiteFile) -> bool:
    return (
        _is_name(file.source)
        and isinstance(file.path, str)
        and len(file.path) <= _MAX_NAME
        and is_inside(file.path)
        and is_inside(file.source)
        and type(file.bytes) is int
        and 0 <= file.bytes <= MAX_FILE_BYTES
        and is_digest(file.digest)
    )


def is_inside(path: str) -> bool:
    """Whether a relative path names something below where it starts, however it is read."""
    parts = PurePosixPath(path).parts
    plain = "\\" not in path and "\0" not in path
    return plain and len(parts) > 0 and not path.startswith("/") and ".." not in parts


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME
