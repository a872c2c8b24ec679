"""The weight map: which leaf of the JAX tree is which Hugging Face tensor. Read both ways.

Hugging Face stores the matrix of a linear layer as [out, in], one tensor a layer; the tree stores
it as [in, out] with heads split, all L layers stacked on axis 0. Sizes: V vocabulary, D hidden,
F intermediate, H query heads, K key-value heads, h head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.config import ModelConfig

if TYPE_CHECKING:  # it is only named: who wants shapes alone needs no numpy
    import numpy as np

Path = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One leaf of the tree and the tensors that it is made of."""

    path: Path
    """Keys of the nested dict, such as ("layers", "q")."""
    hf_name: str
    """Hugging Face name; `{layer}` where there is one tensor a layer."""
    shape: tuple[int, ...]
    """Shape in the tree, of one layer where stacked."""
    hf_shape: tuple[int, ...]
    transpose: bool = False
    """Whether the tensor is the [out, in] transpose of the leaf flattened to [in, out]."""
    layers: int | None = None
    """L where the leaf is stacked on axis 0, else None."""
    inputs: int = 1
    """How many dimensions of the leaf are the `in` of a transposed tensor."""

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def tensor_names(self) -> list[str]:
        """The Hugging Face names, in the order of axis 0 where stacked."""
        if self.layers is None:
            return [self.hf_name]
        return [self.hf_name.format(layer=layer) for layer in range(self.layers)]

    def tensor_axes(self) -> tuple[int, ...]:
        """The dimensions of `shape` in the order in which the tensor's bytes run over them."""
        axes = tuple(range(len(self.shape)))
        return axes[self.inputs :] + axes[: self.inputs] if self.transpose else axes

    def to_hf(self, part: np.ndarray) -> np.ndarray:
        """One layer of the leaf as its tensor: a view where numpy can make one, else a copy."""
        if self.transpose:
            return part.reshape(self.hf_shape[::-1]).T
        return part.reshape(self.hf_shape)

    def to_tree(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor as one layer of the leaf: the inverse of `to_hf`."""
        return (tensor.T if self.transpose else tensor).reshape(self.shape)


def weight_map(config: ModelConfig) -> list[Entry]:
    """The map of a model: every leaf once, in the order of the tree's definition.

    What a model does not have (biases, q/k norms) has no entry; nor has a tied head, of which the
    embedding is the only copy.
    """
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    q_heads, kv_heads, h = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    n_layers = config.num_hidden_layers

    def layer(leaf: str, name: str, shape: tuple[int, ...]) -> Entry:
        hf_shape = (math.prod(shape),)
        return Entry(("layers", leaf), _LAYER + name, shape, hf_shape, layers=n_layers)

    def linear(leaf: str, name: str, shape: tuple[int, ...], inputs: int = 1) -> Entry:
        hf_shape = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
        return Entry(("layers", leaf), _LAYER + name, shape, hf_shape, True, n_layers, inputs)

    entries = [
        Entry(("embed",), "model.embed_tokens.weight", (v, d), (v, d)),
        layer("attn_norm", "input_layernorm.weight", (d,)),
        linear("q", "self_attn.q_proj.weight", (d, q_heads, h)),
        layer("q_bias", "self_attn.q_proj.bias", (q_heads, h)),
        layer("q_norm", "self_attn.q_norm.weight", (h,)),
        linear("k", "self_attn.k_proj.weight", (d, kv_heads, h)),
        layer("k_bias", "self_attn.k_proj.bias", (kv_heads, h)),
        layer("k_norm", "self_attn.k_norm.weight", (h,)),
        linear("v", "self_attn.v_proj.weight", (d, kv_heads, h)),
        layer("v_bias", "self_attn.v_proj.bias", (kv_heads, h)),
        linear("o", "self_attn.o_proj.weight", (q_heads, h, d), inputs=2),
        layer("o_bias", "self_attn.o_proj.bias", (d,)),
        layer("mlp_norm", "post_attention_layernorm.weight", (d,)),
        linear("gate", "mlp.gate_proj.weight", (d, f)),
        linear("up", "mlp.up_proj.weight", (d, f)),
        linear("down", "mlp.down_proj.weight", (f, d)),
        Entry(("final_norm",), "model.norm.weight", (d,), (d,)),
        Entry(("head",), "lm_head.weight", (d, v), (v, d), transpose=True),
    ]
    absent: set[str] = set()
    if not config.qkv_bias:
        absent |= {"q_bias", "k_bias", "v_bias"}
    if not config.output_bias:
        absent.add("o_bias")
    if not config.qk_norm:
        absent |= {"q_norm", "k_norm"}
    if config.tie_word_embeddings:
        absent.add("head")
    return [entry for entry in entries if entry.path[-1] not in absent]


_LAYER = "model.layers.{layer}."


def hf_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every Hugging Face tensor of a model, in the map's order."""
    for entry in weight_map(config):
        for name in entry.tensor_names():
            yield name, entry.hf_shape
