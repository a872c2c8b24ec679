"""FLOPs of training from the model's shape: useful ones, and all that a step computes.

    useful = 6 N' T + 6 L H h sum_i n_i^2

N' are the parameters that multiply activations: the matrices of the layers and the head (a tied
embedding as the head, its gather not), without biases and norms; T = sum_i n_i the real tokens,
prompts included, padding not. 6 is two a multiply-add for the forward pass and four for the
backward pass. Attention: 4 H h n^2 forward a layer for scores and values, three times that with
the backward pass, half of it under the causal mask, each sample by itself: 12 L H h n^2 / 2.
What `remat` computes again, pi_old and the reference policy's log-probs are not useful: they take
time and count nothing. With LoRA the matrices are frozen and get no gradients, 4 in place of 6; the
adapters' own are 6.

PaLM's count (arXiv 2204.02311, appendix B) is the same but for the masked half of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import matrix_shapes
from runspec.core.spec.schema import Lora, RunSpec


def matrix_parameters(config: ModelConfig) -> int:
    """Return N': the parameters of the layers' matrices and the head."""
    layer = sum(rows * columns for rows, columns in matrix_shapes(config).values())
    return config.num_hidden_layers * layer + config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, lengths: Sequence[float], lora: Lora | None = None) -> float:
    """Return the FLOPs of one forward pass over samples of these lengths.

    They are a third of `useful_flops` if all parameters are trained.

    Args:
        config: the model's shape.
        lengths: n_i, tokens of each sample, prompt and output.
        lora: adapters that are computed beside the matrices.
    """
    multiplied = matrix_parameters(config)
    if lora is not None:
        shapes = matrix_shapes(config)
        layer = sum(sum(shapes[name]) for name in lora.targets)
        multiplied += config.num_hidden_layers * lora.rank * layer
    return 2.0 * multiplied * sum(lengths) + _attention_flops(config, lengths)


def useful_flops(config: ModelConfig, lengths: Sequence[float], lora: Lora | None = None) -> float:
    """Return the useful FLOPs of one forward and backward pass, by the formula above.

    Args:
        config: the model's shape.
        lengths: n_i, tokens of each sample, prompt and output.
        lora: the adapters that are trained in place of the matrices.
    """
    frozen = 0 if lora is None else matrix_parameters(config)
    return 3.0 * forward_flops(config, lengths, lora) - 2.0 * frozen * sum(lengths)


def _attention_flops(config: ModelConfig, lengths: Sequence[float]) -> float:
    """Return the forward FLOPs of scores and values under the causal mask."""
    width = config.num_attention_heads * config.head_dim
    return 2.0 * config.num_hidden_layers * width * sum(n * n for n in lengths)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step of the learner over all devices, without padding."""

    useful: float
    """FLOPs of the forward and backward passes of all updates."""
    recompute: float
    """FLOPs that `learner.remat` repeats in the backward passes: a forward pass of the layers,
    without attention or without matrix products if their results are kept."""
    old: float
    """FLOPs of the forward pass of pi_old; 0 with `old_logprobs: sampler`."""
    reference: float
    """FLOPs of the forward pass of the reference policy; 0 without KL."""
    held_out: float = 0.0
    """FLOPs of the forward passes over held-out documents, a step's share; 0 for `grpo`."""

    @property
    def total(self) -> float:
        return self.useful + self.recompute + self.forward

    @property
    def forward(self) -> float:
        """FLOPs of the forward passes that have no backward pass."""
        return self.old + self.reference + self.held_out


def step_flops(spec: RunSpec, config: ModelConfig, mean_tokens: float) -> StepFlops:
    """Return the FLOPs of one step, with all samples of one length.

    Attention grows with the square of the length, so the result is too low if lengths vary.

    Args:
        spec: batch, remat, KL, adapters, held-out documents.
        config: shape of the model.
        mean_tokens: of a sample, prompt and output; of a document.
    """
    lora, one = spec.learner.lora, [mean_tokens]
    useful, recompute = useful_flops(config, one, lora), _recomputed(spec, config, one)
    if (supervised := spec.supervised) is not None:
        documents = supervised.updates_per_step * supervised.tokens_per_update / mean_tokens
        held_out = supervised.held_out.tokens / mean_tokens / supervised.held_out.every
        held_out *= forward_flops(config, one)
        return StepFlops(documents * useful, documents * recompute, 0.0, 0.0, held_out)
    algorithm = spec.grpo
    samples = algorithm.prompts_per_step * algorithm.group_size
    plain = samples * forward_flops(config, one)
    return StepFlops(
        useful=samples * useful,
        recompute=samples * recompute,
        old=plain if algorithm.old_logprobs == "recompute" else 0.0,
        reference=plain if algorithm.kl.coef else 0.0,
    )


def _recomputed(spec: RunSpec, config: ModelConfig, lengths: Sequence[float]) -> float:
    """Return the forward FLOPs that the backward pass repeats; logits are always repeated."""
    forward = forward_flops(config, lengths, spec.learner.lora)
    head = 2.0 * config.hidden_size * config.vocab_size * sum(lengths)
    layers = forward - head
    kept = {"none": layers, "dots": layers, "attention": _attention_flops(config, lengths)}
    return forward - kept.get(spec.learner.remat, 0.0)
