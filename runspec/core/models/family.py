"""A model family: its config reader, its table of parameters, and the module that computes it.

The families of this repository are named in `_OURS`; other packages offer theirs as entry points:

    [project.entry-points."runspec.models"]
    olmo2 = "olmo2_family:FAMILY"

The name is the `model_type` of config.json, the value a `Family`. Whatever reads the value needs
no JAX: only the learner imports `Family.module`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from runspec.core.errors import UserError

if TYPE_CHECKING:
    from runspec.core.models.config import ModelConfig

MODELS_GROUP = "runspec.models"
AXES = {
    "V": ("vocab", "vocab_size"),
    "D": ("embed", "hidden_size"),
    "N": ("norm", "hidden_size"),
    "F": ("mlp", "intermediate_size"),
    "H": ("heads", "num_attention_heads"),
    "K": ("kv_heads", "num_key_value_heads"),
    "h": ("head_dim", "head_dim"),
    "L": ("layers", "num_hidden_layers"),
}
"""Logical axis and field of `ModelConfig` of each letter of a `Row`. N is D where it is not cut."""


@dataclass(frozen=True)
class Initial:
    """Initial values of an array: mean + std * normal."""

    mean: float = 0.0
    std: float = 0.0


ONES, ZEROS = Initial(mean=1.0), Initial()


def normal(fan_in: int, gain: float = 1.0) -> Initial:
    """A draw of standard deviation gain / sqrt(fan-in)."""
    return Initial(std=gain * fan_in**-0.5)


@dataclass(frozen=True)
class Row:
    """One parameter of a family: a leaf of the tree and the Hugging Face tensors that make it.

    Axes are letters of `AXES`. Axes in brackets are flattened into one, the last running fastest;
    a leaf with the axis L holds all layers, one tensor each. So a row also says what is transposed,
    reshaped and stacked. A tensor of two dimensions is a matrix [out, in].
    """

    leaf: str
    """Keys of the nested dict, joined by dots; a matrix ends in the name of its module and
    "weight"."""
    hf_name: str
    """Hugging Face name; `{i}` where there is one tensor a layer."""
    tree: str
    """Axes of the leaf, L first where it is stacked."""
    tensor: str
    """Axes of the tensor, of one layer where stacked."""
    mean: float = 0.0
    """Of the initial values."""
    gain: float = 0.0
    """Standard deviation of a matrix's initial values, times sqrt(fan-in)."""
    when: str | None = None
    """The flag of `ModelConfig` without which a model has no such leaf."""
    tied: str | None = None
    """The leaf that stands for this one in a model with `tie_word_embeddings`."""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys of the nested dict."""
        return tuple(self.leaf.split("."))

    @property
    def matrix(self) -> str | None:
        """The name of a layer's matrix, such as "q"; None for any other row."""
        is_matrix = self.tree.startswith("L ") and len(self.tensor_axes()) == 2
        return self.path[-2] if is_matrix else None

    def tensor_axes(self) -> list[str]:
        """The axes of each dimension of the tensor: "(H h) D" is ["H h", "D"]."""
        return [group.strip("()") for group in re.findall(r"\([^)]*\)|\S+", self.tensor)]

    def adapters(self) -> tuple[Row, Row]:
        """A and B of a matrix's low-rank adapter, by the names of PEFT; r is their rank.

        A is drawn from N(0, 1 / (3 fan-in)), the variance of PEFT's uniform draw; B is 0.
        """
        out, into = self.tensor_axes()
        leaf = self.leaf.removesuffix("weight")
        name = f"base_model.model.{self.hf_name.removesuffix('.weight')}"
        return (
            Row(f"{leaf}a", f"{name}.lora_A.weight", f"L {into} r", f"r ({into})", gain=3**-0.5),
            Row(f"{leaf}b", f"{name}.lora_B.weight", f"L r {out}", f"({out}) r"),
        )


def layer_rows(*rows: Row) -> tuple[Row, ...]:
    """Rows of one layer, named from there, as rows of all layers, stacked on axis 0."""
    return tuple(
        replace(
            row,
            leaf=f"layers.{row.leaf}",
            hf_name=f"model.layers.{{i}}.{row.hf_name}",
            tree=f"L {row.tree}",
        )
        for row in rows
    )


@dataclass(frozen=True)
class Family:
    """What is known of all models of one `model_type`."""

    read: Callable[[dict[str, Any], str], ModelConfig]
    """(config.json, its place for messages) -> the shape: a `ModelConfig`, or a frozen dataclass
    that extends it with fields of the family's own. Raises `UserError` for what the module does not
    compute."""
    table: tuple[Row, ...]
    """Every parameter that a model of the family may have."""
    module: str
    """The `nnx` module as "package.file:Class", a `learner_jax.model.Policy`."""

    def rows(self, config: ModelConfig) -> list[Row]:
        """The rows of the parameters that a model has."""
        return [
            row
            for row in self.table
            if (row.when is None or getattr(config, row.when))
            and not (row.tied and config.tie_word_embeddings)
        ]


_OURS = {
    name: EntryPoint(name, "runspec.core.models.decoder:FAMILY", MODELS_GROUP)
    for name in ("qwen2", "qwen3", "llama", "mistral")
}


def family(model_type: str, *, place: str = "model_type") -> Family:
    """The family of a `model_type`; `place` says where it is named.

    Raises:
        UserError: nobody offers it, several packages do, or what is offered is no `Family`.
    """
    offered = [_OURS[model_type]] if model_type in _OURS else _offered(model_type)
    if not offered:
        names = {*_OURS, *(point.name for point in entry_points(group=MODELS_GROUP))}
        raise UserError(
            f"model_type {model_type!r} is not supported",
            place=place,
            remedy=f"use a model of one of these families: {', '.join(sorted(names))}; or install "
            f"a package that offers it as an entry point of {MODELS_GROUP} (docs/models.md)",
        )
    if len(offered) > 1:
        packages = ", ".join(sorted(map(_package, offered)))
        raise UserError(
            f"model_type {model_type!r} is offered by several packages: {packages}",
            place=f"entry points of {MODELS_GROUP}",
            remedy="uninstall all of them but one",
        )
    return load_named(offered[0], Family)


@cache
def _offered(model_type: str) -> list[EntryPoint]:
    return list(entry_points(group=MODELS_GROUP, name=model_type))


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module.partition(".")[0]


def load_named(point: EntryPoint, kind: type) -> Any:
    """What an entry point of `MODELS_GROUP` names, an instance of `kind`.

    Raises:
        UserError: it cannot be imported, or is of another type; names the package and the remedy.
    """
    package = _package(point)
    place = f"entry point {point.name} = {point.value!r} of {MODELS_GROUP}, package {package}"
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"the model family cannot be loaded: {error}",
            place=place,
            remedy=f"install what {package} needs, or correct its entry point",
        ) from error
    if not isinstance(found, kind):
        raise UserError(
            f"a {type(found).__name__} is offered, where a {kind.__name__} is wanted",
            place=place,
            remedy=f"let the entry point of {package} name a {kind.__name__} (docs/models.md)",
        )
    return found
