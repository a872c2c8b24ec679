"""Versions of a small model as the bridge writes them, each a few elements from the last."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bridge.delta import write_delta
from bridge.safetensors_io import write_safetensors
from bridge.tensors import model_digest, record, tensor_bytes
from broadcast.store import publish
from runspec.core.canonical import canonical_json, digest_bytes

from .conftest import CHUNK_BYTES, Run

TENSOR_ELEMENTS = 2500
"""Of each of the two tensors: float32, 20 chunks together."""


class ModelVersions:
    """Trains, writes and publishes.

    Args:
        run: to publish in.
        files: the weights files, one tensor in each, or one file with both.
    """

    def __init__(self, run: Run, *, files: tuple[str, ...] = ("model.safetensors",)) -> None:
        self._run = run
        self._files = files
        self._random = np.random.default_rng(0)
        self._tensors = {
            name: self._random.standard_normal(TENSOR_ELEMENTS, np.float32) for name in ("a", "b")
        }

    def directory(self, version: int) -> Path:
        return self._run.folder / "weights" / f"v{version}"

    def files(self, version: int) -> dict[str, bytes]:
        """What a fetched version must consist of, byte for byte."""
        return {
            path.name: path.read_bytes()
            for path in self.directory(version).iterdir()
            if path.is_file() and path.name != "tensors.json"
        }

    def weights_bytes(self, version: int) -> int:
        return sum(len(self.files(version)[name]) for name in self._files)

    def delta_bytes(self, version: int) -> int:
        folder = self.directory(version) / "delta"
        return sum(path.stat().st_size for path in folder.iterdir())

    def publish(
        self,
        version: int,
        *,
        base: int | None = None,
        anchor: bool = False,
        delta_from: int | None = None,
    ) -> str:
        """Writes a version and publishes it, as an anchor too where there is no base.

        Args:
            version: its number.
            base: the version that it has a delta from.
            anchor: whether its files are published beside the delta.
            delta_from: the version that the delta is really from, where that is not `base`.
        """
        directory = self.write(version)
        if base is not None:
            origin = self.directory(base if delta_from is None else delta_from)
            write_delta(origin, directory, directory / "delta")
        return publish(
            self._run.store,
            directory,
            run=self._run.name,
            version=version,
            key=self._run.key,
            roles=self._run.roles,
            chunk_bytes=CHUNK_BYTES,
            base=base,
            whole=anchor or base is None,
        )

    def write(self, version: int) -> Path:
        """Changes 1 % of the elements and writes what there is then."""
        for tensor in self._tensors.values():
            changed = self._random.choice(TENSOR_ELEMENTS, TENSOR_ELEMENTS // 100, replace=False)
            tensor[changed] += np.float32(0.5)
        directory = self.directory(version)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text('{"model_type": "qwen2"}')
        (directory / "probe.json").write_text(f'{{"version": {version}}}')
        shares = [list(self._tensors)] if len(self._files) == 1 else [["a"], ["b"]]
        for name, tensors in zip(self._files, shares, strict=True):
            shapes = dict.fromkeys(tensors, (TENSOR_ELEMENTS,))
            arrays = [self._tensors[tensor] for tensor in tensors]
            write_safetensors(directory / name, shapes, np.dtype(np.float32), arrays)
        if len(self._files) > 1:
            weight_map = dict(zip(self._tensors, self._files, strict=True))
            index = directory / "model.safetensors.index.json"
            index.write_bytes(canonical_json({"metadata": {}, "weight_map": weight_map}))
        records = {
            name: record(array.dtype, array.shape, digest_bytes(tensor_bytes(array)))
            for name, array in self._tensors.items()
        }
        said = {
            "model_digest": model_digest(records),
            "tensors": records,
            "files": sorted(self._files),
        }
        (directory / "tensors.json").write_bytes(canonical_json(said))
        return directory
