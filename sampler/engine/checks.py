"""Checks after a load: the workers' comparison of weights, and the probe. Errors name the tensor.

The probe compares the engine's log-probs of some tokens with the learner's. It covers what cannot
be read back: tensors in packed copies, stale caches, a wrong configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from sampler.engine.requests import LoadReport

PROBE_FILE = "probe.json"
MAX_PROBE_BYTES = 4 * 1024 * 1024
PROBE_LIMITS = {"float32": 1e-3, "bfloat16": 0.05, "fp8": 0.3}
"""Largest mean |difference| by the engine's quantisation or dtype. Honest loads measure 1e-6 and
.009; fp8 was not measured in vLLM: rounding matrices and their inputs to e4m3 in torch shows .1."""
_REMEDY = "restart the worker; if it happens again, report it with vLLM's version"


@dataclass(frozen=True)
class ProbeSequence:
    """Tokens, and the log-probs that the learner computed for them from the published bits."""

    tokens: list[int]
    logprobs: np.ndarray
    """f32 [len(tokens) - 1]: of token i + 1 given the tokens up to i, at temperature 1."""


def read_probe(weights_dir: Path) -> list[ProbeSequence]:
    """Read `probe.json` of a weights directory.

    Raises:
        UserError: it is missing, malformed or empty.
    """
    path = weights_dir / PROBE_FILE
    try:
        payload = parse_object(read_bounded(path, MAX_PROBE_BYTES), max_bytes=MAX_PROBE_BYTES)
        probe = []
        for entry in payload["sequences"]:
            tokens = [int(token) for token in entry["tokens"]]
            logprobs = np.asarray(entry["logprobs"], dtype=np.float32)
            shape = logprobs.shape
            if len(tokens) < 2 or shape != (len(tokens) - 1,) or not np.isfinite(logprobs).all():
                raise ValueError(f"{len(tokens)} tokens with log-probs of shape {shape}")
            probe.append(ProbeSequence(tokens, logprobs))
        if not probe:
            raise ValueError("no sequences")
    except (OSError, MalformedJson, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"cannot read the probe: {error}",
            place=str(path),
            remedy="publish the version with the learner's probe.json",
        ) from error
    return probe


def merge(replies: Sequence[Mapping[str, Any]]) -> LoadReport:
    """Return the first worker's report with the differences of all. Reports arrive as dicts."""
    reports = [LoadReport(**reply) for reply in replies]
    different = sorted({name for report in reports for name in report.different})
    return LoadReport(reports[0].compared, reports[0].repacked, different)


def require_same_bytes(report: LoadReport, weights_dir: Path, version: int) -> None:
    """Refuse a load after which a tensor differs from the files.

    Raises:
        UserError: a tensor differs, or the engine has no parameter for it.
    """
    if report.different:
        raise UserError(
            f"version {version}: after the load the engine holds other bytes than the files, "
            f"or none, in {len(report.different)} tensors: {', '.join(report.different[:5])}",
            place=str(weights_dir),
            remedy=_REMEDY,
        )


def require_same_logprobs(
    probe: Sequence[ProbeSequence],
    logprobs: Iterable[Sequence[np.ndarray]],
    report: LoadReport,
    *,
    precision: str,
    weights_dir: Path,
    version: int,
) -> None:
    """Refuse a load under which the engine's log-probs of the probe differ from the learner's.

    Args:
        probe: of the version.
        logprobs: of each data-parallel rank, shaped as the probe's.
        report: names the tensors that could not be read back.
        precision: key of `PROBE_LIMITS`.
        weights_dir, version: for the message.

    Raises:
        UserError: they differ by more than the precision explains.
    """
    limit = PROBE_LIMITS[precision]
    # Tensors of different layers as one: `*.q_proj.weight`.
    kinds = dict.fromkeys("*." + ".".join(name.split(".")[-2:]) for name in report.repacked)
    for found in logprobs:
        difference = probe_difference(probe, found)
        if not difference <= limit:  # also refuses NaN
            raise UserError(
                f"version {version}: the engine's log-probs differ from the learner's by "
                f"{difference:.2e} on average (limit {limit:.0e}); perhaps stale: "
                f"{', '.join(kinds) or 'nothing that could not be read back'}",
                place=str(weights_dir / PROBE_FILE),
                remedy=_REMEDY,
            )


def probe_difference(probe: Sequence[ProbeSequence], logprobs: Sequence[np.ndarray]) -> float:
    """Return the mean |engine's log-prob - learner's| over all tokens of the probe; NaN if one is
    NaN.

    Args:
        probe: of the version.
        logprobs: the engine's, shaped as the probe's.
    """
    learner = np.concatenate([sequence.logprobs for sequence in probe])
    return float(np.abs(learner - np.concatenate(list(logprobs))).mean())
