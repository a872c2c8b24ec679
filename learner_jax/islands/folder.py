"""The folder of an island without the run directory: made before the learner starts, and filled
with the batch of each step as it is trained."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from learner_jax.feed import Reader
from learner_jax.island_link import IslandLink
from learner_jax.islands.mirror import Mirror, fetch_initial
from learner_jax.learner_run import LearnerRun
from learner_jax.manifests import POLL_S, StopSignal, own_share
from runspec.core.keys import SigningKey
from runspec.core.spec.resolved import load_resolved
from verify.formats.batch import BatchManifest
from verify.island_client import IslandClient

INITIAL_S = 3600.0
"""Seconds that a first version may take to be published, and as many to arrive."""


def prepare_folder(folder: Path, link: IslandLink, log: logging.Logger) -> None:
    """Bring roles and starting model, where the island is not the trunk's.

    Args:
        folder: the island's own, with the run's spec.json.
        link: of the island.
        log: told of it.

    Raises:
        UserError: the coordinator or the servers of the weights do not answer in time.
    """
    if not link.weights:
        return
    key, root = SigningKey.load(link.key), link.root_public_key
    assert root is not None, "an island without the run directory is told the root key"
    spec = load_resolved(folder)
    Mirror(folder, spec, IslandClient(link.coordinator, spec.name, key, root_public_key=root), root)
    log.info("island %s: waiting for a version of the model", link.name)
    compared = spec.supervised is None and spec.grpo.kl.coef > 0
    fetch_initial(
        *(folder, link.weights),
        run=spec.name,
        root_public_key=root,
        compared=compared,
        deadline_s=INITIAL_S,
    )


class _Told:
    """Another's stop signal, for a thread that may only look at it."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def is_set(self) -> bool:
        return self._stop.is_set()

    def wait(self, timeout: float) -> bool:
        time.sleep(timeout)
        return self.is_set()


class MirroredReader:
    """A reader of batches whose files the coordinator sends.

    While a step is trained, the manifest of the next one is brought.

    Args:
        run: of an island without the run directory.
        reader: reads the files, once they are here.
    """

    def __init__(self, run: LearnerRun, reader: Reader[Any]) -> None:
        link = run.link
        assert link is not None, "an island"
        key, root = SigningKey.load(link.key), run.root_public_key()
        client = IslandClient(link.coordinator, run.spec.name, key, root_public_key=root)
        self._mirror = Mirror(run.folder, run.spec, client, root)
        self._reader, self._island, self._steps = reader, link.name, run.spec.steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        self._ahead: Future[bool] | None = None

    def wait(self, step: int, stop: StopSignal, log: logging.Logger) -> Any | None:
        """Wait for the manifest of a step, and bring the rollouts of the island's share.

        Raises:
            UserError: the coordinator does not answer, or a file is not what the manifest names.
        """
        while self._ahead is not None and not self._ahead.done():
            if stop.wait(POLL_S):
                return None
        if not self._mirror.bring_manifest(step, stop):
            return None
        if step + 1 < self._steps:
            bring = self._mirror.bring_manifest
            self._ahead = self._thread.submit(bring, step + 1, _Told(stop))
        manifest = self._reader.wait(step, stop, log)
        if isinstance(manifest, BatchManifest):
            groups = manifest.groups[own_share(manifest, self._island)]
            self._mirror.bring_rollouts(step, groups)
        return manifest

    def read(self, manifest: Any) -> Any:
        return self._reader.read(manifest)


def reader_of(run: LearnerRun, reader: Reader[Any]) -> Reader[Any]:
    """Return a reader that waits for the run's files wherever they come from."""
    return reader if run.trunk else MirroredReader(run, reader)
