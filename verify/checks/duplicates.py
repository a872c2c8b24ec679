"""Duplicate outputs: fingerprints of runs of tokens, and their comparison within a submission.

A run of output tokens whose own information, - sum log p, is at least I nats is sampled at a given
place with a probability of at most exp(-I), whatever came before. An honest rollout of n tokens
shares one of M earlier runs with a probability of at most n M exp(-I). With I = 48, n = 32,768 and
M = 2,000,000 that is below 1e-10. Text that the policy would write anyway (a restated problem, a
short answer) carries little information, and is no run.

A few runs of each rollout are remembered, the same in a copy as in its original. They start where
the hash of 8 tokens is among the lowest (once, if the same 8 come again). They end with the
multiple of 8 tokens at which they carry I nats. An edit changes only the
runs that it lies in. The whole output is one more.
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
"""Tokens that a start is chosen by, and to whose multiple a run is rounded up."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64


def fingerprints(tokens: np.ndarray, logprobs: np.ndarray) -> list[int]:
    """Hashes of an output and of runs in it, i64, at most `MAX_FINGERPRINTS`.

    Args:
        tokens: i32 [n], the output.
        logprobs: f32 [n], finite.

    Returns:
        Nothing where the output carries less than `OUTPUT_NATS`.
    """
    information = np.concatenate([[0.0], -np.cumsum(np.minimum(logprobs, 0.0, dtype=np.float64))])
    if information[-1] < OUTPUT_NATS:
        return []
    found = {_hash(tokens): None}
    starts = np.arange(max(0, len(tokens) - _ANCHOR + 1))
    ends = np.searchsorted(information, information[starts] + RUN_NATS)
    lengths = -(-(ends - starts) // _ANCHOR) * _ANCHOR
    starts, lengths = (x[starts + lengths <= len(tokens)] for x in (starts, lengths))
    # The first of each kind: other 8 tokens make another run, so that 16 of them are enough. Of one
    # token that is repeated without end there would be thousands of runs to hash, all the same.
    _, first = np.unique(_anchors(tokens)[starts], return_index=True)
    chosen = first[: MAX_FINGERPRINTS - 1]
    for start, length in zip(starts[chosen], lengths[chosen], strict=True):
        found[_hash(tokens[start : start + length])] = None
    return list(found)


def _anchors(tokens: np.ndarray) -> np.ndarray:
    """u64 [n - 7]: hashes of each 8 tokens that follow one another."""
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


class DuplicateCheck:
    """Runs that a row shares with an earlier row of the submission. The value counts them.

    Rows of other submissions are the coordinator's to compare: it alone sees what every validator
    judged.
    """

    name = "duplicates"

    def run(self, subject: Subject) -> list[CheckResult]:
        first: dict[int, int] = {}
        results = []
        for row, prints in enumerate(subject.fingerprints):
            shared = [first[p] for p in prints if first.setdefault(p, row) != row]
            results.append(
                no_faults(self.name, [f"a run of tokens of row {other}" for other in shared])
            )
        return results
