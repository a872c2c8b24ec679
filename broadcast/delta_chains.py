"""Chains of deltas between versions: the cheapest way to a version, and which versions to keep.

Pure functions. A version has at most one base, so the versions that it can be made from form one
path back in time. A client starts from a version on this path that it holds, or fetches the files
of an anchor. Then it fetches and applies the deltas of all later versions on the path.

Deltas keep the names and sizes of the files that they are applied to. So all anchors on a path have
the same size, and the newest anchor is the cheapest. Of older versions only a held one can be
cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from runspec.core.errors import UserError

MAX_LINKS = 256
"""Largest number of deltas for one version; it also limits the manifests requested."""


@dataclass(frozen=True)
class Link:
    """The part of a manifest that the choice of a way depends on; sizes in bytes to fetch."""

    base: int | None
    """The version that the delta starts from; None if there is no delta."""
    delta: int
    """Size of the delta; 0 if there is none."""
    whole: int | None
    """Size of the files that hold the tensors; None: the version is no anchor."""


@dataclass(frozen=True)
class Chain:
    """A way to make a version."""

    start: int
    """The version to whose files the deltas are applied."""
    held: bool
    """Whether the files of `start` are here; else they are fetched."""
    deltas: tuple[int, ...]
    """Versions whose deltas are applied, the oldest first; the last is the target."""
    size: int
    """Bytes to fetch for the files that hold the tensors."""


@dataclass(frozen=True)
class Unknown:
    """Result of `cheapest` if it first needs the manifest of another version."""

    version: int
    """The version whose manifest to request."""


def cheapest(
    target: int, links: Mapping[int, Link | None], held: Collection[int]
) -> Chain | Unknown:
    """Return the way to `target` with the fewest bytes; among equal ones, with the fewest deltas.

    It requests no manifest that cannot make the way cheaper.

    Args:
        target: the version wanted.
        links: known links of it and of older versions; None if nobody has the manifest.
        held: versions whose files are here.

    Raises:
        UserError: there is no way; the message names the missing version.
    """
    best: Chain | None = None
    deltas: list[int] = []
    size, version = 0, target
    oldest_held = min(held, default=target + 1)
    while best is None or (size < best.size and oldest_held <= version):
        if version in held:
            return _chain(version, True, deltas, size)
        if version not in links:
            return Unknown(version)
        link = links[version]
        if best is None and link is not None and link.whole is not None:
            best = _chain(version, False, deltas, size + link.whole)
        if link is None or link.base is None or len(deltas) == MAX_LINKS:
            break
        deltas.append(version)
        size += link.delta
        version = link.base
    if best is None:
        raise UserError(
            f"version {target} cannot be made: it needs version {version}, which no server has"
            if len(deltas) < MAX_LINKS
            else f"version {target} cannot be made: there is no anchor within {MAX_LINKS} deltas",
            remedy="fetch a newer version, or publish one as an anchor",
        )
    return best


def _chain(start: int, held: bool, newest_first: list[int], size: int) -> Chain:
    return Chain(start, held, tuple(reversed(newest_first)), size)


def versions_to_keep(
    needs: Mapping[int, int | None],
    newest: int,
    keep_versions: int,
    pinned: Sequence[int] = (),
) -> set[int]:
    """Return the versions to keep, so that a new client finds an anchor and all later deltas.

    These are the newest `keep_versions`, the newest anchor and all later versions, the
    `keep_versions` versions that were pinned last, and the chain of bases of each of these back to
    an anchor. Pins keep at most `keep_versions` chains, so a hostile reader cannot fill a disk.

    Args:
        needs: the base that each held version is rebuilt from; None for an anchor.
        newest: the version that latest.json names. Newer held versions are about to be announced:
            they are kept and not counted.
        keep_versions: number of newest versions to keep; at least 1.
        pinned: versions that are being read, the last read first.
    """
    announced = sorted((version for version in needs if version <= newest), reverse=True)
    wanted = {version for version in needs if version > newest} | set(announced[:keep_versions])
    whole = [version for version in announced if needs[version] is None]
    if whole:
        wanted |= {version for version in announced if version >= whole[0]}
    result = with_bases(wanted, needs)
    read = [version for version in pinned if version in needs and version not in result]
    return result | with_bases(read[:keep_versions], needs)


def with_bases(versions: Collection[int], needs: Mapping[int, int | None]) -> set[int]:
    """Return the versions and the held versions that they are rebuilt from."""
    found = set()
    for version in versions:
        step: int | None = version
        while step is not None and step in needs and step not in found:
            found.add(step)
            step = needs[step]
    return found
