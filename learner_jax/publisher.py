"""The publisher: turns each version's Orbax parameters into signed, served weights.

checkpoints/params/v<N> -> (bridge) weights/v<N> -> (broadcast) store/origin. Versions go out in
order. Every act may be repeated, so a publisher killed anywhere simply starts again. No JAX here.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

from bridge.export import export_checkpoint
from broadcast.store import prune, publish, refresh_latest
from learner_jax.layout import (
    PARAMS_NAME,
    clear_unfinished,
    initial_model,
    params_folder,
    versions_in,
    weights_folder,
)
from runspec.common.errors import UserError
from runspec.common.files import read_bounded
from runspec.common.keys import SigningKey
from runspec.common.latest import RESIGN_EVERY_S
from runspec.common.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.spec.resolved import load_resolved
from runspec.spec.schema import RunSpec

POLL_S = 0.03


def publish_versions(run_dir: Path, log: logging.Logger, stop: threading.Event) -> None:
    """Publishes the versions of a run as they appear, until `stop` is set."""
    publisher = Publisher(run_dir, load_resolved(run_dir), log)
    refreshed = -RESIGN_EVERY_S
    while not stop.is_set():
        publisher.publish_new()
        if time.monotonic() - refreshed >= RESIGN_EVERY_S:
            publisher.refresh()
            refreshed = time.monotonic()
        stop.wait(POLL_S)


class Publisher:
    """One run's way from parameters to served weights.

    Args:
        run_dir: holds keys/publisher.key, keys/roles.json, initial/, checkpoints/params/.
        spec: its resolved spec.
        log: told of each version.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, log: logging.Logger) -> None:
        self._spec, self._log = spec, log
        self._initial = initial_model(run_dir)
        self._params, self._weights = params_folder(run_dir), weights_folder(run_dir)
        self._store = run_dir / "store" / "origin"
        self._key = SigningKey.load(run_dir / "keys" / "publisher.key")
        roles = run_dir / "keys" / "roles.json"
        try:
            self._roles = read_bounded(roles, MAX_ROLES_BYTES)
        except OSError as error:
            raise UserError(
                f"cannot read the run's roles: {error.strerror}",
                place=str(roles),
                remedy="`runspec apply` makes it anew",
            ) from error
        clear_unfinished(self._weights, log)
        self._served: set[int] = set()

    def publish_new(self) -> list[int]:
        """Publishes what lies in checkpoints/params and is not served yet; returns the versions."""
        new = [v for v in versions_in(self._params) if v not in self._served]
        for version in new:
            self._publish(version)
        if new:
            self._clean_up()
        return new

    def refresh(self) -> None:
        """Signs latest.json again, so that it does not expire while no version comes."""
        if self._served:
            refresh_latest(self._store, run=self._spec.name, key=self._key)

    def _publish(self, version: int) -> None:
        start = time.monotonic()
        directory = self._weights / f"v{version}"
        if not directory.exists():
            export_checkpoint(
                self._params / f"v{version}" / PARAMS_NAME,
                directory,
                model_dir=self._initial,
                dtype=self._spec.broadcast.dtype,
            )
        exported = time.monotonic()
        digest = publish(
            self._store,
            directory,
            run=self._spec.name,
            version=version,
            key=self._key,
            roles=self._roles,
            chunk_bytes=self._spec.broadcast.chunk_bytes,
        )
        self._served.add(version)
        self._log.info(
            "version %d published as %s: exported in %.2f s, published in %.2f s",
            version,
            digest[:16],
            exported - start,
            time.monotonic() - exported,
        )

    def _clean_up(self) -> None:
        """Keeps the newest parameters, and the newest `keep_versions` weights."""
        for version in versions_in(self._params)[:-1]:
            if version in self._served:
                _remove(self._params / f"v{version}")
        for version in versions_in(self._weights)[: -self._spec.broadcast.keep_versions]:
            _remove(self._weights / f"v{version}")
        prune(self._store, run=self._spec.name, keep_versions=self._spec.broadcast.keep_versions)


def _remove(directory: Path) -> None:
    # Renamed first, so that a removal cut short leaves nothing that looks like a version.
    doomed = directory.with_name(f".tmp-removed-{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    # A learner that starts meanwhile clears unfinished things out of the same folder.
    shutil.rmtree(doomed, ignore_errors=True)
