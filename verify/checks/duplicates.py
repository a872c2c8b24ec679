"""Finds duplicate outputs: fingerprints of runs of tokens, compared within a submission.

A run of output tokens with information - sum log p of at least I nats is sampled at a given
position with a probability of at most exp(-I), whatever came before. So an honest rollout of n
tokens shares one of M earlier runs with a probability of at most n M exp(-I). With I = 48, n =
32,768 and M = 2,000,000 that is below 1e-10. Text that the policy would write anyway (a restated
problem, a short answer) has little information, and is no run.

A few runs of each rollout are remembered, the same in a copy as in its original. A run starts where
the hash of 8 tokens is among the lowest (once, if the same 8 occur again). It ends at the multiple
of 8 tokens at which it has I nats. An edit changes only the runs that contain it. The whole output
is one more run.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from verify.checks.base import Subject, no_faults
from verify.formats.verdict import MAX_FINGERPRINTS, CheckResult

OUTPUT_NATS = 64.0
"""Outputs with less information are not compared."""
RUN_NATS = 48.0
_ANCHOR = 8
"""Number of tokens whose hash chooses a start; lengths of runs are multiples of it."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64


def fingerprints(tokens: np.ndarray, logprobs: np.ndarray) -> list[int]:
    """Return hashes of an output and of runs in it, i64, at most `MAX_FINGERPRINTS`.

    Args:
        tokens: i32 [n], the output.
        logprobs: f32 [n], finite.

    Returns:
        The hashes; none if the output has less information than `OUTPUT_NATS`.
    """
    information = np.concatenate([[0.0], -np.cumsum(np.minimum(logprobs, 0.0, dtype=np.float64))])
    if information[-1] < OUTPUT_NATS:
        return []
    found = {_hash(tokens): None}
    starts = np.arange(max(0, len(tokens) - _ANCHOR + 1))
    ends = np.searchsorted(information, information[starts] + RUN_NATS)
    lengths = -(-(ends - starts) // _ANCHOR) * _ANCHOR
    starts, lengths = (x[starts + lengths <= len(tokens)] for x in (starts, lengths))
    # Only the first start of each 8 tokens: other tokens make other runs, so 16 runs are enough. An
    # output that repeats one token would otherwise have thousands of equal runs to hash.
    _, first = np.unique(_anchors(tokens)[starts], return_index=True)
    chosen = first[: MAX_FINGERPRINTS - 1]
    for start, length in zip(starts[chosen], lengths[chosen], strict=True):
        found[_hash(tokens[start : start + length])] = None
    return list(found)


def _anchors(tokens: np.ndarray) -> np.ndarray:
    """Return u64 [n - 7]: the hashes of each 8 consecutive tokens."""
    words = tokens.astype(np.uint64)
    count = max(0, len(words) - _ANCHOR + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(_ANCHOR):
        mixed = mixed * _FACTOR + words[offset : offset + count]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def _hash(tokens: np.ndarray) -> int:
    digest = blake3(tokens.astype("<i4").tobytes()).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def duplicates(subject: Subject) -> list[CheckResult]:
    """Find runs that a row shares with an earlier row. The value counts them.

    The coordinator compares rows of different submissions, because only it sees all verdicts.
    """
    first: dict[int, int] = {}
    results = []
    for row, prints in enumerate(subject.fingerprints):
        shared = [first[p] for p in prints if first.setdefault(p, row) != row]
        results.append(
            no_faults("duplicates", [f"a run of tokens of row {other}" for other in shared])
        )
    return results
