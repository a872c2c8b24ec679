"""Tunix's side: its Qwen2, its GRPO loss and its trainer's jitted step.

As `GRPOLearner` does it: old log-probs by `compute_per_token_logps` over the whole batch, then the
step that `Trainer.train` calls, the graph cached and the optimizer donated. Sequences are padded to
the longest: its packing leaves the causal mask to the TPU's kernel, without which a token would see
those after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from side import Step, run_side
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params
from tunix.rl import algo_core, common, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.sft.peft_trainer import TrainingConfig


def make_step(folder: Path, settings: dict[str, Any], batch: dict[str, Any]) -> Step:
    shape = settings["model"]
    config = qwen2.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=shape["rms_norm_eps"],
        use_tied_embedding=shape["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = params.create_model_from_safe_tensors(
        str(folder / "model"), config, mesh, dtype=jnp.float32
    )
    beta1, beta2 = settings["betas"]
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings["clip_norm"]),
        optax.adamw(settings["lr"], b1=beta1, b2=beta2, weight_decay=0.0),
    )
    algorithm = GRPOConfig(
        num_generations=settings["group_size"],
        num_iterations=2,
        beta=0.0,
        epsilon=settings["epsilon"],
        loss_agg_mode="sequence-mean-token-mean",
    )
    algorithm.temperature = 1.0
    tokens = {"pad_id": 0, "eos_id": 1}

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config, **tokens)

    actor = trainer.Trainer(model, optimizer, TrainingConfig(eval_every_n_steps=10**9), dict)
    actor.with_loss_fn(loss, has_aux=True)
    actor.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    with mesh:
        train_step, _ = actor.jit_train_and_eval_step(cache_nnx_graph=True)
    prompt, completion, mask = (jnp.asarray(batch[x]) for x in ("prompt", "completion", "mask"))

    def step() -> tuple[float, float]:
        graph, state = nnx.split(model)
        old = common.compute_per_token_logps(
            graph, state, prompt_tokens=prompt, completion_tokens=completion, **tokens
        )
        example = TrainExample(
            prompt_ids=prompt,
            prompt_mask=prompt != 0,
            completion_ids=completion,
            completion_mask=mask,
            advantages=jnp.asarray(batch["advantages"]),
            ref_per_token_logps=None,
            old_per_token_logps=old,
        )
        with mesh:
            loss, _, norm = jax.block_until_ready(train_step(example))
        jax.block_until_ready(nnx.state(model))
        return float(loss), float(norm)

    return step


if __name__ == "__main__":
    run_side("Tunix", make_step)
