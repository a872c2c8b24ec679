"""Keeps, for every token sampled, its log-prob, its version, and what a proof needs of its state.

vLLM computes rows that never become tokens: each chunk of a chunked prefill but the last samples
one that is thrown away, a preempted request is prefilled again, and an asynchronous scheduler runs
a row ahead of an end that it has not seen. So rows are keyed by (slot, position), position being
the number of output tokens that the sequence has, and a row takes the place of the rows from its
position on: what a sequence is continued from counts, nothing else.

Hidden states never leave the device. A ring holds the last rows of each slot; once 32 make a chunk
of TOPLOC, the 128 largest magnitudes are selected there, and those alone travel. Nothing in
`record` waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sampler.engine.recorded import Recorded
from verify.toploc import CHUNK_ROWS, TOP_K
from verify.toploc.selection import MAGNITUDE

RUN_AHEAD = 4
"""How far a sequence may be set back behind the furthest row that was computed for it. vLLM's
schedulers run one row ahead of what they know."""
_RING = CHUNK_ROWS + RUN_AHEAD
_PORTION_ELEMENTS = 1 << 23
"""Selected from at once: some 200 MB of keys, however many sequences complete a chunk."""


@dataclass(frozen=True)
class Selected:
    """Chunks that were completed in one step, on their way to the host."""

    indices: torch.Tensor
    """i32 [C, 128]."""
    bits: torch.Tensor
    """i16 [C, 128]."""


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to a device, without waiting for what the device has still to do."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from other memory a copy may wait
    return tensor.to(device, non_blocking=True)


class TokenRecorder:
    """The records of the sequences under way, a slot each.

    Memory on the device: slots x (36 D x 2 + max_new_tokens x 8) bytes; on the host 28 bytes a
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
        self._ring = torch.zeros((slots, _RING, hidden_size), dtype=torch.bfloat16, device=device)
        # One column more takes rows that run past the longest output.
        shape = (slots, max_new_tokens + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._versions = np.zeros(shape, np.int32)
        self._length = np.zeros(slots, np.int64)
        self._furthest = np.full(slots, -1, np.int64)
        self._selected: list[dict[int, tuple[Selected, int]]] = [{} for _ in range(slots)]

    def record(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Adds the rows of one engine step.

        Args:
            slots, positions: i64 [R], no slot twice.
            tokens: i64 [R], the tokens sampled.
            logprobs: f32 [R].
            hidden: [R, D], of the engine's dtype; rounded to bf16 here.
        """
        columns = np.minimum(positions, self._longest)
        slot, column = on_device(np.stack([slots, columns]), self._device)
        self._tokens[slot, column] = tokens.to(torch.int32)
        self._logprobs[slot, column] = logprobs
        self._versions[slots, columns] = self.version
        self._advance(slots, positions)
        self._keep_states(slots, positions, hidden)

    def take(self, slots: Sequence[int], lengths: Sequence[int]) -> Recorded:
        """Returns the records of some slots and forgets them.

        Args:
            slots: in the order of the reply.
            lengths: output tokens of each; rows past the end are left out.

        Raises:
            RuntimeError: a token has no row.
        """
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
        """Makes slots free for other sequences."""
        for slot in slots:
            self._length[slot], self._furthest[slot] = 0, -1
            self._selected[slot] = {}

    def _advance(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Notes how long each sequence is now; one with a hole is short, which `take` reports."""
        furthest = np.where(positions == 0, 0, np.maximum(self._furthest[slots], positions))
        starts = positions // CHUNK_ROWS * CHUNK_ROWS
        joined = (positions <= self._length[slots]) & (furthest < starts + _RING)
        self._length[slots] = np.where(
            joined, positions + 1, np.minimum(self._length[slots], starts)
        )
        self._furthest[slots] = furthest

    def _keep_states(self, slots: np.ndarray, positions: np.ndarray, hidden: torch.Tensor) -> None:
        """Puts rows into the ring, and selects from the chunks that are whole now."""
        slot, place = on_device(np.stack([slots, positions % _RING]), self._device)
        self._ring[slot, place] = hidden.to(torch.bfloat16)
        whole = np.flatnonzero(
            (positions % CHUNK_ROWS == CHUNK_ROWS - 1) & (positions < self._longest)
        )
        if whole.size:
            starts = positions[whole] - (CHUNK_ROWS - 1)
            found = self._select(slots[whole], starts, None)
            for row, (of, start) in enumerate(zip(slots[whole], starts, strict=True)):
                self._selected[of][int(start) // CHUNK_ROWS] = (found, row)

    def _chunks(self, slots: np.ndarray, lengths: np.ndarray) -> list[tuple[Selected, int]]:
        """What was selected of each chunk of the slots, in order, as rows of `Selected`."""
        # Whole chunks travelled when they were complete, the last ones follow now.
        left = np.flatnonzero(lengths % CHUNK_ROWS)
        starts = lengths[left] // CHUNK_ROWS * CHUNK_ROWS
        if (self._furthest[slots[left]] >= starts + _RING).any():
            raise RuntimeError(f"a sequence was set back by more than {RUN_AHEAD} rows")
        last = self._select(slots[left], starts, lengths[left] - starts) if left.size else None
        rows = {int(sequence): row for row, sequence in enumerate(left)}
        chunks = []
        for sequence, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            chunks += [self._selected[slot][number] for number in range(length // CHUNK_ROWS)]
            if last is not None and sequence in rows:
                chunks.append((last, rows[sequence]))
        return chunks

    def _select(self, slots: np.ndarray, starts: np.ndarray, rows: np.ndarray | None) -> Selected:
        """The largest magnitudes of chunks that lie in the ring.

        Args:
            slots, starts: i64 [C]: the chunk's slot and its first position.
            rows: i64 [C]: how many rows count; None for all 32.
        """
        step = max(1, _PORTION_ELEMENTS // (CHUNK_ROWS * self._hidden_size))
        found = [
            self._select_portion(
                slots[at : at + step],
                starts[at : at + step],
                None if rows is None else rows[at : at + step],
            )
            for at in range(0, len(slots), step)
        ]
        indices, bits = (torch.cat(part) for part in zip(*found, strict=True))
        unused = (0, TOP_K - indices.shape[1])
        return Selected(
            torch.nn.functional.pad(indices, unused).to("cpu", non_blocking=True),
            torch.nn.functional.pad(bits, unused).to("cpu", non_blocking=True),
        )

    def _select_portion(
        self, slots: np.ndarray, starts: np.ndarray, rows: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """i32 [C, k] and i16 [C, k]: positions and bits of a few chunks, on the device."""
        places = (starts[:, None] + np.arange(CHUNK_ROWS)) % _RING
        index = on_device(slots[:, None] * _RING + places, self._device)
        chunks = self._ring.view(-1, self._hidden_size)[index].view(torch.int16)  # [C, 32, D]
        magnitudes = (chunks & MAGNITUDE).long()
        if rows is not None:
            beyond = on_device(np.arange(CHUNK_ROWS) >= rows[:, None], self._device)
            magnitudes = magnitudes.masked_fill(beyond[:, :, None], -1)
        # Keys of magnitude, then position: no two are equal, so every device selects the same.
        elements = CHUNK_ROWS * self._hidden_size
        backwards = torch.arange(elements - 1, -1, -1, device=self._device)
        keys = magnitudes.flatten(1) * elements + backwards
        best = keys.topk(min(TOP_K, elements), dim=1).values
        indices = elements - 1 - best % elements
        return indices.to(torch.int32), chunks.flatten(1).gather(1, indices)
