"""Parameters of a model, and the FLOPs and device memory that follow from its shape.

The table of the model's family (`family.Row`) defines the parameters: shapes, logical axes and the
mesh axes that shard them. FLOPs of training are useful ones, and all that a step computes:

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

Device memory is that of KV cache, logits and prefill, for the engines and for the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models.family import AXES, ZEROS, Initial, Row, family, normal
from runspec.core.schema import Learner, Lora, Mesh, RunSpec, SamplerPool

MESH_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    "shard": ("data", "fsdp", "context"),
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "norm": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "rank": (),
}
"""Axes of `learner.mesh` by logical axis."""
WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by `FloatType`."""


@dataclass(frozen=True)
class Parameter:
    """One array of the parameter tree."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension, a key of `MESH_AXES`."""
    initial: Initial = ZEROS
    inputs: int | None = None
    """Number of contracted dimensions of a layer's matrix, after the layer axis; else None."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    def shard_size(self, mesh: Mesh, *, whole: str | None = None) -> int:
        """Return the elements on one device.

        A dimension that its mesh axes do not divide is not sharded.

        Args:
            mesh: the mesh that shards it.
            whole: a mesh axis over which it is gathered.
        """
        size = 1
        for length, axis in zip(self.shape, self.axes, strict=True):
            cut = prod(getattr(mesh, name) for name in MESH_AXES[axis] if name != whole)
            size *= length // cut if length % cut == 0 else length
        return size


Tree = Mapping[str, Any]
"""Nested dict of `Parameter`."""


def parameters(config: ModelConfig) -> dict[str, Any]:
    """Return the tree of a model, such as {"embed": ..., "layers": {...}, "final_norm": {...}}.

    Parameters that the config excludes are absent, and so is a tied head.
    """
    return _tree(family(config.model_type).rows(config), axis_sizes(config))


def adapter_rows(config: ModelConfig, targets: Sequence[str]) -> list[Row]:
    """Return the rows of the adapters, two for each target, in the table's order.

    Args:
        config: shape of the base model.
        targets: matrices of a layer, such as "q" and "down".

    Raises:
        UserError: a target is not a matrix of the family.
    """
    matrices = [row for row in family(config.model_type).rows(config) if row.matrix in targets]
    if missing := set(targets) - {row.matrix for row in matrices}:
        raise UserError(
            f"{config.model_type} has no matrix {', '.join(sorted(missing))}",
            place="learner.lora.targets",
            remedy=f"choose of {', '.join(matrix_shapes(config))}",
        )
    return [adapter for row in matrices for adapter in row.adapters()]


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of every axis of the tables by its letter."""
    return {letter: getattr(config, field) for letter, (_, field) in AXES.items()}


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return [in, out] of each matrix of a layer by its name, such as "q"."""
    sizes = axis_sizes(config)
    shapes = {}
    for row in family(config.model_type).rows(config):
        if row.matrix is not None:
            out, into = (_product(axes, sizes) for axes in row.tensor_axes())
            shapes[row.matrix] = into, out
    return shapes


def _tree(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for row in rows:
        node = tree
        for key in row.path[:-1]:
            node = node.setdefault(key, {})
        axes = row.tree.split()
        fan_in = _product(row.tensor_axes()[-1], sizes)
        node[row.path[-1]] = Parameter(
            tuple(sizes[axis] for axis in axes),
            tuple("rank" if axis == "r" else AXES[axis][0] for axis in axes),
            Initial(row.mean, normal(fan_in, row.gain).std),
            len(row.tensor_axes()[-1].split()) if row.matrix else None,
        )
    return tree


def _product(axes: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axis in axes.split())


def leaves(tree: Tree) -> Iterator[Parameter]:
    """Iterate over the arrays of a tree."""
    for node in tree.values():
        if isinstance(node, Parameter):
            yield node
        else:
            yield from leaves(node)


def shard_elements(tree: Tree, mesh: Mesh) -> int:
    """Return the elements of a tree on one device, as `Parameter.shard_size`."""
    return sum(leaf.shard_size(mesh) for leaf in leaves(tree))


def parameter_count(config: ModelConfig) -> int:
    """Return the exact number of parameters of a model; a tied head counts once."""
    return sum(leaf.size for leaf in leaves(parameters(config)))


def trained_parameters(config: ModelConfig, lora: Lora | None) -> dict[str, Any]:
    """Return the tree of the trained parameters: the model's, or the adapters'.

    Of each target of adapters these are A [L, in..., rank] and B [L, rank, out...].
    """
    if lora is None:
        return parameters(config)
    return _tree(adapter_rows(config, lora.targets), axis_sizes(config) | {"r": lora.rank})


def trained_count(config: ModelConfig, lora: Lora | None) -> int:
    """Return the number of trained parameters: all, or those of the adapters."""
    return sum(leaf.size for leaf in leaves(trained_parameters(config, lora)))


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
    useful, forward = useful_flops(config, one, lora), forward_flops(config, one, lora)
    # What the backward pass repeats: all but what is kept. Logits are always repeated.
    layers = forward - 2.0 * config.hidden_size * config.vocab_size * mean_tokens
    kept = {"none": layers, "dots": layers, "attention": _attention_flops(config, one)}
    recompute = forward - kept.get(spec.learner.remat, 0.0)
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


MEMORY_UTILIZATION = 0.92
"""vLLM's default `gpu_memory_utilization`, version 0.32."""
MAX_SEQUENCES = 256
"""Most sequences that vLLM decodes at a time under `sampler.engine`."""
CPU_BLOCK_TOKENS = 32
"""Smallest KV block that vLLM's CPU attention runs well on; small blocks let a group share a short
prompt."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention computes on CPUs: `get_supported_head_sizes` in
`vllm/v1/attention/backends/cpu_attn.py`, version 0.32."""
CPU_KV_BYTES = (64 << 20, 4 << 30)
"""Least and most bytes of the KV cache on a CPU."""
MAX_LOGITS = 2**29
"""Most logits of a chunk over all shards of the vocabulary: 2 GiB in float32."""
KEPT_LOGITS = 2**26
"""Most logits of a device that are kept for the backward pass: 256 MiB in float32."""
MIN_CHUNK, MAX_CHUNK = 512, 2048
"""Bounds of a chunk's positions. Each chunk reads and writes the head's gradient (D x V numbers)
once for chunk x D x V products; small chunks skip more positions without a target."""
PREFILL_FACTOR = 1.5
"""Memory of a version during prefill, relative to the size of its weights."""


def kv_token_bytes(pool: SamplerPool, config: ModelConfig) -> float:
    """Return the bytes of one token's keys and values on one device, in the pool's dtype."""
    heads = -(-config.num_key_value_heads // pool.parallel.tensor)
    return 2.0 * config.num_hidden_layers * heads * config.head_dim * WIDTH[pool.dtype]


def cpu_kv_bytes(pool: SamplerPool, config: ModelConfig) -> int:
    """Return the bytes of the KV cache on a CPU: room for all sequences, within CPU_KV_BYTES."""
    tokens = -(-pool.max_model_len // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    wanted = MAX_SEQUENCES * tokens * int(kv_token_bytes(pool, config))
    least, most = CPU_KV_BYTES
    return min(max(wanted, least), most)


def chunk_tokens(positions: int, vocab: int) -> int:
    """Return how many positions' logits a device computes at a time, a power of two.

    It is an eighth of `positions`, 512 to 2048; fewer if the vocabulary is above 262,144.
    """
    wanted = min(max(positions // 8, MIN_CHUNK), MAX_CHUNK, MAX_LOGITS // vocab)
    return 1 << (max(wanted, 1).bit_length() - 1)


def device_positions(learner: Learner) -> int:
    """Return the positions of a microbatch on one device.

    Rows are cut over data x fsdp, columns over context. Every device of a tensor group has the
    same positions.
    """
    mesh, packing = learner.mesh, learner.packing
    return packing.rows * packing.tokens // (mesh.data * mesh.fsdp * mesh.context)


def logits_chunk(learner: Learner, vocab: int) -> int:
    """Return the positions of a chunk: `learner.logits_chunk` if set, else `chunk_tokens`."""
    positions = device_positions(learner)
    return min(positions, learner.logits_chunk or chunk_tokens(positions, vocab))


def held_weights(spec: RunSpec) -> tuple[bool, bool]:
    """Return whether the learner holds a version's bits through a step, and those of version 0.

    The version's are for pi_old; version 0 is the reference policy or the base of adapters.
    """
    lora = spec.learner.lora is not None
    if spec.supervised is not None:
        return False, lora
    return spec.grpo.old_logprobs == "recompute", lora or spec.grpo.kl.coef > 0


def prefill_bytes(version: float, devices: int) -> float:
    """Return the memory that each of a validator's devices needs, in bytes.

        1.5 x version / devices

    Both engines divide a version evenly, JAX by parameters and torch by layers. The other half
    is for activations, logits and an uneven division.

    Args:
        version: bytes of the weights.
        devices: devices of one validator.
    """
    return PREFILL_FACTOR * version / devices


LEAST_SHARED = 1.25
"""Tokens of a group's samples over its positions from which on a learner shares prompts."""
SHARING_NEEDS = (
    "sharing prompts needs rollouts, learner.mesh.context: 1 and the xla kernel, the one of CPUs"
)


def can_share_prompts(spec: RunSpec, *, cpu: bool) -> bool:
    """Return whether a learner can compute a prompt once for all samples of its group."""
    kernel = spec.learner.attention
    runs = kernel == "xla" or (kernel == "auto" and cpu)
    return runs and spec.supervised is None and spec.learner.mesh.context == 1


def sharing(spec: RunSpec, *, cpu: bool) -> bool:
    """Return whether it does: as `learner.packing.shared_prompts` says; by default on CPUs, where
    samples of the longest kind have enough of their tokens in the prompt."""
    asked = spec.learner.packing.shared_prompts
    if asked is False or not can_share_prompts(spec, cpu=cpu):
        return False
    prompt, size = spec.data.max_prompt_tokens, spec.grpo.group_size
    output = max(pool.max_new_tokens for pool in spec.samplers)
    shared = size * (prompt + output) / (prompt + size * output)
    return asked or (cpu and shared >= LEAST_SHARED)
