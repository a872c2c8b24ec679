"""The weight map: which leaf of the JAX tree is which Hugging Face tensor. Read both ways.

A row gives the axes of a leaf and of its tensor by name: V vocabulary, D hidden, F intermediate,
H query heads, K key-value heads, h head size, L layers. Axes in brackets are flattened into one,
the last running fastest; a leaf with the axis L holds all layers, one tensor each. So a row also
says what is transposed, reshaped and stacked. No family here fixes a tensor's dtype: it is that of
the checkpoint, or of the version that is exported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runspec.core.models.config import ModelConfig

if TYPE_CHECKING:  # it is only named: who wants shapes alone needs no numpy
    import numpy as np

Path = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of a family's table."""

    leaf: str
    """Keys of the nested dict, joined by dots."""
    hf_name: str
    """Hugging Face name; `{i}` where there is one tensor a layer."""
    tree: str
    """Axes of the leaf, L first where it is stacked."""
    tensor: str
    """Axes of the tensor, of one layer where stacked."""
    when: str | None = None
    """The flag of `ModelConfig` without which a model has no such leaf."""
    tied: str | None = None
    """The leaf that stands for this one in a model with `tie_word_embeddings`."""


_DECODER = (
    Row("embed", "model.embed_tokens.weight", "V D", "V D"),
    Row("layers.attn_norm", "model.layers.{i}.input_layernorm.weight", "L D", "D"),
    Row("layers.q", "model.layers.{i}.self_attn.q_proj.weight", "L D H h", "(H h) D"),
    Row("layers.q_bias", "model.layers.{i}.self_attn.q_proj.bias", "L H h", "(H h)", "qkv_bias"),
    Row("layers.q_norm", "model.layers.{i}.self_attn.q_norm.weight", "L h", "h", "qk_norm"),
    Row("layers.k", "model.layers.{i}.self_attn.k_proj.weight", "L D K h", "(K h) D"),
    Row("layers.k_bias", "model.layers.{i}.self_attn.k_proj.bias", "L K h", "(K h)", "qkv_bias"),
    Row("layers.k_norm", "model.layers.{i}.self_attn.k_norm.weight", "L h", "h", "qk_norm"),
    Row("layers.v", "model.layers.{i}.self_attn.v_proj.weight", "L D K h", "(K h) D"),
    Row("layers.v_bias", "model.layers.{i}.self_attn.v_proj.bias", "L K h", "(K h)", "qkv_bias"),
    Row("layers.o", "model.layers.{i}.self_attn.o_proj.weight", "L H h D", "D (H h)"),
    Row("layers.o_bias", "model.layers.{i}.self_attn.o_proj.bias", "L D", "D", "output_bias"),
    Row("layers.mlp_norm", "model.layers.{i}.post_attention_layernorm.weight", "L D", "D"),
    Row("layers.gate", "model.layers.{i}.mlp.gate_proj.weight", "L D F", "F D"),
    Row("layers.up", "model.layers.{i}.mlp.up_proj.weight", "L D F", "F D"),
    Row("layers.down", "model.layers.{i}.mlp.down_proj.weight", "L F D", "D F"),
    Row("final_norm", "model.norm.weight", "D", "D"),
    Row("head", "lm_head.weight", "D V", "V D", tied="embed"),
)
TABLES: Mapping[str, tuple[Row, ...]] = {
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "llama": _DECODER,
    "mistral": _DECODER,
}
"""By `model_type`. These families name alike what they share; `when` says what each lacks."""


@dataclass(frozen=True)
class Entry:
    """A row with the sizes of one model: a leaf of its tree and the tensors that it is made of."""

    path: Path
    """Keys of the nested dict, such as ("layers", "q")."""
    hf_name: str
    """Hugging Face name; `{i}` where there is one tensor a layer."""
    shape: tuple[int, ...]
    """Shape in the tree, of one layer where stacked."""
    hf_shape: tuple[int, ...]
    axes: tuple[int, ...]
    """The dimensions of `shape` in the order in which the tensor's bytes run over them."""
    layers: int | None
    """L where the leaf is stacked on axis 0, else None."""

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def tensor_names(self) -> list[str]:
        """The Hugging Face names, in the order of axis 0 where stacked."""
        if self.layers is None:
            return [self.hf_name]
        return [self.hf_name.format(i=layer) for layer in range(self.layers)]

    def inverse_axes(self) -> tuple[int, ...]:
        """The order that undoes `axes`."""
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))

    def to_hf(self, part: np.ndarray) -> np.ndarray:
        """One layer of the leaf as its tensor: a view where numpy can make one, else a copy."""
        return part.transpose(self.axes).reshape(self.hf_shape)

    def to_tree(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor as one layer of the leaf: the inverse of `to_hf`."""
        split = [self.shape[axis] for axis in self.axes]
        return tensor.reshape(split).transpose(self.inverse_axes())


def rows(config: ModelConfig) -> list[Row]:
    """The rows of a model's family that the model has."""
    return [
        row
        for row in TABLES[config.model_type]
        if (row.when is None or getattr(config, row.when))
        and not (row.tied and config.tie_word_embeddings)
    ]


def weight_map(config: ModelConfig) -> list[Entry]:
    """The map of a model: every leaf once, in the order of its family's table."""
    sizes = axis_sizes(config)
    return [entry(row, sizes) for row in rows(config)]


def entry(row: Row, sizes: Mapping[str, int]) -> Entry:
    """A row with the sizes of its axes."""
    tree, groups = row.tree.split(), tensor_axes(row)
    stacked = tree[0] == "L"
    part = tree[1:] if stacked else tree
    return Entry(
        path=tuple(row.leaf.split(".")),
        hf_name=row.hf_name,
        shape=tuple(sizes[axis] for axis in part),
        hf_shape=tuple(math.prod(sizes[axis] for axis in group.split()) for group in groups),
        axes=tuple(part.index(axis) for group in groups for axis in group.split()),
        layers=sizes["L"] if stacked else None,
    )


def tensor_axes(row: Row) -> list[str]:
    """The axes of each dimension of a row's tensor: "(H h) D" is ["H h", "D"]."""
    return [group.strip("()") for group in re.findall(r"\([^)]*\)|\S+", row.tensor)]


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of every axis that the tables name."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "H": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "h": config.head_dim,
        "L": config.num_hidden_layers,
    }


def hf_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every Hugging Face tensor of a model, in the map's order."""
    for leaf in weight_map(config):
        for name in leaf.tensor_names():
            yield name, leaf.hf_shape


def tied_tensors(config: ModelConfig) -> dict[str, str]:
    """Names of the tensors that a tied model does without, and of those that stand for them."""
    if not config.tie_word_embeddings:
        return {}
    names = {row.leaf: row.hf_name for row in TABLES[config.model_type]}
    return {row.hf_name: names[row.tied] for row in TABLES[config.model_type] if row.tied}
