"""Which versions of a run stay: a pure function, the same for a publisher's store and a relay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def kept(
    needs: Mapping[int, int | None],
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
