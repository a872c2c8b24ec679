"""What TRL computes on given arrays: `trl_record.py IN.json OUT.json`. Runs in TRL's environment.

The loss is `GRPOTrainer._compute_loss` itself, on a trainer whose model is replaced by given
log-probs and entropies, in float64; the gradients are those with respect to them. Advantages come
out of `_generate_and_score_completions`, with rewards given by a reward function.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import Qwen2Config
from transformers.modeling_outputs import BaseModelOutputWithPast
from trl.trainer.utils import add_fused_lm_head
from trl_trainer import make_trainer, random_model

SHAPE = {
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def loss_of(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and its gradients by log-prob and by entropy, [S, T] each."""
    trainer = make_trainer(
        random_model(SHAPE),
        lambda completions, **_: [0.0] * len(completions),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=given["max_new_tokens"],
        **{**settings, "beta": 0.0},  # else it wants a reference model
    )
    trainer.beta = settings.get("beta", 0.0)
    arrays = {
        name: torch.tensor(given[name], dtype=torch.float64)
        for name in ("logprobs", "entropy", "old", "ref", "advantages")
    }
    mask = torch.tensor(given["mask"])
    logprobs, entropy = (arrays[name].requires_grad_() for name in ("logprobs", "entropy"))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.ones_like(mask)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": arrays["advantages"],
            "old_per_token_logps": arrays["old"],
            "ref_per_token_logps": arrays["ref"],
            "num_items_in_batch": mask.sum(),
        },
    )
    gradients = torch.autograd.grad(loss, (logprobs, entropy), materialize_grads=True)
    return {
        "loss": loss.item(),
        "by_logprob": gradients[0].tolist(),
        "by_entropy": gradients[1].tolist(),
    }


def advantages_of(rewards: list[list[float]], scale: str) -> list[list[float]]:
    groups, size = len(rewards), len(rewards[0])
    queue = [reward for group in rewards for reward in group]
    trainer = make_trainer(
        random_model(SHAPE),
        lambda completions, **_: queue,
        prompts=groups,
        num_generations=size,
        per_device_train_batch_size=len(queue),
        max_completion_length=2,
        scale_rewards=scale,
        shuffle_dataset=False,
    )
    rows = [{"prompt": f"w{3 + i}"} for i in range(groups) for _ in range(size)]
    outputs = trainer._generate_and_score_completions(rows)
    return outputs["advantages"].double().reshape(groups, size).tolist()


class GivenHidden(torch.nn.Module):
    """A model as far as the fused head looks at it."""

    def __init__(self, hidden: torch.Tensor, matrix: torch.nn.Parameter):
        super().__init__()
        self.config = Qwen2Config(**SHAPE)
        self.head = torch.nn.Linear(*matrix.T.shape, bias=False)
        self.head.weight = matrix
        self.base_model = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self) -> None:
        raise NotImplementedError


def head_of(given: dict[str, Any], temperature: float) -> dict[str, Any]:
    """The fused head: log-probs, entropies, and the gradients of sum(a logp + b H)."""
    hidden = torch.tensor(given["hidden"], dtype=torch.float64, requires_grad=True)
    matrix = torch.nn.Parameter(torch.tensor(given["head"], dtype=torch.float64).T.contiguous())
    model = GivenHidden(hidden, matrix)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    labels = torch.tensor(given["targets"])
    out = model(labels=labels, shift_labels=labels, fused_lm_head=True)
    by_logprob, by_entropy = (torch.tensor(given[name], dtype=torch.float64) for name in "ab")
    objective = (by_logprob * out.log_probs + by_entropy * out.entropy).sum()
    gradients = torch.autograd.grad(objective, (hidden, matrix))
    return {
        "logprobs": out.log_probs.tolist(),
        "entropy": out.entropy.tolist(),
        "by_hidden": gradients[0].tolist(),
        "by_head": gradients[1].T.tolist(),
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    found = {
        "version": f"trl {trl.__version__}",
        "losses": {name: loss_of(given, s) for name, s in given["trl_losses"].items()},
        "advantages": {
            scale: advantages_of(given["rewards"], scale) for scale in ("group", "none")
        },
        "head": {str(t): head_of(given, t) for t in given["temperatures"]},
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
