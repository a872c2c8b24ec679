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

from broadcast.manifest import WeightsManifest
from runspec.core.errors import UserError

MAX_LINKS = 256
"""Largest number of deltas for one version; it also limits the manifests requested."""


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


def cheapest(
    target: int, manifests: Mapping[int, WeightsManifest | None], held: Collection[int]
) -> Chain | int:
    """Return the way to `target` with the fewest bytes; among equal ones, with the fewest deltas.

    The result is a version's number if its manifest must be known first.
    It requests no manifest that cannot make the way cheaper.

    Args:
        target: the version wanted.
        manifests: known manifests of it and of older versions; None if nobody has it.
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
        if version not in manifests:
            return version
        manifest = manifests[version]
        if best is None and manifest is not None and manifest.is_anchor:
            best = _chain(version, False, deltas, size + manifest.weights_bytes)
        if manifest is None or manifest.base is None or len(deltas) == MAX_LINKS:
            break
        deltas.append(version)
        size += manifest.delta_bytes
        version = manifest.base
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
