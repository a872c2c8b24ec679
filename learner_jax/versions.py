"""A version's parameters are written once; a step trained again must give the same bits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.config import ModelConfig
from bridge.tensors import tree_digests
from learner_jax.checkpoint import load_params, save_params
from learner_jax.layout import TENSORS_FILE, params_folder, versions_in, weights_folder
from learner_jax.leaves import HostLeaves
from runspec.common.errors import UserError
from runspec.common.process import RunStopped
from runspec.spec.schema import RunSpec


class VersionWriter:
    """Writes checkpoints/params/v<N> for each new version of a run.

    A version number is published once. After a restart the steps since the last full state are
    trained again: their versions are not written again, but must come out with the same bits.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        config: the model's shape.
        probe: from `learner_jax.probe.build_probe`.
        log: told of what is compared.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: RunSpec,
        config: ModelConfig,
        probe: Callable[[Any], dict[str, Any]],
        log: logging.Logger,
    ) -> None:
        self._params, self._weights = params_folder(run_dir), weights_folder(run_dir)
        self._config, self._dtype = config, spec.broadcast.dtype
        self._probe, self._log = probe, log
        written = [*versions_in(self._params), *versions_in(self._weights)]
        self.newest = max(written, default=-1)
        """The newest version that was ever written; -1 for none."""

    def write(self, version: int, published: Any) -> None:
        """Writes a new version, or compares one that was written before.

        Args:
            version: its number.
            published: its parameters in `broadcast.dtype`.

        Raises:
            RunStopped: the version exists with other bits.
        """
        if version > self.newest:
            save_params(self._params, version, published, self._probe(published))
            self.newest = version
            return
        digests = self._digests_before(version, published)
        if digests is None:
            self._log.info("version %d is published and pruned: nothing to compare with", version)
            return
        now = tree_digests(HostLeaves(published), self._config, self._dtype)
        differing = [name for name, digest in now.items() if digests.get(name) != digest]
        if differing:
            raise RunStopped(
                f"version {version}, trained again, differs from the published one in "
                f"{len(differing)} of {len(now)} tensors, the first is {differing[0]}",
                place=str(self._weights / f"v{version}"),
                remedy="train on the mesh, devices and software that the run began with; to go on "
                "from here all the same, start a run of another name from these weights",
            )
        self._log.info("version %d, trained again, has the published bits", version)

    def _digests_before(self, version: int, like: Any) -> dict[str, str] | None:
        """Digests by Hugging Face name of the version as it was written; None where it is gone."""
        try:
            records = json.loads((self._weights / f"v{version}" / TENSORS_FILE).read_bytes())
            return {name: record["blake3"] for name, record in records["tensors"].items()}
        except FileNotFoundError:
            pass  # not exported yet, or pruned
        try:
            before = load_params(self._params, version, like)
        except UserError:
            if (self._params / f"v{version}").exists():
                raise
            return None  # the publisher removed it while we looked
        return tree_digests(HostLeaves(before), self._config, self._dtype)
