"""TRL's side: `GRPOTrainer`'s own loss, and torch's AdamW, on transformers' Qwen2.

As the trainer does it: old log-probs without gradient over the whole batch, then `_compute_loss`,
backward, clip by norm, AdamW. Sequences are padded to the longest: it has no packing for GRPO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from side import Step, run_side
from transformers import Qwen2ForCausalLM
from trl_trainer import make_trainer


def make_step(folder: Path, settings: dict[str, Any], batch: dict[str, Any]) -> Step:
    sequences, longest = batch["mask"].shape
    model = Qwen2ForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer = make_trainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        per_device_train_batch_size=sequences,
        num_generations=settings["group_size"],
        max_completion_length=longest,
        loss_type="grpo",
        epsilon=settings["epsilon"],
        beta=0.0,
        num_iterations=2,
    )
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    prompt, completion, mask = (
        torch.from_numpy(batch[name]).long() for name in ("prompt", "completion", "mask")
    )
    ids = torch.cat([prompt, completion], dim=1)
    attention = torch.cat([torch.ones_like(prompt), mask], dim=1)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.from_numpy(batch["advantages"]),
        "num_items_in_batch": mask.sum(),
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), settings["lr"], settings["betas"], weight_decay=0.0, fused=True
    )

    def step() -> tuple[float, float]:
        with torch.no_grad():
            old, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, attention, longest)
        loss = trainer._compute_loss(model, {**inputs, "old_per_token_logps": old})
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step


if __name__ == "__main__":
    torch.set_num_threads(2)
    run_side("TRL", make_step)
