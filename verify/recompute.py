"""Recomputes a rollout for the validator: rewards, log-probs, choices, activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from runspec.core.errors import UserError
from verify.formats.lease import Assignment, Lease
from verify.formats.submission import Rollout
from verify.noise import noise_key
from verify.plugins import (
    Graded,
    GradeItem,
    GraderFault,
    PrefillEngine,
    PrefillInput,
    PrefillOutput,
    TaskSet,
)
from verify.toploc.codec import MalformedProof
from verify.toploc.statistics import ChunkStatistics, verify_proofs_batch
from verify.truncation import Choices, Truncation

PORTION_TOKENS = 1 << 16
"""Tokens whose hidden states are in memory at once (671 MB at a hidden size of 5120)."""
_BF16_EXPONENT = np.uint16(0x7F80)
"""Mask of the exponent; all bits are ones in an infinity or a NaN."""


class PrefillNotFinite(UserError):
    """Raised if the prefill gave a NaN or an infinity.

    The weights or the device are at fault, or the model cannot process the tokens.
    """


@dataclass(frozen=True)
class Recomputed:
    """One rollout under the policy version that the lease names."""

    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) at the output tokens, after top-k / top-p."""
    seeded_gap: np.ndarray | None
    """f32 [n]: how far the token lay below the recomputed maximum; None where not seeded."""
    proof: list[ChunkStatistics] | MalformedProof
    """Statistics of each chunk, or why the proofs are malformed."""
    choices: Choices | None = None
    """Numbers of each output token; None if seeded."""


@dataclass(frozen=True)
class PrefillRequest:
    """One rollout to recompute, with the proofs of its submission."""

    input: PrefillInput
    proofs: list[bytes]


def prefill_request(
    rollout: Rollout, lease: Lease, *, seeded: bool, end_token: int | None
) -> PrefillRequest:
    """Return the request of a rollout: for gaps if it is seeded, else for distributions.

    Without an end token it does not ask for distributions.
    """
    key = noise_key(lease.seed, rollout.group, rollout.sample) if seeded else None
    end = None if seeded else end_token
    return PrefillRequest(
        PrefillInput(rollout.prompt_tokens, rollout.output_tokens, key, end), rollout.proofs
    )


def recompute(
    engine: PrefillEngine,
    version: int,
    requests: Sequence[PrefillRequest],
    *,
    temperature: float,
    truncation: Truncation | None = None,
) -> list[Recomputed]:
    """Recompute rollouts in portions, to limit the memory of hidden states.

    Raises:
        PrefillNotFinite: a number is not finite; no worker may be rejected for that.
    """
    results: list[Recomputed] = []
    for portion in _portions(requests):
        outputs = engine.prefill(
            version,
            [request.input for request in portion],
            temperature=temperature,
            truncation=truncation,
        )
        for output in outputs:
            _require_finite(output, version)
        proofs = verify_proofs_batch([o.hidden for o in outputs], [r.proofs for r in portion])
        results += [
            Recomputed(output.logprobs, output.seeded_gap, proof, output.choices)
            for output, proof in zip(outputs, proofs, strict=True)
        ]
    return results


def _require_finite(output: PrefillOutput, version: int) -> None:
    gap, choices = output.seeded_gap, output.choices
    finite = {
        "log-prob": np.isfinite(output.logprobs),
        "seeded gap": np.isfinite(gap) if gap is not None else np.True_,
        "hidden state": (output.hidden & _BF16_EXPONENT) != _BF16_EXPONENT,
    }
    if choices is not None:
        cut = {"end_least", "end_most"}  # -inf if the end token is cut
        finite |= {
            f"distribution ({name})": values < np.inf if name in cut else np.isfinite(values)
            for name, values in choices._asdict().items()
        }
    for what, good in finite.items():
        if not good.all():
            raise PrefillNotFinite(
                f"the validator's own prefill of version {version} gave a {what} that is not "
                "finite; nothing is judged by it",
                place="verify.engine",
                remedy="check the validator's device, and whether the training has diverged",
            )


def grade(
    rollouts: Sequence[Rollout], given: Sequence[Assignment], task_set: TaskSet
) -> tuple[list[Graded | None], dict[int, str]]:
    """Grade every rollout.

    Returns:
        The grades (None in groups whose grader failed), and the grader's errors by group.
    """
    items = [
        GradeItem(given[r.group].problem, given[r.group].target, r.output_tokens.tolist())
        for r in rollouts
    ]
    results = task_set.grade_all(items)
    faults: dict[int, str] = {}
    for rollout, result in zip(rollouts, results, strict=True):
        if isinstance(result, GraderFault):
            faults.setdefault(rollout.group, str(result))
    kept = [
        None if isinstance(result, GraderFault) or rollout.group in faults else result
        for rollout, result in zip(rollouts, results, strict=True)
    ]
    return kept, faults


def _portions(requests: Sequence[PrefillRequest]) -> Iterator[list[PrefillRequest]]:
    portion: list[PrefillRequest] = []
    tokens = 0
    for request in requests:
        size = len(request.input.prompt_tokens) + len(request.input.output_tokens)
        if portion and tokens + size > PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
        portion.append(request)
        tokens += size
    if portion:
        yield portion
