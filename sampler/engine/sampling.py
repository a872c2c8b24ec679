"""Samples tokens with public noise, and records each with what a TOPLOC proof needs; without vLLM.

token = argmax_v(logits_v / T + gumbel_v) is a sample of softmax(logits / T) (Gumbel 1954; Maddison
et al. 2014). The same token wins argmax_v(exp(logits_v / T) / exponential_v): see `verify.noise`.

A record is the log-prob, the version and the activations. vLLM computes rows that never become
tokens. In a chunked prefill, each chunk but the last samples a row that is dropped. A preempted
request is prefilled again. An asynchronous scheduler runs one row beyond an end that it has not
seen. So rows are keyed by (slot, position), where the position is the number of output tokens
before the row. A row replaces all rows from its position on.

Hidden states never leave the device. A ring holds the last rows of each slot. When 32 rows complete
a TOPLOC chunk, its 128 largest magnitudes are selected on the device, and only those are copied.
`record` copies the rows of a step into buffers that are allocated once, because the next replay of
a CUDA graph overwrites its outputs. The rows of several steps are written to their slots together.
Nothing in `record` waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sampler.engine.requests import Recorded
from verify.noise import exponential, token_words
from verify.toploc import CHUNK_ROWS, MAGNITUDE, TOP_K, blocks, select
from verify.truncation import kept_from

_PORTION_ELEMENTS = 1 << 23
"""Elements processed at once on a device: about 200 MB of keys, for any number of chunks."""
RUN_AHEAD = 4
"""Most rows by which a sequence may fall back behind the furthest row computed for it. vLLM's
schedulers run one row ahead of the results."""
STEPS = 8
"""Engine steps that are written at once: writing several costs as much as writing one."""
RING = CHUNK_ROWS + STEPS + RUN_AHEAD
"""Rows of hidden states in the ring of a sequence."""


class Selected(NamedTuple):
    """The k = min(128, 32 x D) largest of C chunks, padded to 128, in transfer to the host."""

    indices: torch.Tensor
    """i32 [C, 128]: positions in the flattened chunk, in any order."""
    bits: torch.Tensor
    """i16 [C, 128]: bf16 bits there."""


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory may wait
    return tensor.to(device, non_blocking=True)


def select_largest(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """Select by magnitude, then position: no two are equal, so every device selects the same.

    Args:
        chunks: bf16 [C, 32, D].
        rows: i64 [C]: number of leading rows that count in each chunk.
    """
    if chunks.device.type == "cpu":
        return by_partition(chunks, rows)
    step = max(1, _PORTION_ELEMENTS // chunks[0].numel())
    found = [
        by_topk(chunks[at : at + step], rows[at : at + step]) for at in range(0, len(rows), step)
    ]
    columns = zip(*found, strict=True)
    return Selected(*(torch.cat(column).to("cpu", non_blocking=True) for column in columns))


def by_topk(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """Select by sorted keys of magnitude and position, which is fast on a GPU."""
    bits = chunks.view(torch.int16)
    magnitudes = (bits & MAGNITUDE).long()
    if (rows < CHUNK_ROWS).any():
        beyond = on_device(np.arange(CHUNK_ROWS) >= rows[:, None], chunks.device)
        magnitudes = magnitudes.masked_fill(beyond[:, :, None], -1)
    elements = chunks[0].numel()
    backwards = torch.arange(elements - 1, -1, -1, device=chunks.device)
    keys = magnitudes.flatten(1) * elements + backwards
    best = keys.topk(min(TOP_K, elements), dim=1).values
    indices = elements - 1 - best % elements
    unused = (0, TOP_K - indices.shape[1])
    return Selected(
        torch.nn.functional.pad(indices.to(torch.int32), unused),
        torch.nn.functional.pad(bits.flatten(1).gather(1, indices), unused),
    )


def by_partition(chunks: torch.Tensor, rows: np.ndarray) -> Selected:
    """Select as `verify.toploc` does, in a quarter of topk's time on a CPU."""
    bits = chunks.view(torch.int16).numpy().view(np.uint16)
    flat = [chunk[:count].reshape(-1) for chunk, count in zip(bits, rows, strict=True)]
    found = [select(block) for block in blocks(flat)]
    indices = np.concatenate([part.indices for part in found]).astype(np.int32)
    chosen = np.concatenate([part.bits for part in found]).astype(np.uint16).view(np.int16)
    return Selected(torch.from_numpy(indices), torch.from_numpy(chosen))


class _Step(NamedTuple):
    """R rows of an engine step, no slot twice; the buffers hold their tokens and states."""

    slots: np.ndarray
    positions: np.ndarray
    version: int


class TokenRecorder:
    """Records of the sequences under way, one slot for each.

    Memory on the device: slots x (52 D x 2 + max_new_tokens x 8) bytes; on the host 28 bytes a
    token (768 a chunk, and versions) until its slot is forgotten.

    Args:
        slots: sequences at once.
        max_new_tokens: output tokens of a sequence, at most.
        hidden_size: D.
        device: where hidden states are.
    """

    def __init__(
        self, slots: int, max_new_tokens: int, hidden_size: int, device: torch.device
    ) -> None:
        self.version = 0
        """Stamped on the tokens that are sampled from now on."""
        self._device, self._hidden_size, self._longest = device, hidden_size, max_new_tokens
        self._states = torch.zeros((slots * RING, hidden_size), dtype=torch.bfloat16, device=device)
        # One more column for rows beyond the longest output.
        shape = (slots, max_new_tokens + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._versions = np.zeros(shape, np.int32)
        self._length = np.zeros(slots, np.int64)
        self._furthest = np.full(slots, -1, np.int64)
        self._selected: list[dict[int, tuple[Selected, int]]] = [{} for _ in range(slots)]
        self._pending: list[_Step] = []
        rows = STEPS * slots
        self._new_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._new_logprobs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._new_states = torch.zeros((rows, hidden_size), dtype=torch.bfloat16, device=device)
        self._filled = 0
        """Rows of the last three that wait to be written."""

    def record(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Add the rows of one engine step.

        Args:
            slots, positions: i64 [R], no slot twice.
            tokens: i64 [R], the tokens sampled.
            logprobs: f32 [R].
            hidden: [R, D], of the engine's dtype; rounded to bf16 here.
        """
        rows = slice(self._filled, self._filled + len(slots))
        self._new_tokens[rows].copy_(tokens)
        self._new_logprobs[rows].copy_(logprobs)
        self._new_states[rows].copy_(hidden)
        self._filled = rows.stop
        self._pending.append(_Step(slots, positions, self.version))
        if len(self._pending) == STEPS:
            self._write()

    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> Recorded:
        """Return the records of some slots and forget them.

        Args:
            slots: in the order of the reply.
            lengths: output tokens of each; rows past the end are left out.

        Raises:
            RuntimeError: a token has no row.
        """
        self._write()
        at, wanted = np.asarray(slots, np.int64), np.asarray(lengths, np.int64)
        missing = np.maximum(wanted - self._length[at], 0)
        if missing.any():
            raise RuntimeError(f"{int(missing.sum())} sampled tokens were not recorded")
        chunks = self._chunks(at, wanted)
        index = on_device(at, self._device)
        longest = int(wanted.max(initial=0))
        tokens = self._tokens[index, :longest].cpu().numpy()
        logprobs = self._logprobs[index, :longest].cpu().numpy()  # waits for all copies before it
        present = np.arange(longest) < wanted[:, None]
        recorded = Recorded(
            tokens=tokens[present].tobytes(),
            logprobs=logprobs[present].tobytes(),
            versions=self._versions[at, :longest][present].tobytes(),
            indices=b"".join(of.indices[row].numpy().tobytes() for of, row in chunks),
            bits=b"".join(of.bits[row].numpy().tobytes() for of, row in chunks),
            hidden_size=self._hidden_size,
        )
        self.forget(slots)
        return recorded

    def forget(self, slots: Sequence[int]) -> None:
        """Free slots for other sequences."""
        self._write()
        for slot in slots:
            self._length[slot], self._furthest[slot] = 0, -1
            self._selected[slot] = {}

    def _write(self) -> None:
        """Write the rows of the last steps to their slots."""
        if not self._pending:
            return
        for at, row, _ in self._pending:  # a sequence with a gap is short, which `take` reports
            furthest = np.where(row == 0, 0, np.maximum(self._furthest[at], row))
            starts = row // CHUNK_ROWS * CHUNK_ROWS
            joined = (row <= self._length[at]) & (furthest < starts + RING)
            self._length[at] = np.where(joined, row + 1, np.minimum(self._length[at], starts))
            self._furthest[at] = furthest
        steps, self._pending = self._pending, []
        filled, self._filled = self._filled, 0
        slots = np.concatenate([step.slots for step in steps])
        positions = np.concatenate([step.positions for step in steps])
        versions = np.repeat([step.version for step in steps], [len(step.slots) for step in steps])
        tokens, logprobs = self._new_tokens[:filled], self._new_logprobs[:filled]
        hidden = self._new_states[:filled]
        keys = slots * (self._longest + RING) + positions
        distinct, backwards = np.unique(keys[::-1], return_index=True)
        if distinct.size < keys.size:  # of rows for one place the last one counts
            last = np.sort(keys.size - 1 - backwards)
            slots, positions, versions = slots[last], positions[last], versions[last]
            index = on_device(last, self._device)
            tokens, logprobs, hidden = tokens[index], logprobs[index], hidden[index]
        columns = np.minimum(positions, self._longest)
        places = np.stack(
            [slots * self._tokens.shape[1] + columns, slots * RING + positions % RING]
        )
        token_rows, state_rows = on_device(places, self._device)
        self._tokens.view(-1).index_copy_(0, token_rows, tokens)
        self._logprobs.view(-1).index_copy_(0, token_rows, logprobs)
        self._versions[slots, columns] = versions
        self._keep_states(slots, positions, state_rows, hidden)

    def _keep_states(
        self, slots: np.ndarray, positions: np.ndarray, rows: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Write states into the ring, and select from the chunks that are complete now."""
        self._states.index_copy_(0, rows, hidden)
        whole = np.flatnonzero(
            (positions % CHUNK_ROWS == CHUNK_ROWS - 1) & (positions < self._longest)
        )
        if whole.size:
            starts = positions[whole] - (CHUNK_ROWS - 1)
            found = self._select(slots[whole], starts, np.full(whole.size, CHUNK_ROWS))
            for row, (of, start) in enumerate(zip(slots[whole], starts, strict=True)):
                self._selected[of][int(start) // CHUNK_ROWS] = (found, row)

    def _chunks(self, slots: np.ndarray, lengths: np.ndarray) -> list[tuple[Selected, int]]:
        """Return the selections of all chunks of the slots, in order, as rows of `Selected`."""
        # Complete chunks were copied before; the last ones follow now.
        left = np.flatnonzero(lengths % CHUNK_ROWS)
        starts = lengths[left] // CHUNK_ROWS * CHUNK_ROWS
        if (self._furthest[slots[left]] >= starts + RING).any():
            raise RuntimeError(f"a sequence was set back by more than {RUN_AHEAD} rows")
        last = self._select(slots[left], starts, lengths[left] - starts) if left.size else None
        rows = {int(sequence): row for row, sequence in enumerate(left)}
        chunks = []
        for sequence, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            chunks += [self._selected[slot][number] for number in range(length // CHUNK_ROWS)]
            if last is not None and sequence in rows:
                chunks.append((last, rows[sequence]))
        return chunks

    def _select(self, slots: np.ndarray, starts: np.ndarray, rows: np.ndarray) -> Selected:
        """Select the largest magnitudes of chunks in the ring.

        Args:
            slots, starts: i64 [C]: the chunk's slot and its first position.
            rows: i64 [C]: how many rows count.
        """
        places = (starts[:, None] + np.arange(CHUNK_ROWS)) % RING
        index = on_device(slots[:, None] * RING + places, self._device)
        return select_largest(self._states[index], rows)


_CPU_ELEMENTS = 1 << 16
"""Logits processed at once on CPUs, so that intermediate results stay in the caches."""

_FAR = 2.0**60


class Rules(NamedTuple):
    """Sampling parameters of B rows."""

    key_0: torch.Tensor
    """i32 [B, 1]: first word of `verify.noise.noise_key`."""
    key_1: torch.Tensor
    """i32 [B, 1]: second word of it."""
    temperature: torch.Tensor | None
    """f32 [B, 1]; None if all are 1."""
    top_p: torch.Tensor | None
    """f32 [B, 1]; None if no row has one."""
    top_k: torch.Tensor | None
    """i32 [B, 1]; None if no row has one."""

    def part(self, rows: slice) -> Rules:
        return Rules(*(None if column is None else column[rows] for column in self))


class Vocabulary(NamedTuple):
    """Tensors that depend only on the number of tokens V."""

    words: torch.Tensor
    """i32 [1, V]: `verify.noise.token_words` of every token."""
    places: torch.Tensor
    """f32 [1, V]: V, V - 1, ..., 1, the first token having the largest; exact up to V = 2**24."""

    @classmethod
    def of(cls, size: int, device: torch.device) -> Vocabulary:
        tokens = torch.arange(size, dtype=torch.int32, device=device)[None, :]
        return cls(token_words(tokens), (size - tokens).to(torch.float32))


class GumbelSampler:
    """Samples rows of logits on one device. On CUDA the arithmetic is one compiled kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._vocabulary: Vocabulary | None = None
        # Uncompiled, it reads and writes the logits in device memory about thirty times.
        self._win = torch.compile(_win, dynamic=True) if device.type == "cuda" else _win

    def run(
        self, logits: torch.Tensor, rules: Rules, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample; overwrite the logits with values whose only maximum is at the sampled token.

        Args:
            logits: f32 [B, V].
            rules: sampling parameters of the B rows.
            positions: i32 [B, 1], index of the output token that each row samples.

        Returns:
            i64 [B] tokens; f32 [B] their log-probs after top-k and top-p.
        """
        size = logits.shape[-1]
        if self._vocabulary is None or self._vocabulary.words.shape[1] != size:
            self._vocabulary = Vocabulary.of(size, self._device)
        step = max(1, _CPU_ELEMENTS // size)
        if self._device.type != "cpu" or step >= len(logits):
            return self._win(logits, rules, positions, self._vocabulary)
        portions = [slice(at, at + step) for at in range(0, len(logits), step)]
        found = [
            self._win(logits[rows], rules.part(rows), positions[rows], self._vocabulary)
            for rows in portions
        ]
        tokens, logprobs = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)


def _win(
    logits: torch.Tensor, rules: Rules, positions: torch.Tensor, vocabulary: Vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = logits if rules.temperature is None else logits / rules.temperature
    if rules.top_p is not None or rules.top_k is not None:
        threshold = kept_from(torch, scaled, top_p=rules.top_p, top_k=rules.top_k)
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    # torch.softmax sums the vocabulary in float32 one element after the other: less exact.
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    speeds = weights / exponential(torch, rules.key_0, rules.key_1, positions, vocabulary.words)
    # torch vectorises neither argmax nor operations on bool on CPUs, so a maximum finds the winner.
    # The largest speed is at least 1 / 23, and its difference to itself is 0. Every other
    # difference is at least 2**-29 and, times `_FAR`, exceeds every place. Among equal speeds the
    # first token wins, on every device.
    largest = speeds.amax(-1, keepdim=True)
    torch.add(vocabulary.places, speeds - largest, alpha=_FAR, out=logits)
    # NaN logits make every value NaN. Then token 0 is returned, and its log-prob is NaN.
    place = logits.amax(-1, keepdim=True).nan_to_num(nan=float(logits.shape[-1]))
    tokens = logits.shape[-1] - place.to(torch.int64)
    return tokens[:, 0], (weights.gather(1, tokens) / total).log()[:, 0]
