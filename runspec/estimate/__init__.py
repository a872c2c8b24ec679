"""What a run will need and how long it will take, computed from its spec alone.

Here is the device memory of the learner's step.

A step holds its state, the version's bits, the reference's bits and the summed gradient. (Steps of
`pretrain` and `sft` hold no version; the base of adapters counts as the reference.) One
microbatch needs more, at the worst of three moments of its backward pass. With W elements of the
layers on a device, E = D V / tensor elements of the embedding or the head gathered over fsdp, P
positions, b bytes of `compute_dtype` and m of `master_dtype`:

    head       kept + logits + 4 E + 3 b P D
    layers     kept + 4 E + m W + b P (6 F + 6 D + 3 H h) + 3 b D F
    embedding  4 E + m W + 2 x 4 E

If masters and products have different types, b (W + 2 E) comes on top: XLA moves the cast, and the
gathering of embedding and head, out of the loop over microbatches. 4 E is the float32 gradient of
the head, which is summed over fsdp after the last layer; m W is the gradient of the layers; 3 b D F
is gathered matrices. Each layer keeps these bytes a position, by `remat`:

    full       b D
    offload    nothing; three layers' inputs are in transfer
    attention  b (D + H h) + 4 H: input, attention's output, log-sum-exp
    dots       b (2 D + 2 H h + 2 K h + 2 F) + 4 H: the same, and outputs of q, k, v, o, gate and up
    none       16 D + b (4 D + 6 F + 3 H h + 2 K h) + 4 H, and 10 (H + K) h for norms of q and k;
               also the layers' weights in `compute_dtype`

H, K and F are the numbers of a device, divided by tensor. The formulas follow from `learner_jax`'s
model, remat and logprobs. Only the 6, 6 and 3 of `layers`, the doubled 4 E of `embedding` and CODE
are measured with libtpu 0.0.42. docs/plan.md compares the sums with the compiler's. With adapters W
and E have no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from runspec.core.models import ModelConfig
from runspec.core.models import parameters as model
from runspec.core.models.parameters import WIDTH
from runspec.core.schema import Mesh, RunSpec

CODE = 48e6
"""Bytes of the program on TPUs."""
_WIDE = WIDTH["float32"]
_MLP, _STREAM, _HEADS, _MATRICES = 6, 6, 3, 3


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one device by part, at the moment of a step that needs the most."""

    masters: float
    """Trained weights, or adapters, in `learner.master_dtype`."""
    moments: float
    """Moments of the optimizer, float32; 0 on the device with `optimizer.offload`."""
    gradients: float
    """Gradients summed over the microbatches, float32."""
    published: float
    """Bits of the version that recomputes pi_old; 0 with `old_logprobs: sampler`, and in supervised
    runs."""
    reference: float
    """Bits of version 0: the reference policy, the frozen base of adapters, or both."""
    activations: float
    """Activations that `learner.remat` keeps of the forward pass of a microbatch."""
    logits: float
    """Logits of one chunk and their gradient; 0 if `moment` is not `head`."""
    temporaries: float
    """Other bytes: copies in `compute_dtype`, gathered weights, temporaries of a layer, the
    gradient of one microbatch, the batch, the program."""
    moment: str
    """Moment of the largest need: `head`, `layers` or `embedding`."""
    host: float = 0.0
    """Bytes in the host's memory for one device: offloaded moments and layer inputs."""

    @property
    def state(self) -> float:
        """Bytes that an update changes and a checkpoint holds."""
        return self.masters + self.moments

    @property
    def total(self) -> float:
        """Bytes that `learner_jax aot` reports as needed by `accumulate`."""
        held = self.state + self.gradients + self.published + self.reference
        return held + self.activations + self.logits + self.temporaries


def learner_memory(spec: RunSpec, config: ModelConfig) -> LearnerMemory:
    """Estimate the memory for the spec's mesh, packing and remat.

    Args:
        spec: spec of the run.
        config: shape of the model.
    """
    learner, mesh, h = spec.learner, spec.learner.mesh, config.head_dim
    tree, trained = model.parameters(config), model.trained_parameters(config, learner.lora)
    sizes = _Sizes(
        model=model.shard_elements(tree, mesh),
        trained=model.shard_elements(trained, mesh),
        layers=model.shard_elements(tree["layers"], mesh),
        table=tree["embed"].shard_size(mesh, whole="fsdp"),
        positions=model.device_positions(learner),
        width=WIDTH[learner.compute_dtype],
        mlp=_cut(config.intermediate_size, mesh.tensor),
        heads=_cut(config.num_attention_heads, mesh.tensor) * h,
        kv_heads=_cut(config.num_key_value_heads, mesh.tensor) * h,
    )
    holds_version, holds_reference = model.held_weights(spec)
    published = WIDTH[spec.broadcast.dtype]
    moments = _WIDE * moment_elements(spec.optimizer.kind, trained, mesh)
    offload = spec.optimizer.offload
    moment, activations, logits, temporaries = _worst_moment(spec, config, sizes)
    layer_inputs = sizes.activation(config.hidden_size) * config.num_hidden_layers
    return LearnerMemory(
        masters=WIDTH[learner.master_dtype] * sizes.trained,
        moments=0.0 if offload else moments,
        gradients=_WIDE * sizes.trained,
        published=published * sizes.model if holds_version else 0.0,
        reference=published * sizes.model if holds_reference else 0.0,
        activations=activations,
        logits=logits,
        temporaries=temporaries + _batch(spec, sizes) + CODE,
        moment=moment,
        host=(moments if offload else 0.0) + (layer_inputs if learner.remat == "offload" else 0.0),
    )


def state_bytes(spec: RunSpec, config: ModelConfig) -> int:
    """Return about the bytes of a full state: masters and moments of what is trained."""
    lora, trained = spec.learner.lora, model.trained_parameters(config, spec.learner.lora)
    masters = WIDTH[spec.learner.master_dtype] * model.trained_count(config, lora)
    return masters + _WIDE * moment_elements(spec.optimizer.kind, trained, Mesh())


def moment_elements(kind: str, trained: model.Tree, mesh: Mesh) -> int:
    """Return the float32 numbers that an optimizer keeps on one device.

    Args:
        kind: of `optimizer`.
        trained: tree of the trained parameters.
        mesh: that cuts them.
    """
    count = model.shard_elements(trained, mesh)
    if kind == "muon":
        matrices = [leaf for leaf in model.leaves(trained) if leaf.inputs is not None]
        return 2 * count - sum(leaf.shard_size(mesh) for leaf in matrices)
    return count if kind == "sgd" else 2 * count


@dataclass(frozen=True)
class _Sizes:
    """Elements on one device, and bytes of a layer's outputs."""

    model: int
    trained: int
    layers: int
    """W."""
    table: int
    """E."""
    positions: int
    """P."""
    width: int
    """Bytes of `compute_dtype`."""
    mlp: int
    """F / tensor."""
    heads: int
    """H h / tensor."""
    kv_heads: int
    """K h / tensor."""

    def activation(self, features: float) -> float:
        """Bytes of [P, features] in `compute_dtype`."""
        return self.width * self.positions * features


def _cut(size: int, by: int) -> int:
    """A dimension that is not divided is whole."""
    return size // by if size % by == 0 else size


def _worst_moment(
    spec: RunSpec, config: ModelConfig, sizes: _Sizes
) -> tuple[str, float, float, float]:
    """(its name, activations, logits, temporaries)."""
    learner, stream = spec.learner, config.hidden_size
    full = learner.lora is None
    stored = learner.master_dtype if full else spec.broadcast.dtype
    cast = stored != learner.compute_dtype
    copies = sizes.width * (sizes.layers + 2 * sizes.table) if cast else 0.0
    # Where nothing is cast they are gathered when they are used.
    head = 0.0 if cast else float(sizes.width * sizes.table)
    table = _WIDE * sizes.table if full else 0.0
    of_layers = WIDTH[learner.master_dtype] * (sizes.layers if full else sizes.trained)
    kept = _kept(spec, config, sizes)
    at_work = sizes.activation(_MLP * sizes.mlp + _STREAM * stream + _HEADS * sizes.heads)
    gathered = float(sizes.width * _MATRICES * stream * sizes.mlp)
    if learner.mesh.context > 1:
        gathered += 4 * sizes.activation(sizes.kv_heads) * learner.mesh.context
    # The logits of a chunk and their gradient, or all that are kept.
    vocabulary, positions = config.vocab_size, sizes.positions
    if positions * vocabulary > model.KEPT_LOGITS:
        positions = model.logits_chunk(learner, vocabulary)
    local = _cut(vocabulary, learner.mesh.tensor)
    logits = float((_WIDE + sizes.width) * positions * local)
    moments = [
        ("head", kept, logits, head + table + 3 * sizes.activation(stream)),
        ("layers", kept, 0.0, table + of_layers + at_work + gathered),
        ("embedding", 0.0, 0.0, 3 * table + of_layers),
    ]
    name, activations, logits, rest = max(moments, key=lambda moment: sum(moment[1:]))
    return name, activations, logits, copies + rest


def _kept(spec: RunSpec, config: ModelConfig, sizes: _Sizes) -> float:
    """Bytes that the forward pass keeps of all layers."""
    d, f, queries, keys = config.hidden_size, sizes.mlp, sizes.heads, sizes.kv_heads
    remat, layers = spec.learner.remat, config.num_hidden_layers
    if remat == "offload":
        return 3 * sizes.activation(d)
    if remat == "full":
        return layers * sizes.activation(d)
    normaliser = _WIDE * sizes.positions * queries / config.head_dim
    if remat == "attention":
        return layers * (sizes.activation(d + queries) + normaliser)
    if remat == "dots":
        return layers * (sizes.activation(2 * (d + f + queries + keys)) + normaliser)
    norms = 10 * (queries + keys) if config.qk_norm else 0
    wide = sizes.positions * (4 * _WIDE * d + norms)
    narrow = sizes.activation(4 * d + 6 * f + 3 * queries + 2 * keys)
    weights = sizes.width * sizes.layers
    return layers * (wide + narrow + normaliser) + weights


def update_microbatches(spec: RunSpec) -> int:
    """Return the microbatches of an update of a supervised run."""
    assert spec.supervised is not None, "only supervised runs have updates of a fixed size"
    packing = spec.learner.packing
    return -(-spec.supervised.tokens_per_update // (packing.tokens * packing.rows))


def _batch(spec: RunSpec, sizes: _Sizes) -> float:
    """Bytes of an update's tokens and loss inputs: nine numbers of 4 bytes a position, eight
    without a reference, of as many positions as its rollouts have at their longest; five in a
    supervised run."""
    packing = spec.learner.packing
    if spec.supervised is not None:
        return 4.0 * 5 * sizes.positions * update_microbatches(spec)
    algorithm = spec.grpo
    longest = min(packing.tokens, max(pool.max_model_len for pool in spec.samplers))
    rollouts = -(-algorithm.prompts_per_step // algorithm.updates_per_step) * algorithm.group_size
    microbatches = -(-rollouts * longest // (packing.tokens * packing.rows))
    return 4.0 * (9 if algorithm.kl.coef else 8) * sizes.positions * microbatches
