"""Model families, each with its config reader, table of parameters and module; a spec's model.

`_OURS` names the families of this repository: one decoder, read from their config.json. Other
packages offer families as entry points:

    [project.entry-points."runspec.models"]
    olmo2 = "olmo2_family:FAMILY"

The name is the `model_type` of config.json, the value a `Family`. Reading the value needs no JAX:
only the learner imports `Family.module`.

A spec's model has its shape from the spec, a local config.json, or a shipped config. `named/` holds
the config.json of known repositories, with the fields that determine the weights and the
computation. So commands know the shape before any file of the model is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.core.models import (
    CONFIG_NAME,
    SIZES,
    ModelConfig,
    check_sizes,
    parse_rope,
    read_config,
    rope_fields,
)
from runspec.core.schema import RunSpec

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
"""Logical axis and field of `ModelConfig` by letter of a `Row`. N is D without sharding."""


@dataclass(frozen=True)
class Initial:
    """Initial values of an array: mean + std * normal."""

    mean: float = 0.0
    std: float = 0.0


ONES, ZEROS = Initial(mean=1.0), Initial()


def normal(fan_in: int, gain: float = 1.0) -> Initial:
    """Return a normal distribution with standard deviation gain / sqrt(fan-in)."""
    return Initial(std=gain * fan_in**-0.5)


@dataclass(frozen=True)
class Row:
    """One parameter of a family: a leaf of the tree and its Hugging Face tensors.

    Axes are letters of `AXES`. Axes in brackets are flattened into one, in row-major order. A leaf
    with the axis L stacks the tensors of all layers. So a row defines transposes, reshapes and
    stacking. A tensor of two dimensions is a matrix [out, in].
    """

    leaf: str
    """Keys of the nested dict, joined by dots; a matrix ends in the name of its module and
    "weight"."""
    hf_name: str
    """Hugging Face name, with `{i}` if there is one tensor a layer."""
    tree: str
    """Axes of the leaf; L comes first if layers are stacked."""
    tensor: str
    """Axes of the tensor of one layer."""
    mean: float = 0.0
    """Mean of the initial values."""
    gain: float = 0.0
    """Standard deviation of a matrix's initial values, times sqrt(fan-in)."""
    when: str | None = None
    """Flag of `ModelConfig` that a model needs to have this leaf."""
    tied: str | None = None
    """Leaf that replaces this one in a model with `tie_word_embeddings`."""

    @property
    def path(self) -> tuple[str, ...]:
        """Keys of the nested dict."""
        return tuple(self.leaf.split("."))

    @property
    def matrix(self) -> str | None:
        """Name of a layer's matrix, such as "q"; None for any other row."""
        is_matrix = self.tree.startswith("L ") and len(self.tensor_axes()) == 2
        return self.path[-2] if is_matrix else None

    def tensor_axes(self) -> list[str]:
        """Return the axes of each dimension of the tensor: "(H h) D" gives ["H h", "D"]."""
        return [group.strip("()") for group in re.findall(r"\([^)]*\)|\S+", self.tensor)]

    def adapters(self) -> tuple[Row, Row]:
        """Return the rows A and B of a matrix's low-rank adapter, by PEFT's names; r is the rank.

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
    """Turn the rows of one layer into rows of all layers, stacked on axis 0."""
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
    """Models of one `model_type`."""

    read: Callable[[dict[str, Any], str], ModelConfig]
    """Reads the shape from a config.json and its path, which is for messages.

    It returns a `ModelConfig`, or a frozen dataclass that extends it with fields of the family. It
    raises `UserError` for features that the module does not compute."""
    table: tuple[Row, ...]
    """All parameters that a model of the family may have."""
    module: str
    """`nnx` module, a `learner_jax.model.Policy`, as "package.file:Class"."""

    def rows(self, config: ModelConfig) -> list[Row]:
        """Return the rows of the parameters that a model has."""
        return [
            row
            for row in self.table
            if (row.when is None or getattr(config, row.when))
            and not (row.tied and config.tie_word_embeddings)
        ]


def family(model_type: str, *, place: str = "model_type") -> Family:
    """Return the family of a `model_type`; `place` is for messages.

    Raises:
        UserError: no package or several packages offer it, or the entry point is not a `Family`.
    """
    if model_type in _OURS:
        return FAMILY
    offered = _offered(model_type)
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
    """Load an entry point of `MODELS_GROUP`, an instance of `kind`.

    Raises:
        UserError: it cannot be imported, or is of another type.
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


def parse_config(config: dict[str, Any], *, place: str) -> ModelConfig:
    """Parse a config.json by the reader of its family.

    Raises:
        UserError: the family is unknown, its module does not compute a feature, or a field is
            missing or invalid.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"model_type {model_type!r} is not supported",
            place=place,
            remedy="point at the config.json of a language model",
        )
    return family(model_type, place=place).read(config, place)


def load_config(model_dir: Path) -> ModelConfig:
    """Parse `config.json` of a Hugging Face model directory."""
    return parse_config(read_config(model_dir), place=str(model_dir / CONFIG_NAME))


_FOLDER = resources.files("runspec.core.models") / "named"


def model_config(spec: RunSpec, folder: Path = Path()) -> ModelConfig | None:
    """Return the shape of the spec's model; None if it is not known on this machine.

    Args:
        spec: names the model.
        folder: the base of a relative `model.hf` directory.

    Raises:
        UserError: a local config.json cannot be read, or its family is not supported.
    """
    shape, hf = spec.model.shape, spec.model.hf
    if shape is not None:
        fields: dict[str, Any] = shape.model_dump(mode="json", exclude_none=True)
        fields.setdefault("head_dim", shape.hidden_size // shape.num_attention_heads)
        # No window unless said: transformers assumes one for some families.
        fields |= {"max_position_embeddings": spec.model.max_context, "sliding_window": None}
        return parse_config(fields, place="model.shape")
    if hf is None:
        return None
    with suppress(OSError):  # the name of a repository may be no valid path
        directory = folder / expand_user(Path(hf))
        if (directory / CONFIG_NAME).is_file():
            return load_config(directory)
    return named_config(hf)


@cache
def named_config(hf: str) -> ModelConfig | None:
    """Return the shape of a model that ships with runspec; None for any other."""
    shape = named_model(hf)
    return None if shape is None else parse_config(shape, place=f"{hf}/config.json")


def model_names() -> list[str]:
    """Return the models whose shape ships with runspec, as `model.hf` names them."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name[: -len(".json")].replace("--", "/") for name in files)


def named_model(name: str) -> dict[str, Any] | None:
    """Return the config.json of a model such as `Qwen/QwQ-32B`; None if it does not ship."""
    if name not in model_names():
        return None
    config: dict[str, Any] = json.loads((_FOLDER / f"{name.replace('/', '--')}.json").read_text())
    return config


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""Defaults of transformers by family, for fields missing in config.json."""
_OURS = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""Architecture of the families of this repository, by `model_type`."""
OUTPUT_GAIN = 0.1
"""Factor on the initial values of matrices that write to the residual stream."""
_LAYER = layer_rows(
    Row("attn_norm.weight", "input_layernorm.weight", "N", "N", mean=1.0),
    Row("attention.q.weight", "self_attn.q_proj.weight", "D H h", "(H h) D", gain=1.0),
    Row("attention.q.bias", "self_attn.q_proj.bias", "H h", "(H h)", when="qkv_bias"),
    Row("attention.q_norm.weight", "self_attn.q_norm.weight", "h", "h", mean=1.0, when="qk_norm"),
    Row("attention.k.weight", "self_attn.k_proj.weight", "D K h", "(K h) D", gain=1.0),
    Row("attention.k.bias", "self_attn.k_proj.bias", "K h", "(K h)", when="qkv_bias"),
    Row("attention.k_norm.weight", "self_attn.k_norm.weight", "h", "h", mean=1.0, when="qk_norm"),
    Row("attention.v.weight", "self_attn.v_proj.weight", "D K h", "(K h) D", gain=1.0),
    Row("attention.v.bias", "self_attn.v_proj.bias", "K h", "(K h)", when="qkv_bias"),
    Row("attention.o.weight", "self_attn.o_proj.weight", "H h D", "D (H h)", gain=OUTPUT_GAIN),
    Row("attention.o.bias", "self_attn.o_proj.bias", "N", "N", when="output_bias"),
    Row("mlp_norm.weight", "post_attention_layernorm.weight", "N", "N", mean=1.0),
    Row("mlp.gate.weight", "mlp.gate_proj.weight", "D F", "F D", gain=1.0),
    Row("mlp.up.weight", "mlp.up_proj.weight", "D F", "F D", gain=1.0),
    Row("mlp.down.weight", "mlp.down_proj.weight", "F D", "D F", gain=OUTPUT_GAIN),
)
TABLE = (
    Row("embed", "model.embed_tokens.weight", "V D", "V D", gain=1.0),
    *_LAYER,
    Row("final_norm.weight", "model.norm.weight", "N", "N", mean=1.0),
    Row("head", "lm_head.weight", "D V", "V D", gain=1.0, tied="embed"),
)
"""Parameters of all these families; `when` names the flag of those that some lack."""


def read_shape(config: dict[str, Any], place: str) -> ModelConfig:
    """Read a config.json of any transformers version from 4.40 on.

    Raises:
        UserError: transformers would compute a feature that this model lacks, or a field is missing
            or invalid.
    """
    family = config["model_type"]
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act {activation!r} is not supported", place=place)
    # What transformers or vLLM compute and this model does not.
    refused = ["mlp_bias", "dual_chunk_attention_config", "quantization_config"]
    if family == "mistral":
        refused.append("attention_bias")  # transformers ignores it, vLLM does not
    if name := next((name for name in refused if config.get(name)), None):
        raise UserError(f"{name} is not supported", place=place)
    fields = {**_DEFAULTS[family], **config}
    biased = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    try:
        heads = fields["num_attention_heads"]
        theta, scaling = parse_rope(config, place=place)
        if fields.get("num_key_value_heads") is None:
            fields["num_key_value_heads"] = heads
        if fields.get("head_dim") is None:
            fields["head_dim"] = fields["hidden_size"] // heads
        parsed = ModelConfig(
            model_type=family,
            **{name: fields[name] for name in SIZES},
            rope_theta=theta,
            rms_norm_eps=float(fields["rms_norm_eps"]),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or biased,
            output_bias=biased,
            qk_norm=family == "qwen3",
            rope_scaling=scaling,
            sliding_window=_sliding_window(fields, family, place),
        )
    except KeyError as error:
        raise UserError(f"field {error} is missing", place=place) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"a field is not a number: {error}", place=place) from error
    check_sizes(parsed, place)
    return parsed


def _sliding_window(fields: dict[str, Any], family: str, place: str) -> int | None:
    """Return the sliding window, or None if every layer has full attention."""
    if family == "llama":
        return None
    window = fields["sliding_window"]
    kinds = fields.get("layer_types")
    if family != "mistral":
        none_slides = kinds is None and fields["max_window_layers"] >= fields["num_hidden_layers"]
        if none_slides or not fields.get("use_sliding_window"):
            window = None
    if kinds is not None:
        if not isinstance(kinds, list) or set(kinds) - {"full_attention", "sliding_attention"}:
            raise UserError("layer_types: only full and sliding attention are known", place=place)
        if "sliding_attention" in kinds and window is None:
            raise UserError("layer_types has sliding layers, but there is no window", place=place)
        if "sliding_attention" not in kinds and family != "mistral":
            window = None
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"sliding_window is {window!r}, not a natural number", place=place)
    return window


FAMILY = Family(read_shape, TABLE, "learner_jax.decoder:Decoder")


def hf_config(
    config: ModelConfig, *, dtype: str, eos_token_id: int, pad_token_id: int
) -> dict[str, Any]:
    """Return the config.json of a model that a run makes.

    Args:
        config: the shape.
        dtype: type of the stored weights, `float32` or `bfloat16`.
        eos_token_id, pad_token_id: of the tokenizer.

    Raises:
        ValueError: no config.json of the family can describe the shape.
    """
    written = {
        "architectures": [_OURS[config.model_type]],
        "model_type": config.model_type,
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in SIZES},
        **rope_fields(config.rope_theta, config.rope_scaling),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
    }
    if config.model_type != "llama":
        written["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        written["use_sliding_window"] = config.sliding_window is not None
        written["max_window_layers"] = 0
    if config.model_type in ("llama", "qwen3"):
        written["attention_bias"] = config.output_bias
    if parse_config(written, place="hf_config") != config:
        raise ValueError(f"no {config.model_type} config.json says {config}")
    return written
