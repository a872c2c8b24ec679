"""The honest sampler in another framework: `transformers` in torch, with its cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.attacks.engine import LONGEST, TEMPERATURE, Sampled, lengths_of
from benchmarks.attacks.policies import Weights
from benchmarks.null.text_model import transformers_model
from verify.noise import gumbel


def sample_torch(
    weights: Weights, prompts: np.ndarray, keys: np.ndarray, *, dtype: str, rows: int
) -> Sampled:
    """As `benchmarks.attacks.engine.sample` of an honest worker."""
    model = transformers_model(weights.params, weights.config, dtype)
    parts = [
        _batch(model, prompts[start : start + rows], keys[start : start + rows])
        for start in range(0, len(prompts), rows)
    ]
    tokens, logprobs, hidden = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Sampled(tokens, lengths_of(tokens), logprobs, logprobs, hidden)


def _batch(model: Any, prompts: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Tokens, log-probs, bits of the hidden states: [B, 128] and [B, 128, D]."""
    import torch

    key_0, key_1 = torch.from_numpy(keys).T[..., None]
    vocabulary = torch.arange(model.config.vocab_size, dtype=torch.int32)[None]
    fed, cache = torch.from_numpy(prompts.astype(np.int64)), None
    head = model.lm_head.weight.detach().float().T
    found: list[list[np.ndarray]] = []
    with torch.no_grad():
        for place in range(LONGEST):
            out = model.model(input_ids=fed, past_key_values=cache, use_cache=True)
            state, cache = out.last_hidden_state[:, -1], out.past_key_values
            scaled = state.float() @ head / TEMPERATURE
            at = torch.tensor(place, dtype=torch.int32)
            fed = (scaled + gumbel(torch, key_0, key_1, at, vocabulary)).argmax(-1)[:, None]
            logprobs = scaled.log_softmax(-1).gather(1, fed)[:, 0]
            bits = state.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            found.append([fed[:, 0].numpy().astype(np.int32), logprobs.numpy(), bits])
    return [np.stack(each, 1) for each in zip(*found, strict=True)]
