"""Which versions of a run stay: a pure function, the same for a publisher's store and a relay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def kept(
    bases: Mapping[int, int | None],
    anchors: Collection[int],
    newest: int,
    keep_versions: int,
    pinned: Sequence[int] = (),
) -> set[int]:
    """The versions to keep: a joiner always finds an anchor and every delta after it.

    Kept are the newest `keep_versions`, the newest anchor and everything after it, and the
    `keep_versions` versions that were pinned last; with each of these, what it is rebuilt from:
    its base, that one's base, and so on to an anchor. Pins can keep no more than `keep_versions`
    such chains, so a hostile reader cannot fill a disk.

    Args:
        bases: for each version that is held, the one that its delta is from; None without a delta.
        anchors: versions that are whole by themselves.
        newest: the version that latest.json names. Held ones that are newer are about to be
            announced: they are kept and not counted.
        keep_versions: how many of the newest; at least 1.
        pinned: versions that are being read, the latest interest first.
    """
    announced = sorted((version for version in bases if version <= newest), reverse=True)
    wanted = {version for version in bases if version > newest} | set(announced[:keep_versions])
    whole = [version for version in announced if version in anchors]
    if whole:
        wanted |= {version for version in announced if version >= whole[0]}
    result = with_bases(wanted, bases, anchors)
    read = [version for version in pinned if version in bases and version not in result]
    return result | with_bases(read[:keep_versions], bases, anchors)


def with_bases(
    versions: Collection[int], bases: Mapping[int, int | None], anchors: Collection[int]
) -> set[int]:
    """The versions and what they are rebuilt from, as far as that is held."""
    found = set()
    for version in versions:
        step: int | None = version
        while step is not None and step in bases and step not in found:
            found.add(step)
            step = None if step in anchors else bases[step]
    return found
