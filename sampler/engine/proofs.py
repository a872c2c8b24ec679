"""TOPLOC proofs over what the engine selected."""

from __future__ import annotations

from collections.abc import Sequence

from sampler.engine.requests import Sampled
from verify.toploc import build_proofs_of


def prove(sampled: Sequence[Sampled]) -> list[list[bytes]]:
    """For each rollout a proof for every 32 output tokens begun, the first token included.

    Row t of a rollout is the state that produced output token t: row P - 1 + t of the sequence,
    the last prompt position for t = 0 (DESIGN, "Proof").

    Raises:
        ValueError: an activation is not finite.
    """
    return build_proofs_of([result.selection for result in sampled])
