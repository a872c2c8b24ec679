"""Bounds that every honest row keeps: lengths, tokens, log-probs, rewards, proofs, the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from verify.checks.base import Subject, no_faults
from verify.formats.submission import Rollout
from verify.formats.verdict import CheckResult
from verify.thresholds import LOGPROB_CEILING, LOGPROB_FLOOR
from verify.toploc import CHUNK_ROWS, MalformedProof, parse_proof


@dataclass(frozen=True)
class ValuesCheck:
    """Looks at each row by itself. The value counts the row's faults."""

    name: str
    faults: Callable[[Rollout, Subject], Iterator[str]]
    """Yields what is wrong with a row."""

    def run(self, subject: Subject) -> list[CheckResult]:
        return [no_faults(self.name, list(self.faults(r, subject))) for r in subject.rollouts]


def _bounds(row: Rollout, subject: Subject) -> Iterator[str]:
    """Lengths that agree, tokens of the vocabulary, finite numbers."""
    tokens, logprobs = row.output_tokens, row.logprobs
    longest = subject.max_output(row)
    if not 1 <= len(tokens) <= longest:
        yield f"{len(tokens)} output tokens, outside [1, {longest}]"
    if len(logprobs) != len(tokens):
        yield f"{len(logprobs)} log-probs for {len(tokens)} output tokens"
    outside = tokens[(tokens < 0) | (tokens >= subject.vocab_size)]
    if outside.size:
        yield f"token {outside[0]} outside the vocabulary of {subject.vocab_size}"
    impossible = logprobs[~((logprobs >= LOGPROB_FLOOR) & (logprobs <= LOGPROB_CEILING))]
    if impossible.size:
        yield f"log-prob {impossible[0]}"
    for name, value in (("task_reward", row.task_reward), ("length_penalty", row.length_penalty)):
        if not math.isfinite(value):
            yield f"{name} {value}"


def _termination(row: Rollout, subject: Subject) -> Iterator[str]:
    """`stop` with the end token last and nowhere else, or `length` at the longest output."""
    ends = np.flatnonzero(row.output_tokens == subject.task_set.eos_token_id)
    length, longest = len(row.output_tokens), subject.max_output(row)
    if row.finish_reason == "stop":
        if ends.tolist() != [length - 1]:
            yield f"stopped, with end tokens at {ends[:4].tolist()} of {length}"
    elif row.finish_reason == "length":
        if ends.size:
            yield f"went on after the end token at {ends[0]}"
        if length != longest:
            yield f"cut at {length} tokens, not at {longest}"
    else:
        yield f"finish reason {row.finish_reason[:40]!r}"


def _versions(row: Rollout, subject: Subject) -> Iterator[str]:
    """Versions of single tokens, in trusted pools with `in_flight_updates` and nowhere else.

    One a token, never going back, none before the lease's version, none after the last that the run
    publishes. A nearer bound would take the clock, or the word of others: a slow worker may hand in
    what it sampled under versions that were not there when its lease was granted.
    """
    pool, versions = subject.pool, row.versions
    expected = pool.in_flight_updates and pool.trust == "trusted"
    if versions is None:
        if expected:
            yield "no versions of tokens, from a pool that updates in flight"
        return
    if not expected:
        yield "versions of tokens, from a pool that does not update in flight"
    if len(versions) != len(row.output_tokens):
        yield f"{len(versions)} versions for {len(row.output_tokens)} output tokens"
    if (np.diff(versions) < 0).any():
        yield "a token of an older version than the one before it"
    oldest, newest = subject.lease.version, subject.last_version
    outside = versions[(versions < oldest) | (versions > newest)]
    if outside.size:
        yield f"a token of version {outside[0]}, outside [{oldest}, {newest}]"


def _proof_format(row: Rollout, subject: Subject) -> Iterator[str]:
    """As many well-formed proofs as the output has chunks."""
    chunks = -(-len(row.output_tokens) // CHUNK_ROWS)
    if len(row.proofs) != chunks:
        yield f"{len(row.proofs)} proofs for {chunks} chunks"
        return
    for number, proof in enumerate(row.proofs):
        try:
            parse_proof(proof)
        except MalformedProof as error:
            yield f"proof {number}: {error}"


BOUNDS = ValuesCheck("bounds", _bounds)
VERSIONS = ValuesCheck("versions", _versions)
TERMINATION = ValuesCheck("termination", _termination)
PROOF_FORMAT = ValuesCheck("proof_format", _proof_format)
