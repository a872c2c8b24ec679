"""What the learner's step needs of a device's memory, from the spec alone."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.config import ModelConfig
from runspec.estimate.logits import chunk_tokens
from runspec.estimate.parameters import WIDTH, lora_parameters, parameters, shard_elements
from runspec.spec.schema import RunSpec


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one device by part, at the moment of a step that needs most: the backward pass."""

    masters: float
    """The trained weights, or adapters, in `learner.master_dtype`."""
    moments: float
    """AdamW's two, float32; 0 on the device with `optimizer.offload`."""
    gradients: float
    """Summed over the microbatches, in the masters' type."""
    published: float
    """The version's bits, under which pi_old is recomputed; 0 with `old_logprobs: sampler`."""
    reference: float
    """Version 0's bits: the reference policy, the frozen base of adapters, or both."""
    activations: float
    """What `learner.remat` keeps of the forward pass of a microbatch."""
    logits: float
    """Of one chunk of positions, and what is made of them."""
    temporaries: float
    """The rest: a layer at work, gathered weights, the gradient of one microbatch."""
    host: float = 0.0
    """In the host's memory, of one device: offloaded moments and layer inputs."""

    @property
    def state(self) -> float:
        """What an update changes and a checkpoint holds."""
        return self.masters + self.moments

    @property
    def total(self) -> float:
        return (
            self.state
            + self.gradients
            + self.published
            + self.reference
            + self.activations
            + self.logits
            + self.temporaries
        )


def learner_memory(spec: RunSpec, config: ModelConfig) -> LearnerMemory:
    """The estimate, for the spec's mesh, packing and remat.

    Args:
        spec: of the run.
        config: shape of the model.
    """
    learner, algorithm, mesh = spec.learner, spec.algorithm, spec.learner.mesh
    tree = parameters(config)
    weights = shard_elements(tree, mesh)
    trained = (
        weights
        if learner.lora is None
        else shard_elements(lora_parameters(config, learner.lora), mesh)
    )
    master, published = WIDTH[learner.master_dtype], WIDTH[spec.broadcast.dtype]
    moments = 8.0 * trained
    rows = learner.packing.rows / (mesh.data * mesh.fsdp)
    positions = rows * learner.packing.tokens / mesh.context
    width = WIDTH[learner.compute_dtype]
    activations = positions * config.hidden_size * width * config.num_hidden_layers
    logits = 3 * 4.0 * chunk_tokens(int(positions), config.vocab_size) * config.vocab_size
    needs_reference = bool(algorithm.kl.coef) or learner.lora is not None
    return LearnerMemory(
        masters=float(master * trained),
        moments=0.0 if spec.optimizer.offload else moments,
        gradients=float(master * trained),
        published=float(published * weights) if algorithm.old_logprobs == "recompute" else 0.0,
        reference=float(published * weights) if needs_reference else 0.0,
        activations=activations,
        logits=logits / mesh.tensor,
        temporaries=float(master * trained),
        host=moments if spec.optimizer.offload else 0.0,
    )
