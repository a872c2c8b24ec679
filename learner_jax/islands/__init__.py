"""Islands: several learners of one run, which average their parameters after each step.

Here are an island's store of shares and outer states, and how the others' are fetched; no JAX.

`broadcast.store.publish_objects` writes the store, signed by the island's key, and
`python -m broadcast origin` serves it. Its versions are

    2 s + 1   share.bin                  the share of step s
    2 s       theta.bin, momentum.bin    the outer state of policy version s, float32
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from blake3 import blake3

from broadcast import layout
from broadcast.client import WeightsClient, WrongFiles
from broadcast.manifest import MAX_BYTES, open_manifest
from broadcast.store import prune, publish_objects
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.signed import BadSignature, SigningKey
from verify.formats.batch import Contribution, StoredOuter

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


REPORT_EVERY_S = 30.0
_LISTEN_EVERY_S = 0.5
_CANCEL_EVERY_S = 0.1


class BadObject(UserError):
    """An island's server holds something else than what was recorded of it."""


class Silent(UserError):
    """No byte of an island's share has arrived for a while."""

    def __init__(self, share: Contribution, seconds: float) -> None:
        super().__init__(
            f"no byte of the share of island {share.island} arrived for {seconds:.0f} s",
            place=share.url,
            remedy=_unreachable(share.island),
        )
        self.island = share.island


class ShareFetcher:
    """Fetches shares and outer states from the islands' servers; any thread may call it.

    What is fetched lies in a folder for each island, so a fetch that was killed goes on where it
    stopped. Each chunk is checked as it comes; the log names the server that sent a wrong one.

    Args:
        run: the run's name.
        root_public_key: the pinned key, which signs the roles.json that names the islands' keys.
        folder: for what is fetched.
    """

    def __init__(self, *, run: str, root_public_key: str, folder: Path) -> None:
        self._run, self._root_public_key, self._folder = run, root_public_key, folder
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], WeightsClient] = {}

    def fetch_shares(
        self,
        step: int,
        shares: Sequence[Contribution],
        deadline_s: float,
        silence_s: float = math.inf,
    ) -> list[np.ndarray]:
        """Fetch the shares of a step, all at once.

        Args:
            step: its number.
            shares: what the step's record says of them.
            deadline_s: seconds that all of them may take together.
            silence_s: seconds for which no byte of one of them need arrive.

        Returns:
            uint8 [bytes] of each, in the order of `shares`; read-only, mapped from files.

        Raises:
            BadObject: a share is not the one that was recorded.
            Silent: one was silent for longer.
            UserError: one did not arrive in time; the message names the island and its URL.
            concurrent.futures.CancelledError: `cancel` was called.
        """
        begun = time.monotonic()
        report_at = begun + REPORT_EVERY_S
        heard = {each.island: (begun, self.received_from(each.island)) for each in shares}
        with ThreadPoolExecutor(max(1, len(shares)), thread_name_prefix="share") as threads:
            fetching = {
                threads.submit(self._fetch_share, step, share, deadline_s): share
                for share in shares
            }
            pending = set(fetching)
            try:
                while pending:
                    done, pending = wait(pending, _LISTEN_EVERY_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    missing = [share for future, share in fetching.items() if future in pending]
                    now = time.monotonic()
                    for each in missing:
                        received = self.received_from(each.island)
                        if received != heard[each.island][1]:
                            heard[each.island] = now, received
                        elif now - heard[each.island][0] > silence_s:
                            raise Silent(each, silence_s)
                    if missing and now >= report_at:
                        report_at, left = now + REPORT_EVERY_S, begun + deadline_s - now
                        names = ", ".join(f"{each.island} ({each.url})" for each in missing)
                        _LOG.info("step %d: %.0f s left for the shares of %s", step, left, names)
            except BaseException:
                # Again and again: a thread may not have begun its request yet.
                while wait(fetching, _CANCEL_EVERY_S).not_done:
                    self.cancel()
                raise
        return [future.result() for future in fetching]

    def fetch_outer(
        self, stored: StoredOuter, size: int, deadline_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fetch an outer state.

        Args:
            stored: what its island announced.
            size: number of parameters.
            deadline_s: seconds that it may take.

        Returns:
            theta and momentum, float32 [size]; read-only, mapped from files.

        Raises:
            BadObject: it is not the state that was announced.
            UserError: it did not arrive in time; the message names the island and its URL.
            concurrent.futures.CancelledError: `cancel` was called.
        """
        sizes = dict.fromkeys((THETA_FILE, MOMENTUM_FILE), size * FLOAT.itemsize)
        what, number = f"the outer state of version {stored.version}", 2 * stored.version
        folder = self._fetch(what, stored, number, None, sizes, stored.digest, deadline_s)
        theta, momentum = (np.memmap(folder / name, FLOAT, "r") for name in sizes)
        return theta, momentum

    def received_from(self, island: str) -> int:
        """Bytes received so far from one island, damaged and repeated ones too."""
        with self._lock:
            clients = [each for (name, _), each in self._clients.items() if name == island]
        return sum(client.received for client in clients)

    def keep_only(self, step: int) -> None:
        """Remove what was fetched for other steps; arrays that are mapped from it stay valid."""
        for client in self._all():
            client.prune({2 * step, 2 * step + 1})

    def cancel(self) -> None:
        """Cancel the fetches of other threads: they raise a `CancelledError`."""
        for client in self._all():
            client.cancel()

    def close(self) -> None:
        """Close the connections; no other thread may have a call under way."""
        for client in self._all():
            client.close()

    def _all(self) -> list[WeightsClient]:
        with self._lock:
            return list(self._clients.values())

    def _client(self, island: str, url: str) -> WeightsClient:
        with self._lock:
            if (island, url) not in self._clients:
                for (other, _), client in self._clients.items():
                    if other == island:  # it has moved: what its old server sent is held no more
                        client.prune(set())
                self._clients[island, url] = WeightsClient(
                    [url],
                    run=self._run,
                    root_public_key=self._root_public_key,
                    cache_dir=self._folder / island,
                    signers="island",
                )
            return self._clients[island, url]

    def _fetch_share(self, step: int, share: Contribution, deadline_s: float) -> np.ndarray:
        what, number, started = f"the share of step {step}", 2 * step + 1, time.monotonic()
        sizes = {SHARE_FILE: share.bytes}
        folder = self._fetch(what, share, number, share.manifest, sizes, share.share, deadline_s)
        took, size = time.monotonic() - started, share.bytes / 1e6
        _LOG.info("%s of island %s is here: %.1f MB, %.2f s", what, share.island, size, took)
        return np.memmap(folder / SHARE_FILE, np.uint8, "r")

    def _fetch(
        self,
        what: str,
        of: Contribution | StoredOuter,
        version: int,
        manifest: str | None,
        sizes: Mapping[str, int],
        digest: str,
        deadline_s: float,
    ) -> Path:
        """Fetch a version, and compare the digest of its files, one after the other."""
        try:
            folder = self._client(of.island, of.url).fetch(
                version, manifest_digest=manifest, deadline_s=deadline_s, sizes=sizes
            )
        except WrongFiles as error:
            raise _bad(f"{what} of island {of.island}: {error.thing}", of) from error
        except UserError as error:
            raise UserError(
                f"{what} of island {of.island} did not arrive: {error.thing}",
                place=error.place or of.url,
                remedy=_unreachable(of.island),
            ) from error
        hasher = blake3()
        for name in sizes:
            hasher.update_mmap(folder / name)
        if (found := hasher.hexdigest()) != digest:
            shutil.rmtree(folder)  # if it was damaged on this disk, the next try fetches it anew
            has = f"has digest {found[:16]}, recorded is {digest[:16]}"
            raise _bad(f"{what} of island {of.island} {has}", of)
        return folder


def _unreachable(island: str) -> str:
    return f"see that the server of island {island} is up, can be reached and has it"


def _bad(thing: str, of: Contribution | StoredOuter) -> BadObject:
    return BadObject(
        thing,
        place=of.url,
        remedy=f"start again: it is fetched anew; if it is wrong again, island {of.island} offered "
        "something else than what its server holds: mend or remove that island",
    )
