"""What Tunix computes on given arrays: `tunix_record.py IN.json OUT.json`. Runs in its environment.

The loss is the registered policy loss "grpo" itself; `common.compute_per_token_logps`, through
which it calls the model, is replaced by one that returns given log-probs and logits. Tunix computes
in float32 whatever it is given.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig


class Given(nnx.Module):
    def __init__(self, logprobs: Any):
        self.logprobs = nnx.Param(jnp.asarray(logprobs, jnp.float32))


def loss_of(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Loss and its gradient by log-prob, [S, T]."""
    extra = {k: settings[k] for k in ("epsilon_high", "epsilon_c") if k in settings}
    config = GRPOConfig(**{k: v for k, v in settings.items() if k not in extra})
    for name, value in {"temperature": 1.0, "kl_clamp_value": None, **extra}.items():
        setattr(config, name, value)
    example = common.TrainExample(
        prompt_ids=None,
        prompt_mask=None,
        completion_ids=jnp.ones_like(jnp.asarray(given["mask"])),
        completion_mask=jnp.asarray(given["mask"]),
        advantages=jnp.asarray(given["advantages"]),
        ref_per_token_logps=jnp.asarray(given["ref"]),
        old_per_token_logps=jnp.asarray(given["old"]),
    )

    def given_logprobs(graphdef: Any, state: Any, **_: Any) -> Any:
        logprobs = nnx.merge(graphdef, state).logprobs[...]
        return logprobs, jnp.zeros((*logprobs.shape, 2))

    original, common.compute_per_token_logps = common.compute_per_token_logps, given_logprobs

    def objective(model: Given) -> Any:
        return algo_core.grpo_loss_fn(model, example, config, pad_id=0, eos_id=1)

    (loss, aux), grads = nnx.value_and_grad(objective, has_aux=True)(Given(given["logprobs"]))
    common.compute_per_token_logps = original
    return {
        "loss": float(loss),
        "kl": float(aux["kl"]),
        "by_logprob": np.asarray(grads.logprobs[...]).tolist(),
    }


def head_of(given: dict[str, Any], temperature: float) -> dict[str, Any]:
    logits = jnp.asarray(given["hidden"]) @ jnp.asarray(given["head"]) / temperature
    targets = jnp.maximum(jnp.asarray(given["targets"]), 0)
    return {
        "logprobs": np.asarray(common.selective_log_softmax(logits, targets)).tolist(),
        "entropy": np.asarray(algo_core.compute_entropy_from_logits(logits)).tolist(),
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    rewards = np.array(given["rewards"])
    found = {
        "version": f"google-tunix {version('google-tunix')}",
        "losses": {name: loss_of(given, s) for name, s in given["tunix_losses"].items()},
        "advantages": {
            "group": algo_core.compute_advantages(rewards.reshape(-1), rewards.shape[1])
            .reshape(rewards.shape)
            .tolist()
        },
        "head": {str(t): head_of(given, t) for t in given["temperatures"]},
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
