"""The publisher: turns each version's Orbax parameters into signed, served weights.

checkpoints/params/v<N> -> (bridge) weights/v<N> -> (broadcast) store/origin. Versions go out in
order. Every act may be repeated, so a publisher killed anywhere simply starts again. No JAX here.

With `format: delta` a version goes out as what changed since its base, the newest published one
whose weights are still here. It goes out whole too where it is an anchor (every `anchor_every`
versions), and whole alone where no base is sound or the delta is not smaller.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bridge.conversion import export_checkpoint
from bridge.delta import DamagedWeights, write_delta
from bridge.model_files import publish_problems
from bridge.safetensors_io import damage, recorded_digest
from bridge.states import keep_manifest
from broadcast.layout import data_run, manifest_name, stored_versions
from broadcast.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from broadcast.manifest import WeightsManifest, open_manifest
from broadcast.store import DELTA_NAME, prune, publish, refresh_latest
from runspec.core import run_files
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, remove_leftovers
from runspec.core.http_server import counter, gauge
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import RESIGN_EVERY_S
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature, SigningKey

POLL_S = 0.03
OBJECTS_POLL_S = 1.0
"""In an object store, where each look is a request that costs money."""
_MAX_THREADS = 8
"""That compare versions: each may hold 200 MB where everything changed."""


def publish_versions(publisher: Publisher, stop: threading.Event) -> None:
    """Publishes the versions of a run as they appear, until `stop` is set."""
    refreshed = -RESIGN_EVERY_S
    while not stop.is_set():
        publisher.publish_new()
        if time.monotonic() - refreshed >= RESIGN_EVERY_S:
            publisher.refresh()
            refreshed = time.monotonic()
        stop.wait(publisher.poll_s)


class Publisher:
    """One run's way from parameters to served weights.

    Args:
        run_dir: holds keys/publisher.key, keys/roles.json, initial/, checkpoints/params/.
        spec: its resolved spec.
        log: told of each version.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, log: logging.Logger) -> None:
        self._spec, self._log = spec, log
        self._initial = run_files.initial_model(run_dir)
        self._params = run_files.params_folder(run_dir, spec)
        self._weights = run_files.weights_folder(run_dir)
        self.poll_s = POLL_S if isinstance(self._params, Path) else OBJECTS_POLL_S
        """Seconds between two looks for new parameters."""
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
        self.signing: dict[str, Any] = {"key": self._key, "roles": self._roles}
        self.signing["chunk_bytes"] = spec.broadcast.chunk_bytes
        run_files.clear_unfinished(self._weights, log)
        self._served: set[int] = set()
        self._runs = [spec.name]  # whose latest.json is signed again
        if publish_problems(spec, self._store, self.signing, log):
            self._runs.append(data_run(spec.name))
        self.figures = Published(self._served)

    def publish_new(self) -> list[int]:
        """Publishes what lies in checkpoints/params and is not served yet; returns the versions."""
        new = [v for v in run_files.versions_in(self._params) if v not in self._served]
        for version in new:
            self._publish(version)
            keep_manifest(self._store, self._spec, version)
        if new:
            self._clean_up()
        return new

    def refresh(self) -> None:
        """Signs latest.json again, so that it does not expire while no version comes."""
        if self._served:
            for run in self._runs:
                refresh_latest(self._store, run=run, key=self._key, roles=self._roles)

    def _publish(self, version: int) -> None:
        times = [time.monotonic()]
        directory = self._weights / f"v{version}"
        found = directory.exists()
        if not found:
            self._export(version, directory)
        stored = self._stored(version)
        if stored is not None and stored.model_digest == recorded_digest(directory):
            self._served.add(version)
            self.refresh()  # it may have expired, and mending a whole version takes a while
            self._mend(stored, directory)
            return
        if found and (wrong := damage(directory)):
            self._log.warning("%s: %s; it is exported again", directory, wrong)
            run_files.remove_entry(directory)
            self._export(version, directory)
        times.append(time.monotonic())
        base = self._write_delta(version, directory)
        supervised = self._spec.supervised
        number = version if supervised is None else version // supervised.publish_every
        whole = base is None or number % self._spec.broadcast.anchor_every == 0
        times.append(time.monotonic())
        digest = self._put(version, directory, base=base, whole=whole)
        self._served.add(version)
        times.append(time.monotonic())
        spent = [b - a for a, b in pairwise(times)]
        if (manifest := self._stored(version)) is not None:
            self.figures.published(manifest, dict(zip(STAGES, spent, strict=True)))
        self._log.info(
            "version %d published %s as %s: exported in %.2f s, compared in %.2f s, "
            "published in %.2f s",
            version,
            "whole" if whole else f"as a delta of version {base}",
            *(digest[:16], *spent),
        )

    def _export(self, version: int, directory: Path) -> None:
        export_checkpoint(
            self._params / f"v{version}" / run_files.PARAMS_NAME,
            directory,
            model_dir=self._initial,
            dtype=self._spec.broadcast.dtype,
        )

    def _stored(
        self, version: int, *, publishers: Collection[str] | None = None
    ) -> WeightsManifest | None:
        """Return the stored manifest of a version, signed by one of `publishers` (None: anyone)."""
        path = self._store / manifest_name(self._spec.name, version)
        try:
            data = read_bounded(path, MAX_MANIFEST_BYTES)
            return open_manifest(data, run=self._spec.name, publishers=publishers)
        except (FileNotFoundError, BadSignature):
            return None  # what is not as it should be, `publish` names

    def _mend(self, stored: WeightsManifest, directory: Path) -> None:
        """Publishes a version again as it was: its chunks are not synced, and a power cut may have
        cost some of them. A delta from another base would make another version of it."""
        remove_leftovers(directory)
        try:
            self._put(stored.version, directory, base=stored.base, whole=stored.is_anchor)
        except UserError as error:  # as where its delta or its base is gone: it may still be whole
            self._log.warning("version %d stays as it is in the store: %s", stored.version, error)
            return
        self._log.info("version %d is published already", stored.version)

    def _put(self, version: int, directory: Path, *, base: int | None, whole: bool) -> str:
        return publish(
            self._store,
            directory,
            run=self._spec.name,
            version=version,
            **self.signing,
            base=base,
            whole=whole,
        )

    def _write_delta(self, version: int, directory: Path) -> int | None:
        """Writes what changed beside the weights, and returns since which version; None where
        nothing is to be compared with, or the delta is not smaller."""
        remove_leftovers(directory)
        folder = directory / DELTA_NAME
        if folder.exists():  # of a publisher that was killed, perhaps from another base
            run_files.remove_entry(folder)
        base = self._base(version)
        if base is None:
            return None
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        try:
            summary = write_delta(self._weights / f"v{base}", directory, folder, threads=threads)
        except DamagedWeights:
            run_files.remove_entry(directory)  # the next publisher exports it again
            raise
        except UserError as error:  # the base is damaged, or lies otherwise
            self._log.warning("version %d goes out whole: %s", version, error)
            return None
        smaller = summary.delta_bytes < summary.weights_bytes
        self._log.info(
            "version %d: %.3g %% of the elements changed since version %d: "
            "a delta of %d bytes, of %d%s",
            *(version, 100 * summary.changed / summary.elements, base),
            *(summary.delta_bytes, summary.weights_bytes),
            "" if smaller else "; it goes out whole",
        )
        if smaller:
            return base
        run_files.remove_entry(folder)
        return None

    def _base(self, version: int) -> int | None:
        """The newest older version that this key published and whose weights are still here."""
        if self._spec.broadcast.format == "full":
            return None
        here = set(run_files.versions_in(self._weights))
        older = [v for v in stored_versions(self._store, self._spec.name) if v < version]
        # What a revoked key signed nobody believes: it is nothing to start from.
        mine = {self._key.public_hex}
        believed = (v for v in reversed(older) if v in here and self._stored(v, publishers=mine))
        return next(believed, None)

    def _clean_up(self) -> None:
        """Keeps the newest parameters, and the newest `keep_versions` weights."""
        for version in run_files.versions_in(self._params)[:-1]:
            if version in self._served:
                run_files.remove_entry(self._params / f"v{version}")
        for version in run_files.versions_in(self._weights)[: -self._spec.broadcast.keep_versions]:
            run_files.remove_entry(self._weights / f"v{version}")
        prune(self._store, run=self._spec.name, keep_versions=self._spec.broadcast.keep_versions)


STAGES = ("export", "compare", "publish")


class Published(Collector):
    """Versions published, their bytes, and where the time went.

    Args:
        served: versions in the store; the publisher adds to it.
    """

    def __init__(self, served: Collection[int]) -> None:
        self._served = served
        self._versions: Counter[str] = Counter({"whole": 0, "delta": 0})
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._bytes = 0

    def published(self, manifest: WeightsManifest, seconds: Mapping[str, float]) -> None:
        """Count a version that went out.

        Args:
            manifest: of the version.
            seconds: spent on it, by each of `STAGES`.
        """
        self._versions["whole" if manifest.is_anchor else "delta"] += 1
        files = [*manifest.objects.values(), *manifest.delta.values()]
        self._bytes += sum(each.size for each in files)
        for stage, spent in seconds.items():
            self._seconds[stage] += spent

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        newest = max(list(self._served), default=None)
        yield gauge("publisher_newest_version", "Newest version in the store.", newest)
        text, versions = "Versions published, by what went out.", dict(self._versions)
        yield counter("publisher_versions", text, versions, "format")
        text, seconds = "Seconds spent on versions, by stage.", dict(self._seconds)
        yield counter("publisher_stage_seconds", text, seconds, "stage")
        yield counter("publisher_published_bytes", "Bytes of versions published.", self._bytes)
