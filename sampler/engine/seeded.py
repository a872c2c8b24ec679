"""Gumbel-max sampling inside vLLM, through its public interface for logits processors.

token = argmax_v(logits_v / T + gumbel(key, position, v)) is a sample of softmax(logits / T)
(Gumbel 1954; Maddison et al. 2014), and a public function of the logits and the key; v runs over
the tokens that top-k and top-p keep (`verify.truncation`). Requests run at vLLM's temperature 0,
without its own top-k and top-p, so that its greedy argmax picks the token, and carry slot, key, T,
top-p and top-k in `extra_args`. Log-probs are taken here because vLLM's own are at T = 1, or after
the noise, as its mode says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from sampler.engine.recorder import TokenRecorder, on_device
from verify.noise import gumbel
from verify.truncation import Truncation, kept_from


def sampling_arguments(
    slot: int,
    noise_key: tuple[int, int],
    temperature: float,
    *,
    top_p: float = 1.0,
    top_k: int = -1,
) -> dict[str, Any]:
    """`SamplingParams.extra_args` of a request that this processor samples.

    Args:
        slot: under which the rows of the request are recorded; no other that runs has it.
        noise_key: of `verify.noise.noise_key`.
        temperature: T > 0.
        top_p, top_k: as in `verify.truncation.Truncation`.
    """
    return {
        "slot": slot,
        "noise_key": list(noise_key),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }


@dataclass(frozen=True)
class _Request:
    slot: int
    noise_key: tuple[int, int]
    temperature: float
    rule: Truncation
    output_tokens: list[int]
    """vLLM's own list: it grows as tokens are sampled."""


@dataclass(frozen=True)
class _Rows:
    """The requests of the batch as arrays, in the order of their rows; B rows."""

    index: slice | torch.Tensor
    """Rows of the logits that belong to them."""
    slots: np.ndarray
    key_0: torch.Tensor
    """i32 [B, 1]."""
    key_1: torch.Tensor
    temperature: torch.Tensor
    """f32 [B, 1]."""
    top_p: torch.Tensor | None
    """f32 [B, 1]; None where nobody cuts."""
    top_k: torch.Tensor | None
    """i32 [B, 1]; None where nobody cuts."""
    outputs: list[list[int]]


class SeededSampler(LogitsProcessor):
    """Adds the noise, and records the log-prob and hidden state of the token that wins."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, _Request] = {}
        self._rows: _Rows | None = None
        self._hidden: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        # Every tensor-parallel rank samples the same tokens; one of them keeps the books.
        self.records = vllm_config.parallel_config.rank == 0
        self.recorder: TokenRecorder | None = None
        """On the rank that keeps the books, from `SamplerExtension.start_capture` on."""

    def is_argmax_invariant(self) -> bool:
        return False

    def see_hidden(self, hidden: torch.Tensor) -> None:
        """Notes the final hidden states [R, D] from which the next logits [R, V] are made."""
        self._hidden = hidden

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._requests, batch_update, _request):
            self._rows = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Turns logits [R, V] f32 into noisy ones whose argmax is the sampled token."""
        if not self._requests:
            return logits
        if self._rows is None:
            self._rows = self._arrange(len(logits))
        rows = self._rows
        positions = np.fromiter((len(o) for o in rows.outputs), np.int64, len(rows.outputs))
        scaled = self._kept(logits[rows.index] / rows.temperature, rows)
        noise = gumbel(
            torch,
            rows.key_0,
            rows.key_1,
            on_device(positions.astype(np.int32), self._device)[:, None],
            self._vocabulary(logits.shape[-1]),
        )
        tokens = (scaled + noise).argmax(dim=-1, keepdim=True)
        if self.recorder is not None:
            self._record(self.recorder, logits, rows, positions, scaled, tokens)
        # One winner and no ties: what is recorded is what vLLM's argmax picks.
        if isinstance(rows.index, slice):
            return logits.fill_(-torch.inf).scatter_(1, tokens, 0.0)
        logits[rows.index] = torch.full_like(scaled, -torch.inf).scatter_(1, tokens, 0.0)
        return logits

    def _record(
        self,
        recorder: TokenRecorder,
        logits: torch.Tensor,
        rows: _Rows,
        positions: np.ndarray,
        scaled: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        hidden = self._hidden
        if hidden is None or len(hidden) != len(logits):
            raise RuntimeError("hidden states and logits of this step do not match")
        logprobs = scaled.gather(1, tokens)[:, 0] - scaled.logsumexp(dim=-1)
        recorder.record(rows.slots, positions, tokens[:, 0], logprobs, hidden[rows.index])

    def _vocabulary(self, size: int) -> torch.Tensor:
        """Token ids i32 [1, V], made once."""
        if self._tokens is None or self._tokens.shape[1] != size:
            self._tokens = torch.arange(size, dtype=torch.int32, device=self._device)[None, :]
        return self._tokens

    def _kept(self, scaled: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """The same with -inf for the tokens that top-k and top-p leave out."""
        if rows.top_p is None and rows.top_k is None:
            return scaled
        threshold = kept_from(torch, scaled, top_p=rows.top_p, top_k=rows.top_k)
        return scaled.masked_fill(scaled < threshold, -torch.inf)

    def _arrange(self, batch: int) -> _Rows:
        indices = sorted(self._requests)
        requests = [self._requests[i] for i in indices]

        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)[:, None]

        rules = [r.rule for r in requests]
        everything = torch.iinfo(torch.int32).max
        top_k = [rule.top_k if rule.top_k > 0 else everything for rule in rules]
        top_p = [rule.top_p for rule in rules]
        return _Rows(
            # A slice is a view: no copy of the logits in the usual case that all rows are ours.
            index=slice(None)
            if indices == list(range(batch))
            else torch.tensor(indices, device=self._device),
            slots=np.array([r.slot for r in requests], dtype=np.int64),
            key_0=column([r.noise_key[0] for r in requests], torch.int32),
            key_1=column([r.noise_key[1] for r in requests], torch.int32),
            temperature=column([r.temperature for r in requests], torch.float32),
            top_p=column(top_p, torch.float32) if min(top_p) < 1.0 else None,
            top_k=column(top_k, torch.int32) if min(top_k) < everything else None,
            outputs=[r.output_tokens for r in requests],
        )


def _request(
    params: SamplingParams, prompt_tokens: list[int] | None, output_tokens: list[int]
) -> _Request | None:
    extra = params.extra_args
    if not extra or "noise_key" not in extra:
        return None
    key_0, key_1 = extra["noise_key"]
    rule = Truncation(extra["top_p"], extra["top_k"])
    return _Request(extra["slot"], (key_0, key_1), extra["temperature"], rule, output_tokens)
