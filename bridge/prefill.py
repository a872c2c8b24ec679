"""Base of the prefill engines: fetches and loads the versions that leases may name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from broadcast.client import WeightsClient
from runspec.core.run_files import versions_in
from runspec.core.schema import RunSpec
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation
from verify.truncation import Truncation

Policy = TypeVar("Policy")


class VersionedPrefill(Generic[Policy]):
    """A `verify.plugins.PrefillEngine` that keeps the versions of the allowed lag on the device.

    Args:
        spec: the resolved spec.
        weights: where versions come from.
        load: loads a weights directory onto the device.
        has_room: whether a version of this many bytes fits beside the loaded ones. If it does not,
            the least recently used versions are dropped, and loaded again when needed.
        compute: recomputes rollouts under a loaded version, which it is given first; the rest as
            `verify.plugins.PrefillEngine.prefill`.
    """

    def __init__(
        self,
        spec: RunSpec,
        weights: WeightsLocation,
        *,
        load: Callable[[Path], Policy],
        has_room: Callable[[int], bool],
        compute: Callable[..., list[PrefillOutput]],
    ) -> None:
        self._client = WeightsClient(
            weights.urls,
            run=weights.run,
            root_public_key=weights.root_public_key,
            cache_dir=weights.cache_dir,
        )
        self._cache_dir, self._count = weights.cache_dir, spec.grpo.async_level + 1
        self._load, self._has_room, self._compute = load, has_room, compute
        self._paths: dict[int, Path] = {}
        self._loaded: OrderedDict[int, Policy] = OrderedDict()

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        """Fetch a version unless it is here; remove those that no lease names any more.

        Raises:
            UserError: not here by the deadline, or not the version that the digest names.
        """
        path = self._client.fetch(version, manifest_digest=manifest_digest, deadline_s=deadline_s)
        self._paths[version] = path
        # Versions from before a restart count: leases still name them, and deltas start from them.
        newest = versions_in(self._cache_dir)[-self._count - 1 :]
        if version in newest:
            for old in set(self._paths) - set(newest):
                del self._paths[old]
            self._client.prune(set(newest))
        return path

    def get(self, version: int) -> Policy:
        """Return a version that `ensure_version` fetched, loaded.

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
        """Close the client's connections."""
        self._client.close()

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        policy = self.get(version)
        return self._compute(policy, inputs, temperature=temperature, truncation=truncation)
