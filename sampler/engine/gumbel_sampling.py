"""Gumbel-max sampling with public noise: the arithmetic of seeded sampling, without vLLM.

token = argmax_v(logits_v / T + gumbel_v) is a sample of softmax(logits / T) (Gumbel 1954; Maddison
et al. 2014). The same token wins argmax_v(exp(logits_v / T) / exponential_v): see `verify.noise`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from verify.noise import exponential, token_words
from verify.truncation import kept_from

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
