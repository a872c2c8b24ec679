"""After a load: what every worker found, judged. A mismatch names the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.errors import UserError
from sampler.engine.probe import FILE_NAME as PROBE_FILE
from sampler.engine.probe import LIMITS as PROBE_LIMITS
from sampler.engine.probe import ProbeSequence, probe_difference
from sampler.engine.requests import LoadReport

_REMEDY = "restart the worker; if it happens again, report it with vLLM's version"


def merge(replies: Sequence[Mapping[str, Any]]) -> LoadReport:
    """The first worker's report with the differences of all; between processes it is a dict."""
    reports = [LoadReport(**reply) for reply in replies]
    different = sorted({name for report in reports for name in report.different})
    return LoadReport(reports[0].compared, reports[0].repacked, different)


def require_same_bytes(report: LoadReport, weights_dir: Path, version: int) -> None:
    """Holds what was read back against the files.

    Raises:
        UserError: a tensor differs, or has no place in the engine.
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
    """Holds the engine's log-probs of the probe against the learner's.

    Args:
        probe: the version's.
        logprobs: of each data-parallel rank, shaped as the probe's.
        report: names what could not be read back.
        precision: key of `probe.LIMITS`.
        weights_dir, version: for the message.

    Raises:
        UserError: they differ by more than the precision explains.
    """
    limit = PROBE_LIMITS[precision]
    for found in logprobs:
        difference = probe_difference(probe, found)
        if not difference <= limit:  # NaN is no agreement
            raise UserError(
                f"version {version}: the engine's log-probs differ from the learner's by "
                f"{difference:.2e} on average (limit {limit:.0e}); perhaps stale: "
                f"{_kinds(report.repacked) or 'nothing that could not be read back'}",
                place=str(weights_dir / PROBE_FILE),
                remedy=_REMEDY,
            )


def _kinds(names: Sequence[str]) -> str:
    """Names of tensors with those of different layers as one: `*.q_proj.weight`."""
    return ", ".join(dict.fromkeys("*." + ".".join(name.split(".")[-2:]) for name in names))
