"""Recomputes the submissions of a run directory with the engine that its spec names.

The weights of each version are the right ones, or perturbed: with noise on each weight, or rounded
to int8. The submissions that limits reject under perturbed weights show what the limits detect.
Perturbed weights are copies, because the files that they are made from may be links to a run's own.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from runspec.core.canonical import parse_object
from runspec.core.errors import UserError
from runspec.core.files import atomic_file
from runspec.core.spec.schema import RunSpec, SamplerPool
from verify.calibration.honest_run import Taken, Version, dishonest, engine_over, place, rollouts_of
from verify.calibration.measure import PAIR
from verify.plugins import PrefillEngine
from verify.recompute import prefill_request, recompute
from verify.toploc.codec import MalformedProof
from verify.toploc.selection import round_to_bf16
from verify.truncation import Truncation

AT_ONCE = 8
"""Submissions of one version that are prefilled together."""
_DEADLINE_S = 600.0
_MAX_HEADER_BYTES = 64 * 1024 * 1024
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Returns changed weights, f32 of the same shape."""


@dataclass(frozen=True)
class Prefills:
    """Recomputes submissions of one pool of a run."""

    spec: RunSpec
    pool: SamplerPool
    versions: Mapping[int, Version]
    margin: float
    """tau: how far logits may differ at the edge of top-k and top-p."""
    log: logging.Logger

    def of(
        self, taken: Sequence[Taken], cache: Path, change: Change | None = None
    ) -> Iterator[tuple[Taken, list[PAIR]]]:
        """Recompute submissions, which are in the order of their versions.

        Args:
            taken: what to recompute.
            cache: a folder to be made, which has the versions while the engine is in use.
            change: perturbs the weights of every version; None: the right weights.

        Raises:
            UserError: files cannot be used, or no honest worker sends such proofs.
        """
        for number in sorted({each.lease.version for each in taken}):
            folder = place(self.versions[number], cache)
            if change is not None:
                perturb(folder, change)
        with closing(engine_over(self.spec, cache)) as engine:
            for version, of_version in groupby(taken, key=lambda each: each.lease.version):
                group = list(of_version)
                for start in range(0, len(group), AT_ONCE):
                    yield from self._together(engine, group[start : start + AT_ONCE])
                self.log.info("version %d: %d submissions", version, len(group))

    def _together(
        self, engine: PrefillEngine, some: Sequence[Taken]
    ) -> Iterator[tuple[Taken, list[PAIR]]]:
        """Recompute submissions of one version."""
        lease, sampling = some[0].lease, self.pool.sampling
        engine.ensure_version(lease.version, lease.manifest_digest, deadline_s=_DEADLINE_S)
        rows = [list(rollouts_of(each, self.spec)) for each in some]
        requests = [
            prefill_request(row, each.lease, seeded=sampling.seeded, end_token=None)
            for each, its in zip(some, rows, strict=True)
            for row in its
        ]
        rule = Truncation(sampling.top_p, sampling.top_k, margin=self.margin)
        found = iter(
            recompute(
                engine,
                lease.version,
                requests,
                temperature=sampling.temperature,
                truncation=rule if rule.cuts else None,
            )
        )
        for each, its in zip(some, rows, strict=True):
            pairs = [(row, next(found)) for row in its]
            for _, recomputed in pairs:
                if isinstance(recomputed.proof, MalformedProof):
                    raise dishonest(each, recomputed.proof)
            if pairs:
                yield each, pairs


def noise(share: float) -> Change:
    """Return a change that multiplies every weight by 1 + share z, z standard normal."""

    def change(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.standard_normal(weights.shape, np.float32)
        return weights * (1.0 + np.float32(share) * drawn)

    return change


def int8(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round matrices to 255 levels of each row's largest weight; leave vectors as they are."""
    if weights.ndim < 2:
        return weights
    scale = np.abs(weights).max(axis=-1, keepdims=True) / 127.0
    return np.round(weights / np.where(scale > 0, scale, 1.0)) * scale


def perturb(folder: Path, change: Change) -> None:
    """Change the weights of every safetensors file of a folder, and keep their types.

    Raises:
        UserError: there is no such file, or a file has another form.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("no safetensors file is there", place=str(folder))
    for path in files:
        try:
            _rewrite(path, change)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"cannot be perturbed: {error}", place=str(path)) from error


def _rewrite(path: Path, change: Change) -> None:
    data = np.memmap(path, np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    head = data[: 8 + length].tobytes()
    header = parse_object(head[8:].rstrip(), max_bytes=_MAX_HEADER_BYTES)
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    # A new file replaces the link, so the file that it pointed to keeps its bytes.
    with atomic_file(path) as file:
        file.write(head)
        for name, info in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = info["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            file.write(_changed(raw, info, change, rng))


def _changed(raw: np.ndarray, info: dict, change: Change, rng: np.random.Generator) -> bytes:
    if info["dtype"] == "F32":
        weights = raw.view("<f4").reshape(info["shape"])
        return change(weights, rng).astype("<f4").tobytes()
    if info["dtype"] != "BF16":
        raise ValueError(f"tensors of {info['dtype']}: versions are published in F32 or BF16")
    weights = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info["shape"])
    return round_to_bf16(change(weights, rng)).astype("<u2").tobytes()
