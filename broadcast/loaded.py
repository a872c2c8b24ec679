"""Policy versions that a prefill engine has at hand: files on disk, the last used ones loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from broadcast.client import WeightsClient
from runspec.core.run_files import versions_in

Policy = TypeVar("Policy")


class LoadedVersions(Generic[Policy]):
    """The versions that leases may name: `count` of them, and one more on disk.

    Args:
        client: fetches them, into `cache_dir`; closed with this.
        cache_dir: where they are, those of before a restart included.
        count: versions within the lag that the run allows.
        load: puts a weights directory on the device.
        has_room: whether the device has room for a version of so many bytes, beside what it holds;
            where it has not, those last used longest ago are dropped, and loaded again when needed.
    """

    def __init__(
        self,
        client: WeightsClient,
        *,
        cache_dir: Path,
        count: int,
        load: Callable[[Path], Policy],
        has_room: Callable[[int], bool],
    ) -> None:
        self._client, self._cache_dir, self._count = client, cache_dir, count
        self._load, self._has_room = load, has_room
        self._paths: dict[int, Path] = {}
        self._loaded: OrderedDict[int, Policy] = OrderedDict()

    def ensure(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        """Fetches a version unless it is there; removes those that no lease names any more.

        Raises:
            UserError: not there by the deadline, or not the version that the digest names.
        """
        path = self._client.fetch(version, manifest_digest=manifest_digest, deadline_s=deadline_s)
        self._paths[version] = path
        # Those of before a restart count: leases name them still, and deltas start from them.
        newest = versions_in(self._cache_dir)[-self._count - 1 :]
        if version in newest:
            for old in set(self._paths) - set(newest):
                del self._paths[old]
            self._client.prune(set(newest))
        return path

    def get(self, version: int) -> Policy:
        """A version that `ensure` returned, loaded.

        Raises:
            UserError: of `load`.
        """
        if version not in self._loaded:
            path = self._paths[version]
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            while self._loaded and not (len(self._loaded) < self._count and self._has_room(size)):
                self._loaded.popitem(last=False)
            self._loaded[version] = self._load(path)
        self._loaded.move_to_end(version)
        return self._loaded[version]

    def close(self) -> None:
        """Closes the connections to the relays."""
        self._client.close()
