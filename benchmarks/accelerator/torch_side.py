"""The same step in torch: transformers' model, SDPA, torch.compile, fused AdamW.

    python -m benchmarks.accelerator.torch_side --shape llama-8b --layers 20 --tokens 16384 ...

The samples have one length, so they go in as rows of their own: SDPA then needs no mask and takes
its flash kernel, which is the best that it can do with the batch that our side packs into one row.
Layers are checkpointed (transformers' own), logits computed in chunks that are checkpointed too.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.accelerator.case import (
    DELTA,
    ENTROPY,
    EPS_HIGH,
    EPS_LOW,
    PROMPT,
    SAMPLES,
    SETTINGS,
    Case,
    side_arguments,
)

CHUNK = 2048
"""Positions whose logits are alive at a time."""


def make_model(case: Case, device: str, weights: Path | None) -> torch.nn.Module:
    """float32 masters: of the other side, or random."""
    if weights is not None:
        model = AutoModelForCausalLM.from_pretrained(
            weights, dtype=torch.float32, attn_implementation="sdpa"
        )
    else:
        config = AutoConfig.for_model(**case.config())
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
    model.to(device).train()
    if case.remat != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def logprobs_and_entropy(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [N, D] hidden states at [N] targets."""

    def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.log_softmax((hidden @ head.to(hidden.dtype).T).float(), dim=-1)
        chosen = table.gather(-1, targets[:, None])[:, 0]
        return chosen, -(table.exp() * table).sum(-1)

    parts = [
        checkpoint(chunk, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])


def grpo(
    logprobs: torch.Tensor, entropy: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """The two-sided surrogate and the entropy bonus, mean over the output tokens."""
    ratio = torch.exp((logprobs - old).clamp(-20, 20))
    clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
    surrogate = torch.minimum(ratio.clamp(max=DELTA) * advantages, clipped * advantages)
    return -surrogate.mean() - ENTROPY * entropy.mean()


def measure(case: Case, weights: Path | None) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = make_model(case, device, weights)
    body = torch.compile(model.model) if device == "cuda" else model.model
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=SETTINGS["lr"],
        betas=SETTINGS["betas"],
        eps=SETTINGS["eps"],
        weight_decay=0.0,
        fused=True,
    )
    ids, advantage = case.batch()
    rows = torch.from_numpy(np.stack(ids)).long().to(device)
    cut = case.tokens // SAMPLES // PROMPT
    targets = rows[:, cut:].reshape(-1)
    advantages = (
        torch.from_numpy(advantage).float().to(device).repeat_interleave(rows.shape[1] - cut)
    )
    half = torch.autocast(device, torch.bfloat16, enabled=case.dtype == "bfloat16")

    def policy() -> tuple[torch.Tensor, torch.Tensor]:
        with half:
            hidden = body(input_ids=rows, use_cache=False).last_hidden_state
            used = hidden[:, cut - 1 : -1].reshape(-1, hidden.shape[-1])
            return logprobs_and_entropy(used, model.lm_head.weight, targets)

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds: dict[str, list[float]] = {"old": [], "update": []}
    numbers = []
    for _ in range(case.repeats + 1):
        began = wait()
        with torch.no_grad():
            old, _ = policy()
        seconds["old"].append(wait() - began)
        began = wait()
        loss = grpo(*policy(), old, advantages)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds["update"].append(wait() - began)
        numbers.append({"loss": float(loss), "grad_norm": float(norm)})
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "layers": case.layers,
        "tokens": case.tokens,
        "first_s": [round(times[0], 2) for times in seconds.values()],
        "old_s": statistics.median(seconds["old"][1:]),
        "update_s": statistics.median(seconds["update"][1:]),
        "peak_bytes": peak,
        "numbers": numbers,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*side_arguments())))
