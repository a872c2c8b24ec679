"""Fetches shares and outer states from the servers of the other islands' stores. No JAX here."""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from blake3 import blake3

from broadcast.client import WeightsClient, WrongFiles
from broadcast.fetcher import NO_TOKEN
from broadcast.transport import Access
from learner_jax.islands.share_store import FLOAT, MOMENTUM_FILE, SHARE_FILE, THETA_FILE
from runspec.core.errors import UserError
from verify.formats.islands import Contribution

REPORT_EVERY_S = 30.0
_LISTEN_EVERY_S = 0.5
_CANCEL_EVERY_S = 0.1
_LOG = logging.getLogger(__name__)


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
        access: token and certificates for the islands' servers.
    """

    def __init__(
        self, *, run: str, root_public_key: str, folder: Path, access: Access = NO_TOKEN
    ) -> None:
        self._run, self._root_public_key = run, root_public_key
        self._folder, self._access = folder, access
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
                threads.submit(self.fetch_share, step, share, deadline_s): share for share in shares
            }
            pending = set(fetching)
            try:
                while pending:
                    done, pending = wait(pending, _LISTEN_EVERY_S, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    missing = [fetching[future] for future in fetching if future in pending]
                    now = time.monotonic()
                    for each in missing:
                        received = self.received_from(each.island)
                        if received != heard[each.island][1]:
                            heard[each.island] = now, received
                        elif now - heard[each.island][0] > silence_s:
                            raise Silent(each, silence_s)
                    if missing and now >= report_at:
                        report_at = now + REPORT_EVERY_S
                        _LOG.info(
                            "step %d: %.0f s left for the shares of %s",
                            step,
                            begun + deadline_s - now,
                            ", ".join(f"{each.island} ({each.url})" for each in missing),
                        )
            except BaseException:
                # Again and again: a thread may not have begun its request yet.
                while wait(fetching, _CANCEL_EVERY_S).not_done:
                    self.cancel()
                raise
        return [future.result() for future in fetching]

    def fetch_share(self, step: int, share: Contribution, deadline_s: float) -> np.ndarray:
        """Fetch one share; see `fetch_shares`."""
        what = f"the share of step {step}"
        started = time.monotonic()
        folder = self._fetch(
            what,
            share.island,
            share.url,
            2 * step + 1,
            {SHARE_FILE: share.bytes},
            deadline_s,
            share.manifest,
        )
        _check(what, share.island, share.url, folder, (SHARE_FILE,), share.share)
        _LOG.info(
            "%s of island %s is here: %.1f MB, %.2f s",
            what,
            share.island,
            share.bytes / 1e6,
            time.monotonic() - started,
        )
        return np.memmap(folder / SHARE_FILE, np.uint8, "r")

    def fetch_outer(
        self, island: str, url: str, step: int, *, digest: str, size: int, deadline_s: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fetch the outer state of policy version `step`.

        Args:
            island: its name.
            url: of its server.
            step: number of the version.
            digest: BLAKE3 of theta's bytes, then the momentum's, as a record or a result names it.
            size: number of parameters.
            deadline_s: seconds that it may take.

        Returns:
            theta and momentum, float32 [size]; read-only, mapped from files.

        Raises:
            BadObject: it is not the state that was recorded.
            UserError: it did not arrive in time; the message names the island and its URL.
            concurrent.futures.CancelledError: `cancel` was called.
        """
        what, names = f"the outer state of version {step}", (THETA_FILE, MOMENTUM_FILE)
        sizes = dict.fromkeys(names, size * FLOAT.itemsize)
        folder = self._fetch(what, island, url, 2 * step, sizes, deadline_s, None)
        _check(what, island, url, folder, names, digest)
        theta, momentum = (np.memmap(folder / name, FLOAT, "r") for name in names)
        return theta, momentum

    @property
    def received(self) -> int:
        """Bytes received so far, damaged and repeated ones too."""
        with self._lock:
            return sum(client.received for client in self._clients.values())

    def received_from(self, island: str) -> int:
        """Bytes received so far from one island."""
        with self._lock:
            clients = [each for (name, _), each in self._clients.items() if name == island]
        return sum(client.received for client in clients)

    def keep(self, steps: Collection[int]) -> None:
        """Remove what was fetched for other steps; arrays that are mapped from it stay valid."""
        numbers = {number for step in steps for number in (2 * step, 2 * step + 1)}
        for client in self._all():
            client.prune(numbers)

    def cancel(self) -> None:
        """Cancel the fetches of other threads: they raise a `CancelledError`."""
        for client in self._all():
            client.cancel()

    def close(self) -> None:
        """Close the connections; no other thread may have a call under way."""
        for client in self._all():
            client.close()

    def __enter__(self) -> ShareFetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _all(self) -> list[WeightsClient]:
        with self._lock:
            return list(self._clients.values())

    def _client(self, island: str, url: str) -> WeightsClient:
        with self._lock:
            if (island, url) not in self._clients:
                self._clients[island, url] = WeightsClient(
                    [url],
                    run=self._run,
                    root_public_key=self._root_public_key,
                    cache_dir=self._folder / island,
                    access=self._access,
                    signers="island",
                )
            return self._clients[island, url]

    def _fetch(
        self,
        what: str,
        island: str,
        url: str,
        version: int,
        sizes: Mapping[str, int],
        deadline_s: float,
        manifest: str | None,
    ) -> Path:
        try:
            return self._client(island, url).fetch(
                version, manifest_digest=manifest, deadline_s=deadline_s, sizes=sizes
            )
        except WrongFiles as error:
            raise BadObject(
                f"{what} of island {island}: {error.thing}", place=url, remedy=_blame(island)
            ) from error
        except UserError as error:
            raise UserError(
                f"{what} of island {island} did not arrive: {error.thing}",
                place=error.place or url,
                remedy=_unreachable(island),
            ) from error


def _check(
    what: str, island: str, url: str, folder: Path, names: Sequence[str], digest: str
) -> None:
    """Compare the digest of some files, one after the other, with what was recorded."""
    hasher = blake3()
    for name in names:
        hasher.update_mmap(folder / name)
    found = hasher.hexdigest()
    if found != digest:
        shutil.rmtree(folder)  # if it was damaged on this disk, the next try fetches it anew
        raise BadObject(
            f"{what} of island {island} has digest {found[:16]}, recorded is {digest[:16]}",
            place=url,
            remedy=_blame(island),
        )


def _unreachable(island: str) -> str:
    return f"see that the server of island {island} is up, can be reached and has it"


def _blame(island: str) -> str:
    return (
        f"start again: it is fetched anew; if it is wrong again, island {island} offered something "
        "else than what its server holds: mend or remove that island"
    )
