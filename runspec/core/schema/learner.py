"""Settings of the learner: its devices, how it divides the work, and islands."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from runspec.core.schema import fields

_LEAST_SILENCE_S = 5.0
_MOST_ISLANDS = 1000


class Hardware(fields.Block):
    """Accelerators of one kind. Kinds that `runspec explain hardware` lists need no figures."""

    CHANGE = "restart"

    kind: str
    """`cpu`, `h100-80g`, `tpu-v5p`, ..."""
    topology: str | None = None
    """TPU slice, like 4x4x4; the learner's are `learner.mesh.slices` of it."""
    count: fields.Devices | None = None
    """Devices; follows from the topology and the slices on a TPU. On a CPU: virtual devices. In a
    pool: of one replica; of `verify`: of one validator."""
    memory: Annotated[fields.Size | None, fields.HOT] = None
    """Memory of one device; null: as its kind has it."""
    peak_flops: Annotated[fields.Speed | None, fields.Unit("bfloat16 FLOP/s"), fields.HOT] = None
    """Dense peak of one device; null: as its kind has it."""
    memory_bandwidth: Annotated[fields.Speed | None, fields.Unit("bytes/s"), fields.HOT] = None
    """Memory bandwidth of one device; null: as its kind has it."""
    price_per_hour: Annotated[
        fields.NonNegative | None, fields.Unit("currency an hour, a device"), fields.HOT
    ] = None
    """Price of one device for an hour; null: it costs nothing."""


class Mesh(fields.Block):
    """How the learner's devices divide the work; the product is their number."""

    CHANGE = "restart"

    data: fields.Devices = 1
    """Copies of the parameters, each on its own rows."""
    fsdp: fields.Devices = 1
    """Rows too; parameters and optimizer state are cut over it."""
    context: fields.Devices = 1
    """Positions of a row."""
    tensor: fields.Devices = 1
    """Heads, MLP columns and vocabulary."""
    slices: Annotated[fields.Count, fields.Unit("slices")] = 1
    """TPU slices, or groups of hosts, joined by the slower data-centre network."""
    slice_axis: Literal["data", "fsdp"] = "data"
    """The axis that crosses from slice to slice; `slices` divides its size."""

    @property
    def devices(self) -> int:
        """Devices of the learner."""
        return self.data * self.fsdp * self.context * self.tensor


class Packing(fields.Block):
    """The fixed shape of a microbatch."""

    CHANGE = "restart"

    tokens: fields.Tokens
    """Length of a packed row."""
    rows: Annotated[fields.Count, fields.Unit("rows")]
    """Rows of one microbatch, over all devices."""
    shared_prompts: bool | None = None
    """Whether the prompt of a group is computed once for all of its samples. Null: on CPUs, unless
    samples of the longest kind have little of their tokens in it."""


Remat = Literal["none", "dots", "attention", "full", "offload"]
Attention = Literal["auto", "xla", "splash", "cudnn"]


class Lora(fields.Block):
    """Low-rank adapters: W + (alpha / rank) A B, of which A and B are trained and W is not."""

    rank: Annotated[fields.Count, fields.Unit("columns")] = 16
    """Columns of A and rows of B."""
    alpha: fields.Positive = 32.0
    """Scale: the product counts alpha / rank."""
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(
        ["q", "k", "v", "o", "gate", "up", "down"], min_length=1
    )
    """The matrices of every layer that get adapters."""


class ShareCodec(fields.Block):
    """How an island's share of a step is written for the others."""

    kind: Literal["float32", "float16", "sparse"] = "float16"
    """`float16` rounds in blocks, each block with its own scale. `sparse` sends the largest
    elements of each block and adds what it leaves out to the next share."""


class Outer(fields.Block):
    """SGD over the mean of the islands' shares, which makes the next version."""

    lr: fields.Positive = 0.7
    """Learning rate; 1 with momentum 0 takes the mean of the islands' parameters."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the sum of means; 0 by default where `learner.islands.codec.kind` is `sparse`."""
    nesterov: bool = True
    """Steps by the mean plus momentum times the sum; false: by the sum."""


class IslandMember(fields.Block):
    """One island and its machine. What is null is as the learner's."""

    CHANGE = "restart"

    name: Annotated[fields.Name, fields.NEWRUN]
    """Names the island in records, keys and roles."""
    url: Annotated[str | None, fields.SITE] = None
    """Where the other islands reach the server of its shares. It listens at an http URL; an https
    URL is of a proxy before it, and the local backend chooses where it listens, as when null."""
    hardware: Annotated[Hardware | None, fields.SITE] = None
    """Its accelerators."""
    mesh: Annotated[Mesh | None, fields.SITE] = None
    """How its devices divide the work."""
    hosts: Annotated[fields.Processes | None, fields.SITE] = None
    """Its processes."""
    rows: Annotated[fields.Count | None, fields.Unit("rows"), fields.SITE] = None
    """Rows of its microbatch, over all its devices; null: `learner.packing.rows`."""
    upload: Annotated[fields.Rate | None, fields.HOT, fields.SITE] = None
    """Bandwidth of its uplink, shared by the islands that fetch from it, for the estimate."""
    download: Annotated[fields.Rate | None, fields.HOT, fields.SITE] = None
    """Bandwidth on which it fetches the others' shares, for the estimate."""
    latency: Annotated[fields.Duration | None, fields.HOT, fields.SITE] = None
    """Round trip to the other islands and the coordinator, for the estimate."""


class Islands(fields.Block):
    """Several programs that train one model, each by its own updates between two versions.

    A step's updates all start at the same version; the mean of what they change makes the next one
    (DiLoCo).
    """

    CHANGE = "restart"

    members: Annotated[list[IslandMember], fields.NEWRUN] = []
    """The islands, merged by name over the layers. The first has the run directory and publishes
    the versions. Exactly one of `members` and `count`."""
    count: Annotated[
        int | None, Field(gt=0, le=_MOST_ISLANDS), fields.Unit("islands"), fields.NEWRUN
    ] = None
    """Makes this many equal members, named 0, 1, 2 and so on. The resolved spec has them as
    `members`."""
    quorum: Annotated[fields.Count | None, fields.Unit("islands")] = None
    """Shares that a step needs; null: those of all islands."""
    grace: fields.Duration = 60.0
    """Time that a step waits for the other shares once it has its quorum; later ones are
    dropped. So is a share of which nothing arrives for this time, at least 5 s."""
    deadline: fields.Duration = 1800.0
    """Time that a step waits for its quorum; then the run stops and names the missing islands."""
    codec: Annotated[ShareCodec, fields.NEWRUN] = ShareCodec()
    """How a share is written."""
    outer: Annotated[Outer, fields.NEWRUN] = Outer()
    """The optimizer that makes the next version."""
    overlap: Annotated[Literal[0, 1], fields.Unit("steps"), fields.NEWRUN] = 0
    """1: an island trains on while its share travels, and takes in the others' one step later."""
    max_norm: fields.Positive | None = None
    """Largest L2 norm of a share; the coordinator refuses a larger one. Null: no bound."""
    min_cosine: Annotated[float | None, Field(ge=-1.0, le=1.0)] = None
    """Least cosine of a share to the mean of the others; one below is refused. Null: it is only
    reported."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """Make the members that a count stands for, and the momentum that the codec asks for."""
        if not isinstance(value, dict):
            return value
        count, codec, outer = value.get("count"), value.get("codec"), value.get("outer", {})
        if not value.get("members") and type(count) is int and 0 < count <= _MOST_ISLANDS:
            members = [{"name": str(index)} for index in range(count)]
            value = value | {"members": members, "count": None}
        kind = codec.get("kind") if isinstance(codec, dict) else None
        kind = codec.kind if isinstance(codec, ShareCodec) else kind
        if kind == "sparse" and isinstance(outer, dict):
            value = value | {"outer": {"momentum": 0.0, **outer}}
        return value

    @property
    def silence(self) -> float:
        """Seconds without a byte after which a share is said to be lost."""
        return max(self.grace, _LEAST_SILENCE_S)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.count is not None or not self.members:
            raise ValueError("exactly one of members and count was expected")
        return self


class Learner(fields.Block):
    """The process, or processes, that train."""

    CHANGE = "restart"

    hardware: Annotated[Hardware, fields.SITE]
    """Its accelerators."""
    hosts: Annotated[fields.Processes, fields.SITE] = 1
    """Processes that join one program through `jax.distributed`, an equal share of devices each."""
    mesh: Annotated[Mesh, fields.SITE] = Mesh()
    """How its devices divide the work."""
    packing: Annotated[Packing, fields.SITE]
    """The fixed shape of a microbatch; the loss does not depend on it."""
    remat: Annotated[Remat, fields.SITE] = "full"
    """Values that a layer keeps for the backward pass: with `none` all, with `dots` its matrix
    products, with `attention` its input and the result of attention, with `full` its input, with
    `offload` its input in the host's memory. The others are computed again."""
    attention: Annotated[Attention, fields.SITE] = "auto"
    """The kernel: `splash` on TPU, `cudnn` on GPU, `xla` everywhere; `auto` goes by platform."""
    compute_dtype: Annotated[fields.FloatType, fields.NEWRUN] = "bfloat16"
    """Type of activations and of the weights in matrix products."""
    master_dtype: Annotated[fields.FloatType, fields.NEWRUN] = "float32"
    """Type of the trained weights between updates; the moments are float32."""
    logits_chunk: Annotated[fields.Tokens | None, fields.SITE] = None
    """Positions of a device whose logits exist at a time; chosen when null."""
    lora: Annotated[Lora | None, fields.NEWRUN] = None
    """Trains adapters instead of the weights."""
    compile_cache: Annotated[str | None, fields.SITE] = None
    """Folder of compiled programs, shared by runs; `~/.cache/runspec/compiled` when null."""
    islands: Annotated[Islands | None, fields.NEWRUN] = None
    """Several programs that train one model, each on its own machine; null: one program."""
