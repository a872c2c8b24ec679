"""Useful FLOPs of training, and MFU: their share of what the devices could do in the time.

    useful = 6 N' T + 6 L H h sum_i n_i^2
    MFU    = useful / (seconds x devices x peak FLOP/s of one device)

N' are the parameters that multiply activations: the matrices of the layers and the head (a tied
embedding as the head, its gather not), without biases and norms; T = sum_i n_i the real tokens,
prompts included, padding not. 6 is two a multiply-add for the forward pass and four for the
backward pass. Attention: 4 H h n^2 forward a layer for scores and values, three times that with
the backward pass, half of it under the causal mask, each sample by itself: 12 L H h n^2 / 2.
What `remat` computes again, pi_old and the reference policy's log-probs are not useful: they take
time and count nothing. With LoRA the matrices are frozen and get no gradients, 4 in place of 6; the
adapters' own are 6.

PaLM's MFU (arXiv 2204.02311, appendix B) is the same but for counting the masked half of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.config import ModelConfig
from runspec.spec.schema import Lora

# Dense bfloat16 FLOP/s of one device, a chip, as JAX names it in `device_kind`.
_TPUS = {
    "TPU v4": 275e12,  # cloud.google.com/tpu/docs/v4
    "TPU v5 lite": 197e12,  # cloud.google.com/tpu/docs/v5e
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # cloud.google.com/tpu/docs/v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # cloud.google.com/tpu/docs/v6e
    "TPU v6e": 918e12,
}
# NVIDIA's data sheets give twice these, for matrices with structured zeros. By how names begin.
_GPUS = {
    "NVIDIA A100": 312e12,  # "NVIDIA A100 Tensor Core GPU" data sheet
    "NVIDIA H100": 989e12,  # "NVIDIA H100 Tensor Core GPU" data sheet, SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,  # "NVIDIA H200 Tensor Core GPU" data sheet, SXM
    "NVIDIA H200 NVL": 835e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name that JAX gives it; None for one not listed."""
    if device_kind in _TPUS:
        return _TPUS[device_kind]
    known = [name for name in _GPUS if device_kind.startswith(name)]
    return _GPUS[max(known, key=len)] if known else None


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[in, out] of each matrix of a layer, by the names of `model.abstract_params`."""
    d, f = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "q": (d, queries),
        "k": (d, keys),
        "v": (d, keys),
        "o": (queries, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }


def matrix_parameters(config: ModelConfig) -> int:
    """N': what multiplies activations, the layers' matrices and the head."""
    layer = sum(rows * columns for rows, columns in matrix_shapes(config).values())
    return config.num_hidden_layers * layer + config.hidden_size * config.vocab_size


def useful_flops(config: ModelConfig, lengths: Sequence[int], lora: Lora | None = None) -> float:
    """Useful FLOPs of one forward and backward pass, by the formula above.

    Args:
        config: the model's shape.
        lengths: n_i, tokens of each sample, prompt and output.
        lora: the adapters that are trained in place of the matrices.
    """
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_dim
    attention = 6.0 * layers * width * squares
    if lora is None:
        return 6.0 * matrix_parameters(config) * tokens + attention
    shapes = matrix_shapes(config)
    adapters = layers * lora.rank * sum(sum(shapes[target]) for target in lora.targets)
    return (4.0 * matrix_parameters(config) + 6.0 * adapters) * tokens + attention


@dataclass(frozen=True)
class Meter:
    """What MFU has to know of a run."""

    config: ModelConfig
    lora: Lora | None
    devices: int
    peak: float | None
    """FLOP/s of one device; None where it is not known, as for CPUs."""

    def mfu(self, lengths: Sequence[int], seconds: float) -> float | None:
        """MFU of training samples of these lengths in that time; None without a peak."""
        if self.peak is None:
            return None
        return useful_flops(self.config, lengths, self.lora) / (seconds * self.devices * self.peak)
