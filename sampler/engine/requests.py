"""Plain data between the worker, the engine and vLLM's processes, and the checks after a load.

A load is followed by the workers' comparison of weights, and by the probe. Errors name the tensor.
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
from runspec.core.schema import SamplerPool
from verify.formats.turns import turn_room
from verify.plugins import Episode, TaskSet
from verify.toploc import CHUNK_ROWS, TOP_K, Selection


@dataclass(frozen=True)
class SampleRequest:
    """One rollout to sample. A group is several requests that differ in `noise_key` alone."""

    prompt_tokens: Sequence[int]
    max_new_tokens: int
    end_token: int
    """The only token that ends a turn; it is part of the output."""
    temperature: float
    """T > 0."""
    noise_key: tuple[int, int] | None
    """Key of `verify.noise.noise_key`; None if sampling is not seeded (the engine draws a key)."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps every token."""
    top_k: int = -1
    """-1 keeps every token."""
    max_length: int = 0
    """Tokens of the whole sequence, at most, if the rollout has several turns."""
    episode: Episode | None = None
    """Says what stands between turns; None if the rollout has one turn."""

    def room(self, sequence: int, own: int) -> int:
        """Return the most tokens of the next turn, after so many tokens behind the prompt, of which
        the model sampled `own`."""
        if self.episode is None:
            return self.max_new_tokens - own
        left = self.max_length - len(self.prompt_tokens) - sequence
        return turn_room(self.episode.per_turn, self.max_new_tokens - own, left)


def sample_requests(
    pool: SamplerPool,
    tasks: TaskSet,
    problem: int,
    target: int | None,
    noise_keys: Sequence[tuple[int, int] | None],
    *,
    seed: int,
) -> list[SampleRequest]:
    """Return the requests for one problem with a pool's settings, one for each noise key.

    Args:
        pool: settings of sampling.
        tasks: has the problem.
        problem: its index.
        target: length that its prompt asks for.
        noise_keys: one for each rollout.
        seed: of the problem's episodes, if it has several turns.

    Raises:
        UserError: the prompt leaves no room for an answer in the pool's context.
    """
    prompt = tasks.prompt_tokens(problem, target, seed)
    room = pool.max_model_len - len(prompt)
    if room < pool.max_new_tokens:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves {room} of {pool.max_model_len} for the "
            f"{pool.max_new_tokens} new ones",
            place=f"samplers.{pool.name}",
            remedy="raise max_model_len, or lower max_new_tokens or data.max_prompt_tokens",
        )
    sampling = pool.sampling
    return [
        SampleRequest(
            prompt_tokens=prompt,
            max_new_tokens=pool.max_new_tokens,
            end_token=tasks.eos_token_id,
            temperature=sampling.temperature,
            noise_key=key,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_length=pool.max_model_len,
            episode=tasks.episode(problem, seed),
        )
        for key in noise_keys
    ]


@dataclass(frozen=True)
class Sampled:
    """One sampled rollout, row t of each array belonging to the model's token t."""

    output_tokens: np.ndarray
    """i32 [n], of all turns, end tokens included."""
    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) at the output token, before any noise."""
    finish_reason: str
    """Of the last turn: `stop` (the end token) or `length`."""
    versions: np.ndarray
    """i32 [n]: the policy version that each token was sampled from."""
    selection: Selection
    """Selection of the final hidden states behind the tokens, one chunk for each 32 or rest of
    them: `verify.toploc.build_proofs_of` makes the proofs."""
    turns: Sequence[int] = ()
    """Tokens of each turn; empty if there is one."""


@dataclass(frozen=True)
class LoadReport:
    """Result of a load on one rank, as names of tensors."""

    compared: list[str]
    repacked: list[str]
    """Tensors in a form that cannot be read back."""
    different: list[str]
    """Tensors that differ from the files or have no parameter: the load failed."""
    load_s: float = 0.0
    """Seconds that the load took, all checks included."""
    pause_s: float = 0.0
    """Seconds of these in which nothing could be sampled: fewer if weights change in flight."""
    patched: bool = False
    """The weights were changed in place by a delta, not reloaded."""


class NoVersion(RuntimeError):
    """Sequences were submitted while no version was loaded.

    Attributes:
        death: error of the engine that held a version; None if none was loaded or a load failed.
    """

    def __init__(self, death: Exception | None) -> None:
        super().__init__("no version is loaded")
        self.death = death


class GenerationAborted(Exception):
    """Generation ended early because the caller asked for it; nothing was sampled."""


@dataclass(frozen=True)
class Recorded:
    """N tokens and C chunks of several sequences, one after the other; bytes cross any transport.

    Between processes msgpack makes a dict of it: `Recorded(**reply)`.
    """

    tokens: bytes
    """i32 [N]."""
    logprobs: bytes
    """f32 [N]: of log_softmax(logits / T) after top-k / top-p, before noise."""
    versions: bytes
    """i32 [N]: the policy version that sampled each token."""
    indices: bytes
    """i32 [C, 128]: positions of the largest activations in the flattened chunk."""
    bits: bytes
    """u16 [C, 128]: bf16 bits there."""
    hidden_size: int


def split_recorded(
    recorded: Recorded, lengths: Sequence[int], reasons: Sequence[str]
) -> list[Sampled]:
    """Split a record into its sequences, as if each had one turn.

    Args:
        recorded: result of `take_recorded(slots, lengths)`.
        lengths: output tokens of each sequence.
        reasons: why each ended.
    """
    tokens = np.frombuffer(recorded.tokens, np.int32)
    logprobs = np.frombuffer(recorded.logprobs, np.float32)
    versions = np.frombuffer(recorded.versions, np.int32)
    indices = np.frombuffer(recorded.indices, np.int32).reshape(-1, TOP_K).astype(np.int64)
    bits = np.frombuffer(recorded.bits, np.uint16).reshape(-1, TOP_K).astype(np.int64)
    sequences, row, chunk = [], 0, 0
    for length, reason in zip(lengths, reasons, strict=True):
        rows = slice(row, row + length)
        starts = np.arange(0, length, CHUNK_ROWS)  # a chunk has 32 rows, or the rest
        sizes = np.minimum(CHUNK_ROWS, length - starts) * recorded.hidden_size
        chunks = slice(chunk, chunk + len(sizes))
        selection = Selection(indices[chunks], bits[chunks], sizes)
        sequences.append(Sampled(tokens[rows], logprobs[rows], reason, versions[rows], selection))
        row, chunk = rows.stop, chunks.stop
    if (row, chunk) != (len(tokens), len(indices)):
        raise ValueError(f"a record of {len(tokens)} tokens for sequences of {row}")
    return sequences


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
