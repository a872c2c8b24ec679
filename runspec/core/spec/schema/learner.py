"""The learner: its devices, how they divide the work, what is kept and what recomputed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.spec.fields import HOT, NEWRUN, SITE, Unit
from runspec.core.spec.schema.block import Block, FloatType
from runspec.core.spec.values import (
    Count,
    Devices,
    NonNegative,
    Positive,
    Processes,
    Size,
    Speed,
    Tokens,
)


class Hardware(Block):
    """Accelerators of one kind. Kinds that `runspec explain hardware` lists need no figures."""

    CHANGE = "restart"

    kind: str
    """`cpu`, `h100-80g`, `tpu-v5p`, ..."""
    topology: str | None = None
    """TPU slice, like 4x4x4; the learner's are `learner.mesh.slices` of it."""
    count: Devices | None = None
    """Devices; follows from the topology and the slices on a TPU. On a CPU: virtual devices. In a
    pool: of one replica; of `verify`: of one validator."""
    memory: Annotated[Size | None, HOT] = None
    """Memory of one device; null: as its kind has it."""
    peak_flops: Annotated[Speed | None, Unit("bfloat16 FLOP/s"), HOT] = None
    """Dense peak of one device; null: as its kind has it."""
    memory_bandwidth: Annotated[Speed | None, Unit("bytes/s"), HOT] = None
    """Of one device's memory; null: as its kind has it."""
    price_per_hour: Annotated[NonNegative | None, Unit("currency an hour, a device"), HOT] = None
    """What one device costs an hour; null: nothing is paid for it."""


class Mesh(Block):
    """How the learner's devices divide the work; the product is their number."""

    CHANGE = "restart"

    data: Devices = 1
    """Copies of the parameters, each on its own rows."""
    fsdp: Devices = 1
    """Rows too; parameters and optimizer state are cut over it."""
    context: Devices = 1
    """Positions of a row."""
    tensor: Devices = 1
    """Heads, MLP columns and vocabulary."""
    slices: Annotated[Count, Unit("slices")] = 1
    """TPU slices, or groups of hosts, joined by the slower data-centre network."""
    slice_axis: Literal["data", "fsdp"] = "data"
    """The axis that crosses from slice to slice; `slices` divides its size."""

    @property
    def devices(self) -> int:
        """Of the learner."""
        return self.data * self.fsdp * self.context * self.tensor


class Packing(Block):
    """The fixed shape of a microbatch."""

    CHANGE = "restart"

    tokens: Tokens
    """Length of a packed row."""
    rows: Annotated[Count, Unit("rows")]
    """Rows of one microbatch, over all devices."""


Remat = Literal["none", "dots", "attention", "full", "offload"]
Attention = Literal["auto", "xla", "splash", "cudnn"]


class Lora(Block):
    """Low-rank adapters: W + (alpha / rank) A B, of which A and B are trained and W is not."""

    rank: Annotated[Count, Unit("columns")] = 16
    """Columns of A and rows of B."""
    alpha: Positive = 32.0
    """Scale: the product counts alpha / rank."""
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(
        ["q", "k", "v", "o", "gate", "up", "down"], min_length=1
    )
    """The matrices of every layer that get adapters."""


class Learner(Block):
    """The process, or processes, that train."""

    CHANGE = "restart"

    hardware: Annotated[Hardware, SITE]
    """Its accelerators."""
    hosts: Annotated[Processes, SITE] = 1
    """Processes that join one program through `jax.distributed`, an equal share of devices each."""
    mesh: Annotated[Mesh, SITE] = Mesh()
    """How its devices divide the work."""
    packing: Annotated[Packing, SITE]
    """The fixed shape of a microbatch; the loss does not depend on it."""
    remat: Annotated[Remat, SITE] = "full"
    """What a layer keeps for the backward pass: `none` everything, `dots` its matrix products,
    `attention` its input and what attention gave, `full` its input, `offload` its input, in the
    host's memory. The rest is computed again."""
    attention: Annotated[Attention, SITE] = "auto"
    """The kernel: `splash` on TPU, `cudnn` on GPU, `xla` everywhere; `auto` goes by platform."""
    compute_dtype: Annotated[FloatType, NEWRUN] = "bfloat16"
    """Type of activations and of the weights in matrix products."""
    master_dtype: Annotated[FloatType, NEWRUN] = "float32"
    """Type of the trained weights between updates; the moments are float32."""
    logits_chunk: Annotated[Tokens | None, SITE] = None
    """Positions of a device whose logits exist at a time; chosen when null."""
    lora: Annotated[Lora | None, NEWRUN] = None
    """Trains adapters instead of the weights."""
    compile_cache: Annotated[str | None, SITE] = None
    """Folder of compiled programs, shared by runs; `~/.cache/runspec/compiled` when null."""
