"""An island's store: the shares and outer states that it publishes for the others.

`broadcast.store.publish_objects` writes them, signed by the island's key, and
`python -m broadcast origin` serves them. The versions of the store are

    2 s + 1   share.bin                  the share of step s
    2 s       theta.bin, momentum.bin    the outer state of policy version s, float32

No JAX here.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from broadcast import layout
from broadcast.manifest import MAX_BYTES, open_manifest
from broadcast.store import prune, publish_objects
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature

SHARE_FILE, THETA_FILE, MOMENTUM_FILE = "share.bin", "theta.bin", "momentum.bin"
FLOAT = np.dtype("<f4")
_LOG = logging.getLogger(__name__)


class ShareStore:
    """The store of one island.

    Of versions that another key signed nobody would believe anything (a rollback of the run makes
    new keys): they are removed at the start.

    Args:
        store: the store's directory, which the island's server serves.
        run: the run's name.
        key: the island's key.
        roles: the signed roles.json, which names that key.

    Raises:
        UserError: the store cannot be read.
    """

    def __init__(self, store: Path, *, run: str, key: SigningKey, roles: bytes) -> None:
        self._store, self._run, self._key = store, run, key
        self.roles = roles
        """Served with the next version; set it to a newer one when the run has one."""
        for version in layout.stored_versions(store, run):
            path = store / layout.manifest_name(run, version)
            try:
                open_manifest(read_bounded(path, MAX_BYTES), run=run, publishers={key.public_hex})
            except BadSignature as error:
                _LOG.warning("%s: removed: %s", path.parent, error)
                shutil.rmtree(path.parent)

    def put_share(self, step: int, data: bytes | np.ndarray) -> str:
        """Publish the share of a step; repeating it is harmless.

        Args:
            step: its number.
            data: the encoded share, contiguous.

        Returns:
            The digest of the manifest, by which an offer names it.

        Raises:
            AlreadyPublished: the step's share is there with other contents; the error has the
                digest of its manifest.
            UserError: it cannot be stored.
        """
        return self._put(2 * step + 1, {SHARE_FILE: data})

    def put_outer(self, step: int, theta: np.ndarray, momentum: np.ndarray) -> str:
        """Publish the outer state of policy version `step`; repeating it is harmless.

        Args:
            step: number of the version.
            theta, momentum: float32 [n], contiguous.

        Returns:
            The digest of the manifest.

        Raises:
            AlreadyPublished: the version's state is there with other contents.
            UserError: it cannot be stored.
        """
        state = {THETA_FILE: theta, MOMENTUM_FILE: momentum}
        return self._put(2 * step, {n: a.astype(FLOAT, copy=False) for n, a in state.items()})

    def share(self, step: int) -> bytes | None:
        """Return the share of a step as it was published; None if it was not, or is gone.

        Raises:
            UserError: the store is damaged.
        """
        path = self._store / layout.manifest_name(self._run, 2 * step + 1)
        if not path.exists():
            return None
        try:
            data = read_bounded(path, MAX_BYTES)
            manifest = open_manifest(data, run=self._run, publishers={self._key.public_hex})
            info = manifest.objects[SHARE_FILE]
            names = (layout.chunk_name(self._run, chunk.blake3) for chunk in info.chunks)
            found = b"".join((self._store / name).read_bytes() for name in names)
            if digest_bytes(found) != info.blake3:
                raise BadSignature("its chunks are not those that were published")
        except (OSError, KeyError, BadSignature) as error:
            raise UserError(
                f"the island's own share cannot be read: {error}",
                place=str(path),
                remedy="remove this island's folder and its store, so that it joins anew",
            ) from error
        return found

    def keep(self, since: int) -> None:
        """Remove old objects, except those that are being read.

        Args:
            since: a policy version; its outer state and all that is newer stays.
        """
        stored = layout.stored_versions(self._store, self._run)
        newer = sum(version >= 2 * since for version in stored)
        if newer:
            prune(self._store, run=self._run, keep_versions=newer)

    def remove_from(self, step: int) -> None:
        """Remove the shares from a step on, and every outer state."""
        for stored in layout.stored_versions(self._store, self._run):
            if stored % 2 == 0 or stored > 2 * step:
                shutil.rmtree((self._store / layout.manifest_name(self._run, stored)).parent)

    def _put(self, version: int, contents: Mapping[str, bytes | np.ndarray]) -> str:
        return publish_objects(
            self._store,
            {name: _bytes(data) for name, data in contents.items()},
            run=self._run,
            version=version,
            key=self._key,
            roles=self.roles,
        )


def _bytes(data: bytes | np.ndarray) -> memoryview:
    return memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
