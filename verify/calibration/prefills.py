"""Recomputing the submissions of a run directory with the engine that its spec names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from runspec.core.spec.schema import RunSpec, SamplerPool
from verify.calibration.honest import Taken, dishonest, rollouts_of
from verify.calibration.measure import PAIR
from verify.calibration.spoilt import Change, spoil
from verify.calibration.weights import Version, engine_over, place
from verify.plugins import PrefillEngine
from verify.recompute import prefill_request, recompute
from verify.toploc import MalformedProof
from verify.truncation import Truncation

AT_ONCE = 8
"""Submissions of one version that are prefilled together."""
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Prefills:
    """Of one pool of a run."""

    spec: RunSpec
    pool: SamplerPool
    versions: Mapping[int, Version]
    margin: float
    """tau: how far logits may differ at the edge of top-k and top-p."""
    log: logging.Logger

    def of(
        self, taken: Sequence[Taken], cache: Path, change: Change | None = None
    ) -> Iterator[tuple[Taken, list[PAIR]]]:
        """Recomputes submissions, which come in the order of their versions.

        Args:
            taken: what to recompute.
            cache: a folder to be made; the versions lie in it while the engine is at work.
            change: done to the weights of every version; None for the right ones.

        Raises:
            UserError: files that cannot be used, or proofs that no honest worker sends.
        """
        for number in sorted({each.lease.version for each in taken}):
            folder = place(self.versions[number], cache)
            if change is not None:
                spoil(folder, change)
        with closing(engine_over(self.spec, cache)) as engine:
            for version, of_version in groupby(taken, key=lambda each: each.lease.version):
                group = list(of_version)
                for start in range(0, len(group), AT_ONCE):
                    yield from self._together(engine, group[start : start + AT_ONCE])
                self.log.info("version %d: %d submissions", version, len(group))

    def _together(
        self, engine: PrefillEngine, some: Sequence[Taken]
    ) -> Iterator[tuple[Taken, list[PAIR]]]:
        """Submissions of one version."""
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
