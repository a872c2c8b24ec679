"""Model shapes and devices as plain data, without JAX: parameters, FLOPs, memory.

Here is the shape of a decoder, read from a Hugging Face config.json, and the table of accelerators
by their names in specs: memory, peak FLOP/s, memory bandwidth.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError, size
from runspec.core.files import read_json
from runspec.core.schema import Hardware, SamplerPool

DEFAULT_THETA = 10000.0
"""Default of transformers for configs without a base."""
KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class Linear:
    """Positions divided by a factor (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Dynamic:
    """NTK scaling whose base grows with a sequence beyond `max_position_embeddings`.

    Up to that length it is plain RoPE, in transformers. Beyond it every key is rotated by an angle
    that depends on the longest sequence of its batch: no function of the sequence, so refused
    (`config.ModelConfig.exact_length`).
    """

    factor: float


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): high frequencies kept, low ones divided, a ramp between."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Multiplies cosine and sine, so scores by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Turns within the original length at which the ramp starts and ends."""
    truncate: bool = True
    """Whether the ramp's ends are rounded outwards to whole dimensions."""


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: as YaRN in purpose, the ramp in wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


Scaling = Linear | Dynamic | Yarn | Llama3
_NAMES = {Linear: "linear", Dynamic: "dynamic", Yarn: "yarn", Llama3: "llama3"}


def parse_rope(config: dict[str, Any], *, place: str) -> tuple[float, Scaling | None]:
    """The base theta and the scaling of a config.json; None is plain RoPE.

    Raises:
        UserError: a variant other than `KINDS`, one per type of layer, a partial rotation, or a
            field that is missing or no number.
    """
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
        raise UserError("RoPE that differs between layers is not supported", place=place)
    for source in (fields, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UserError("partial_rotary_factor is not supported", place=place)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in KINDS:
        raise UserError(
            f"RoPE scaling {kind!r} is not supported",
            place=place,
            remedy=f"use a model with one of these: {', '.join(KINDS)}",
        )
    reader = _Reader(fields, config, place)
    theta = reader.number("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    if theta <= 1:
        raise UserError(f"rope_theta is {theta}, not above 1", place=place)
    match kind:
        case "linear":
            return theta, Linear(reader.number("factor"))
        case "dynamic":
            return theta, Dynamic(reader.number("factor"))
        case "yarn":
            return theta, _yarn(reader)
        case "llama3":
            low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
            if high <= low:
                raise UserError(f"high_freq_factor {high} is not above {low}", place=place)
            return theta, Llama3(reader.number("factor"), low, high, reader.original_length())
    return theta, None


def rope_fields(theta: float, scaling: Scaling | None) -> dict[str, Any]:
    """The fields of a config.json that `parse_rope` reads back the same."""
    if scaling is None:
        return {"rope_theta": theta}
    fields = {"rope_type": _NAMES[type(scaling)], **asdict(scaling)}
    return {"rope_theta": theta, "rope_scaling": fields}


@dataclass(frozen=True)
class _Reader:
    fields: dict[str, Any]
    config: dict[str, Any]
    place: str

    def number(self, name: str, default: Any = None) -> float:
        value: Any = self.fields.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise UserError(f"RoPE's {name} is {value!r}, not a positive number", place=self.place)
        return float(value)

    def original_length(self) -> int:
        """As transformers looks for it: beside the dict, in it, else the model's own length."""
        name = "original_max_position_embeddings"
        places = (self.config.get(name), self.fields.get(name))
        value = next((v for v in places if v is not None), self.config["max_position_embeddings"])
        if type(value) is not int or value < 1:
            raise UserError(f"{name} is {value!r}, not a natural number", place=self.place)
        return value


def _yarn(reader: _Reader) -> Yarn:
    fields, original = reader.fields, reader.original_length()
    if fields.get("factor") is None and "factor" in fields:  # null: the ratio of the lengths
        factor = reader.config["max_position_embeddings"] / original
    else:
        factor = reader.number("factor")

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = temperature(1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        whole = temperature(reader.number("mscale_all_dim"))
        attention = temperature(reader.number("mscale")) / whole
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"RoPE's truncate is {truncate!r}, not a boolean", place=reader.place)
    return Yarn(
        factor,
        original,
        reader.number("attention_factor", attention),
        reader.number("beta_fast", 32.0),
        reader.number("beta_slow", 1.0),
        truncate,
    )


CONFIG_NAME = "config.json"
CLASS_NAME = "exact_tokenizer.py"
"""Code beside a tokenizer that a run made; transformers runs it only by `trust_remote_code`."""
_CLASS = (
    "from transformers import PreTrainedTokenizerFast\n\n\n"
    "class ExactTokenizer(PreTrainedTokenizerFast):\n"
    '    """The tokenizer of tokenizer.json as it stands, for AutoTokenizer."""\n'
)
_REFERENCE = "exact_tokenizer.ExactTokenizer"
# For some families, Qwen 2's among them, AutoTokenizer of transformers 5 takes the family's own
# tokenizer instead of the class that is named here, unless `auto_map` names one.
_CLASS_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "auto_map": {"AutoTokenizer": [_REFERENCE, _REFERENCE]},
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],  # decoders take no others
}
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    CLASS_NAME,
)


def made_tokenizer_files(config: dict[str, Any]) -> dict[str, str]:
    """Return the files beside the tokenizer.json that a run or command makes, by their names.

    Args:
        config: special tokens and chat template, as tokenizer_config.json names them.
    """
    whole = json.dumps({**_CLASS_CONFIG, **config}, indent=2) + "\n"
    return {"tokenizer_config.json": whole, CLASS_NAME: _CLASS}


MAX_BYTES = 1024 * 1024
MAX_LAYERS = 4096
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Fields of `ModelConfig` that are natural numbers."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, with the names of config.json.

    `model_type` names the family for other engines; the other fields determine the computation.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    """Whether attention's output has a bias."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of queries and keys, before RoPE."""
    rope_scaling: Scaling | None = None
    sliding_window: int | None = None
    """Most tokens that a query of some layer sees, itself included; None: all."""

    @property
    def exact_length(self) -> int | None:
        """Longest sequence for which full attention and fixed RoPE are exact; None: any."""
        dynamic = isinstance(self.rope_scaling, Dynamic)
        limits = [self.sliding_window, self.max_position_embeddings if dynamic else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_length(self, tokens: int, *, place: str) -> None:
        """Refuse sequences for which the model would differ from transformers.

        Raises:
            UserError: `tokens` is above `exact_length`.
        """
        limit = self.exact_length
        if limit is not None and tokens > limit:
            cause = "dynamic RoPE" if limit != self.sliding_window else "sliding window"
            raise UserError(
                f"{tokens} tokens in a row, but this model's {cause} begins to tell above {limit}",
                place=place,
                remedy=f"use rows of at most {limit} tokens",
            )


def check_sizes(config: ModelConfig, place: str) -> None:
    """Refuse invalid sizes, on behalf of the reader of a family.

    Raises:
        UserError: a size is not a natural number, or sizes are inconsistent.
    """
    for name in SIZES:
        size = getattr(config, name)
        if type(size) is not int or not 1 <= size < 2**31:
            raise UserError(f"{name} is {size!r}, not a natural number", place=place)
    if config.num_hidden_layers > MAX_LAYERS:
        raise UserError(f"num_hidden_layers is above {MAX_LAYERS}", place=place)
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{config.num_attention_heads} query heads do not share "
            f"{config.num_key_value_heads} key-value heads evenly",
            place=place,
        )
    if config.head_dim % 2:
        raise UserError(f"head_dim is {config.head_dim}: RoPE turns pairs", place=place)
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        raise UserError(f"rms_norm_eps is {config.rms_norm_eps}", place=place)


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return `config.json` of a Hugging Face model directory as a dict.

    Raises:
        UserError: it is unreadable, too large or not a JSON object.
    """
    remedy = "point at a Hugging Face model directory"
    found: dict[str, Any] = read_json(
        model_dir / CONFIG_NAME, MAX_BYTES, "the model's config", remedy=remedy
    )
    return found


_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*")


@dataclass(frozen=True)
class Device:
    """One device: a TPU chip, a GPU, or a virtual device of a CPU. None: unknown."""

    kind: str
    """Name, as in `hardware.kind`."""
    memory: float | None = None
    """Bytes."""
    peak_flops: float | None = None
    """Dense bfloat16 FLOP/s with sums in float32."""
    memory_bandwidth: float | None = None
    """Bytes/s."""
    jax_kinds: tuple[str, ...] = ()
    """JAX's `device_kind`: of a TPU exactly, of a GPU its beginning."""


# Decimal gigabytes, as vendors state them. TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. GPUs:
# NVIDIA's data sheets of the product named; where a sheet gives FLOP/s for matrices with structured
# zeros, half of it. Consumer GPUs: the architecture's white paper, sums in float32.
_KNOWN = (
    Device("cpu"),
    Device("tpu-v4", 32e9, 275e12, 1228e9, ("TPU v4",)),
    Device("tpu-v5e", 16e9, 197e12, 819e9, ("TPU v5 lite", "TPU v5e")),
    Device("tpu-v5p", 95e9, 459e12, 2765e9, ("TPU v5", "TPU v5p")),
    Device("tpu-v6e", 32e9, 918e12, 1640e9, ("TPU v6 lite", "TPU v6e")),
    # SXM; PCIe is the same
    Device("a100-40g", 40e9, 312e12, 1555e9, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    Device("a100-80g", 80e9, 312e12, 2039e9, ("NVIDIA A100",)),  # SXM
    Device("h100-80g", 80e9, 989e12, 3350e9, ("NVIDIA H100",)),  # SXM
    Device("h100-pcie", 80e9, 756e12, 2000e9, ("NVIDIA H100 PCIe",)),
    Device("h100-nvl", 94e9, 835e12, 3900e9, ("NVIDIA H100 NVL",)),
    Device("h200-141g", 141e9, 989e12, 4800e9, ("NVIDIA H200",)),  # SXM
    Device("h200-nvl", 141e9, 835e12, 4800e9, ("NVIDIA H200 NVL",)),
    # of DGX B200: 1440 GB, 72 PFLOP/s fp8, 64 TB/s
    Device("b200-180g", 180e9, 2250e12, 8000e9, ("NVIDIA B200",)),
    Device("l4", 24e9, 121e12, 300e9, ("NVIDIA L4",)),
    Device("l40s", 48e9, 362e12, 864e9, ("NVIDIA L40S",)),
    # "NVIDIA Ampere GA102 GPU Architecture"
    Device("rtx-3090", 24e9, 71e12, 936e9, ("NVIDIA GeForce RTX 3090",)),
    # "NVIDIA Ada GPU Architecture"
    Device("rtx-4090", 24e9, 165e12, 1008e9, ("NVIDIA GeForce RTX 4090",)),
)
DEVICES: dict[str, Device] = {device.kind: device for device in _KNOWN}
"""Devices by `hardware.kind`; specs need no figures for them."""

_FIGURES = ("memory", "peak_flops", "memory_bandwidth")
"""Figures that a spec may set, under the same names."""


def device_of(hardware: Hardware) -> Device:
    """Return the device that a spec names; figures of the spec replace those of the table."""
    known = DEVICES.get(hardware.kind, Device(hardware.kind))
    figures = {name: getattr(hardware, name) for name in _FIGURES}
    return replace(known, **{name: value for name, value in figures.items() if value is not None})


def device_count(hardware: Hardware, slices: int = 1) -> int | None:
    """Return the number of devices of a learner (all `slices` of the topology) or of one replica.

    Args:
        hardware: hardware of the learner or of a pool.
        slices: `learner.mesh.slices`.

    Returns:
        The number from topology, else from count; None without both, or if the topology has
        another form than 4x4x4.
    """
    if hardware.topology is None:
        return hardware.count
    if not _TOPOLOGY.fullmatch(hardware.topology):
        return None
    return slices * prod(int(side) for side in hardware.topology.split("x"))


def jax_device(device_kind: str) -> Device | None:
    """Return the device of a JAX `device_kind`; None if it is not in the table."""
    named = {
        name: device
        for device in _KNOWN
        for name in device.jax_kinds
        if device_kind == name or (not name.startswith("TPU") and device_kind.startswith(name))
    }
    return named[max(named, key=len)] if named else None


def not_accepted(pool: SamplerPool, kind: str, memory: float | None) -> str:
    """Return why a pool takes no worker with such devices; empty if it does.

    Args:
        pool: of the run.
        kind: as in `hardware.kind`.
        memory: bytes of one device; None if unknown.
    """
    accepts, kinds = pool.accepts, pool.accepts.kinds
    if _family(kind) != _family(pool.hardware.kind):
        return f"devices like {pool.hardware.kind} wanted, this is {kind}"
    if kinds is not None and kind not in kinds:
        return f"{', '.join(kinds)} wanted, this is {kind}"
    if accepts.memory is not None and memory is not None and memory < accepts.memory:
        return f"{size(accepts.memory)} of memory a device wanted, {kind} has {size(memory)}"
    return ""


def _family(kind: str) -> str:
    return next((name for name in ("cpu", "tpu") if kind.startswith(name)), "gpu")


def xla_threads(devices: int) -> dict[str, str]:
    """Environment by which virtual CPU devices have threads enough for their collectives.

    XLA's threads are as many as cores or devices, and one that waits in a collective does nothing
    else. A device with two collectives at once can hold them all; then the others never join, and
    XLA aborts the process after 40 s.
    """
    return {"NPROC": str(4 * devices)} if devices > 1 else {}
