"""Chains of deltas between versions: the cheapest way to a version, and which versions to keep.

Pure functions. A version has at most one base, so the versions that it can be made from lie on one
path, walked back from it. The path may start at every version on it that is held (its files are
here) or is an anchor (its files are fetched). The deltas of all later versions on the path are
fetched and applied.

Deltas keep sizes and names of the files that they are applied to. So all anchors on a path have the
same size, the newest is the cheapest, and beyond it only a held version can be cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from runspec.core.errors import UserError

MAX_LINKS = 256
"""Most deltas that one version may be made with; bounds the manifests requested."""


@dataclass(frozen=True)
class Link:
    """The part of a manifest that the choice of a way depends on; sizes in bytes to fetch."""

    base: int | None
    """The version that the delta starts from; None where there is no delta."""
    delta: int
    """Size of the delta; 0 where there is none."""
    whole: int | None
    """Size of the files that hold the tensors, the same for all on a path; None: no anchor."""


@dataclass(frozen=True)
class Chain:
    """A way to a version."""

    start: int
    """The version to whose files the deltas are applied."""
    held: bool
    """Whether its files are here; else they are fetched."""
    deltas: tuple[int, ...]
    """Versions whose deltas follow, the oldest first; the last is the target."""
    size: int
    """Bytes to fetch for the files that hold the tensors."""


@dataclass(frozen=True)
class Unknown:
    """The choice needs the manifest of this version, which was not requested yet."""

    version: int


def cheapest(
    target: int, links: Mapping[int, Link | None], held: Collection[int]
) -> Chain | Unknown:
    """Return the way to `target` with the fewest bytes; of equal ones the one with fewest deltas.

    Asks for no manifest that cannot make the way cheaper.

    Args:
        target: the version wanted.
        links: what is known of it and of older versions; None where nobody has the manifest.
        held: versions whose files are here.

    Raises:
        UserError: there is no way; names the version that is missing.
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
    """Return the versions to keep, so that a joiner finds an anchor and every delta after it.

    Kept are the newest `keep_versions`, the newest anchor and everything after it, and the
    `keep_versions` versions that were pinned last; with each of these, what it is rebuilt from:
    its base, that one's base, and so on to an anchor. Pins can keep no more than `keep_versions`
    such chains, so a hostile reader cannot fill a disk.

    Args:
        needs: for each version that is held, the one that it is rebuilt from; None of an anchor.
        newest: the version that latest.json names. Held ones that are newer are about to be
            announced: they are kept and not counted.
        keep_versions: how many of the newest; at least 1.
        pinned: versions that are being read, the latest interest first.
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
    """The versions and what they are rebuilt from, as far as that is held."""
    found = set()
    for version in versions:
        step: int | None = version
        while step is not None and step in needs and step not in found:
            found.add(step)
            step = needs[step]
    return found
