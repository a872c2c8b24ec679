"""Which way to a version moves the fewest bytes; pure, so that it can be proven.

A version has at most one base, so the versions that it can be made from lie on one path, walked
back from it. The path may begin at every version on it that is held (its bytes are here) or is an
anchor (its files are fetched); the deltas of all later versions on it are fetched and applied.

Deltas keep sizes and names of the files that they are applied to. So all anchors on a path are of
one size, the newest is the cheapest, and beyond it only a held version can be cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from runspec.core.errors import UserError

MAX_LINKS = 256
"""Deltas that one version may be made with: a bound on manifests asked for."""


@dataclass(frozen=True)
class Link:
    """What the way to a version depends on, of one manifest; sizes in bytes to be fetched."""

    base: int | None
    """The version that the delta starts from; None where there is no delta."""
    delta: int
    """Size of the delta; 0 where there is none."""
    whole: int | None
    """Size of the files that hold the tensors, for all on a path the same; None: no anchor."""


@dataclass(frozen=True)
class Chain:
    """A way to a version."""

    start: int
    """Its files are what the deltas are applied to."""
    held: bool
    """Whether those files are here; else they are fetched."""
    deltas: tuple[int, ...]
    """Versions whose deltas follow, the oldest first; the last is the target."""
    size: int
    """Bytes to fetch for the files that hold the tensors."""


@dataclass(frozen=True)
class Unknown:
    """Nothing can be said before the manifest of this version was looked for."""

    version: int


def cheapest(
    target: int, links: Mapping[int, Link | None], held: Collection[int]
) -> Chain | Unknown:
    """The way to `target` with the fewest bytes; of equal ones that with the fewest deltas.

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
