"""Opens the rows of a submission, and checks them without a prefill.

`open_rows` checks signature, digest, lease and format. The checks compare rows with what the lease
assigned, with bounds that every honest row keeps, with the validator's own rewards, and with each
other: fingerprints of runs of tokens find copies.

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

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
from blake3 import blake3

from runspec.core.canonical import digest_bytes
from runspec.core.signed import BadSignature
from verify.checks import Check, Subject, at_most, no_faults, row_check
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts, open_submission
from verify.formats.tables import MalformedTable
from verify.formats.turns import split_turns
from verify.formats.verdict import MAX_FINGERPRINTS, CheckResult
from verify.thresholds import LOGPROB_CEILING, LOGPROB_FLOOR, REWARD_TOLERANCE
from verify.toploc import CHUNK_ROWS, MalformedProof, parse_proof

_SHOWN = 40  # characters of a hostile string that a reason repeats


class Rejected(Exception):
    """Raised for a submission of which no row can be examined.

    Args:
        check: the check that failed.
        reason: why.
    """

    def __init__(self, check: str, reason: str) -> None:
        self.check, self.reason = check, reason
        super().__init__(f"{check}: {reason}")


def open_rows(
    envelope: bytes,
    table: bytes,
    *,
    lease: Lease,
    lease_digest: str,
    max_rows: int,
    max_bytes: int,
) -> list[Rollout]:
    """Return the rows of a submission that is signed for this lease.

    Args:
        envelope: the signed submission envelope.
        table: the table's bytes.
        lease: the lease, whose signature has been checked.
        lease_digest: digest of the signed lease.
        max_rows: largest number of rows of an honest submission of the pool.
        max_bytes: largest number of bytes of one.

    Raises:
        Rejected: `signature`, `lease` or `format`.
    """
    try:
        signed = open_submission(envelope)
    except BadSignature as error:
        raise Rejected("signature", str(error)) from error
    if signed.digest != digest_bytes(table) or signed.bytes != len(table):
        raise Rejected("signature", "the file is not the one that was signed")
    claimed = (signed.run, signed.step, signed.worker, signed.index, signed.lease)
    if claimed != (lease.run, lease.step, lease.worker, lease.index, lease_digest):
        raise Rejected("lease", "the envelope names another run, step, worker, index or lease")
    try:
        rollouts = decode_rollouts(table, max_rows=max_rows, max_bytes=max_bytes)
    except MalformedTable as error:
        raise Rejected("format", str(error)) from error
    if not rollouts:
        raise Rejected("format", "no rows")
    return rollouts


@row_check
def bounds(row: Rollout, subject: Subject) -> Iterator[str]:
    """Yield wrong lengths, tokens outside the vocabulary, and numbers that are not finite."""
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
    yield from _turn_lengths(row, subject)
    for name, value in (("task_reward", row.task_reward), ("length_penalty", row.length_penalty)):
        if not math.isfinite(value):
            yield f"{name} {value}"


def _turn_lengths(row: Rollout, subject: Subject) -> Iterator[str]:
    """Yield lengths of turns that do not add up, or that a task with one turn has."""
    given, episode = row.turns, subject.episode_of(row)
    if (given is None) != (episode is None):
        yield "lengths of turns, of a task with one" if episode is None else "no lengths of turns"
    elif given is not None and ((given < 1).any() or int(given.sum()) != len(row.output_tokens)):
        yield f"{len(given)} turns of {given.sum()} tokens, for {len(row.output_tokens)}"


@row_check
def termination(row: Rollout, subject: Subject) -> Iterator[str]:
    """Require `stop` with the end token last and nowhere else, or `length` at the largest length.

    A turn of several ends like this too, and the last where the replayed episode ends.
    """
    replayed = subject.replay_of(row)
    if replayed is None:
        yield from _ending(row.output_tokens, row.finish_reason, subject.max_output(row), subject)
        return
    turns = split_turns(row.output_tokens, row.turns)
    last = len(turns)
    if replayed.episode.fault is not None:  # the group is dropped, and what led to it is judged
        turns = turns[: replayed.turns]
    elif len(replayed.between) < last - 1:
        yield f"{last} turns of an episode that ends after {len(replayed.between) + 1}"
        return
    if replayed.goes_on:
        yield f"ends after turn {last} of an episode that goes on"
    end = subject.task_set.eos_token_id
    for number, (turn, limit) in enumerate(zip(turns, replayed.limits, strict=True), start=1):
        reason = "stop" if turn[-1] == end else "length"
        if number == last:
            reason = row.finish_reason
        yield from (f"turn {number}: {what}" for what in _ending(turn, reason, limit, subject))


def _ending(tokens: np.ndarray, reason: str, longest: int, subject: Subject) -> Iterator[str]:
    ends = np.flatnonzero(tokens == subject.task_set.eos_token_id)
    length = len(tokens)
    if reason == "stop":
        if ends.tolist() != [length - 1]:
            yield f"stopped, with end tokens at {ends[:4].tolist()} of {length}"
    elif reason == "length":
        if ends.size:
            yield f"went on after the end token at {ends[0]}"
        if length != longest:
            yield f"cut at {length} tokens, not at {longest}"
    else:
        yield f"finish reason {reason[:40]!r}"


@row_check
def versions(row: Rollout, subject: Subject) -> Iterator[str]:
    """Require versions of single tokens in trusted pools with `in_flight_updates`, and in no
    others.

    There is one version a token, versions never decrease, and they lie between the lease's version
    and the last that the run publishes. A tighter upper limit would depend on a clock or on others'
    statements, because a slow worker may use versions that are newer than its lease.
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


@row_check
def proof_format(row: Rollout, subject: Subject) -> Iterator[str]:
    """Require one well-formed proof for each chunk of the output."""
    chunks = -(-len(row.output_tokens) // CHUNK_ROWS)
    if len(row.proofs) != chunks:
        yield f"{len(row.proofs)} proofs for {chunks} chunks"
        return
    for number, proof in enumerate(row.proofs):
        try:
            parse_proof(proof)
        except MalformedProof as error:
            yield f"proof {number}: {error}"


def assignment(subject: Subject) -> list[CheckResult]:
    """Compare rows with the lease: each (group, sample) once, with the group's problem and prompt.

    The value is the number of fields that differ.
    """
    task_set = subject.task_set
    tasks = [
        (
            task_set.problem(given.problem).problem_id,
            given.target,
            list(task_set.prompt_tokens(given.problem, given.target, seed)),
        )
        for given, seed in zip(subject.assignments, subject.seeds, strict=True)
    ]
    times = Counter((r.group, r.sample) for r in subject.rollouts)
    expected, count = len(tasks) * subject.group_size, len(subject.rollouts)
    missing = [f"{count} rows, the lease asks for {expected}"] if count != expected else []
    return [
        no_faults(
            "assignment", [*missing, *_faults(row, times[row.group, row.sample], subject, tasks)]
        )
        for row in subject.rollouts
    ]


def _faults(
    row: Rollout, times: int, subject: Subject, tasks: list[tuple[str, int | None, list[int]]]
) -> Iterator[str]:
    lease, sampling = subject.lease, subject.pool.sampling
    yield from _differing(
        [
            ("run", row.run, lease.run),
            ("step", row.step, lease.step),
            ("worker", row.worker, lease.worker),
            ("lease", row.lease, subject.lease_digest),
            ("version", row.version, lease.version),
            ("temperature", row.temperature, float(np.float32(sampling.temperature))),
            ("top_p", row.top_p, float(np.float32(sampling.top_p))),
            ("top_k", row.top_k, sampling.top_k),
        ]
    )
    if times > 1:
        yield f"group {row.group} sample {row.sample} appears {times} times"
    if not (0 <= row.group < len(tasks) and 0 <= row.sample < subject.group_size):
        yield f"group {row.group} sample {row.sample} is not of the lease"
        return
    problem_id, target, prompt = tasks[row.group]
    yield from _differing(
        [("problem_id", row.problem_id, problem_id), ("target", row.target, target)]
    )
    episode = subject.episode_of(row)
    started = episode is None or episode.fault is None
    if started and not np.array_equal(row.prompt_tokens, prompt):
        yield "the prompt is not the assigned problem's"


def _differing(fields: list[tuple[str, object, object]]) -> Iterator[str]:
    for name, claimed, assigned in fields:
        if claimed != assigned:
            yield f"{name} is {str(claimed)[:_SHOWN]!r}, assigned {str(assigned)[:_SHOWN]!r}"


def reward(subject: Subject) -> list[CheckResult]:
    """Compare claimed and re-graded rewards: task reward T and length penalty P.

    The value is max(|T - T'|, |P - P'|). A false claim rejects the submission.

    T is not compared if a grade is not repeatable, because a slower machine may run out of time on
    the same program. P is then compared only if both agree on T, because some forms of P depend on
    T. Training always uses the re-graded rewards.
    """
    results = []
    for row, graded in zip(subject.rollouts, subject.grades, strict=True):
        if graded is None:  # the grader failed, so the worker is not at fault
            results.append(no_faults("reward", []))
            continue
        task = _distance(row.task_reward, graded.task_reward)
        length = _distance(row.length_penalty, graded.length_penalty)
        value, words = max(task, length), "claimed against re-graded"
        if not graded.repeatable and task > REWARD_TOLERANCE:
            value, words = 0.0, "not repeatable"
        results.append(at_most("reward", value, REWARD_TOLERANCE, words))
    return results


def _distance(claimed: float, graded: float) -> float:
    """Return the distance in float32, in which claims are written."""
    return abs(claimed - float(np.float32(graded)))


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


ROW_CHECKS: list[Check] = [assignment, bounds, versions]
"""Checks that need the rows alone, cheap ones first."""
TURN_CHECKS: list[Check] = [termination, proof_format]
"""Checks that need the replays of tasks with several turns."""
GRADE_CHECKS: list[Check] = [reward]
"""Checks that need the validator's grades."""
DUPLICATE_CHECKS: list[Check] = [duplicates]
"""Checks that need the rows' fingerprints, and so their log-probs."""
