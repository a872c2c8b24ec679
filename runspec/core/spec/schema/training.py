"""Settings of training: the algorithms, the optimizer and the learner's devices.

docs/architecture.md explains the symbols.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from runspec.core.spec.fields import (
    HOT,
    NEWRUN,
    RESTART,
    SITE,
    Block,
    Count,
    CountOrZero,
    Devices,
    Duration,
    FloatType,
    NonNegative,
    Positive,
    Processes,
    Rollouts,
    Share,
    Size,
    Speed,
    Tokens,
    Unit,
)


class Clip(Block):
    """Bounds of the two-sided surrogate."""

    eps_low: Positive = 0.2
    """The ratio counts down to 1 - eps_low."""
    eps_high: Positive = 0.2
    """The ratio counts up to 1 + eps_high."""
    delta: Positive | None = 4.0
    """Upper bound of the ratio where the advantage is negative; null is off."""


class Kl(Block):
    """Penalty on leaving the reference policy."""

    coef: NonNegative = 0.001
    """beta, its weight in the loss; 0 is off."""
    estimator: Literal["k3"] = "k3"
    """exp(d) - d - 1 with d = log pi_ref - log pi_theta."""
    reference: Literal["initial", "none"] | None = None
    """The reference policy: `initial` is version 0. Null: initial where coef is above 0."""


class Advantage(Block):
    """How rewards of a group become advantages."""

    normalize: Literal["std", "task", "none"] = "std"
    """`std` divides by the group's standard deviation, `task` does so for the task part alone."""


class Importance(Block):
    """Correction from the sampler's policy to pi_old."""

    cap: Positive | None = None
    """Truncated importance weight min(pi_old / mu, cap); null is off."""


class Filters(Block):
    """Which groups are not trained on."""

    zero_variance: bool = True
    """Groups whose re-graded task rewards are all equal."""


class Fill(Block):
    """When a step is full, and what happens when it does not fill."""

    CHANGE = "restart"

    max_groups: Annotated[float, Field(ge=1.0), Unit("times the groups needed")] = 4.0
    """Leases known workers at most this many times the groups needed."""
    min_share: Share = 0.5
    """A step that cannot fill closes with at least this share of its groups."""
    deadline: Duration = 5400.0
    """Time from opening a step until it closes as soon as it has `min_share` of its groups."""


class Algorithm(Block):
    """What a step of a run trains on, and by which loss; `kind` says which of them it is."""

    updates_per_step: Annotated[Count, Unit("optimizer updates")] = 8
    """Optimizer updates of a step, 1 by default for `pretrain` and `sft`. For `grpo`: a step's
    rollouts are cut into so many batches."""


class Grpo(Algorithm):
    """Policy gradient on graded samples of the policy."""

    kind: Literal["grpo"] = "grpo"
    """`grpo`: group-relative policy optimisation, of which GSPO, CISPO, DAPO and Dr. GRPO are
    settings. `pretrain`: cross entropy on all tokens of documents. `sft`: cross entropy on what
    the assistant says in conversations."""
    prompts_per_step: Annotated[Count, Unit("groups")] = 256
    """Problems a rollout step."""
    group_size: Rollouts = 16
    """Samples of each problem, compared with one another."""
    async_level: Annotated[CountOrZero, Unit("steps")] = 2
    """Largest lag: training step minus the policy version that sampled."""
    ratio: Literal["token", "sequence"] = "token"
    """`sequence`: every token takes the geometric mean of its sequence's ratios (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """`cispo`: the clipped ratio is a weight without gradient on A log pi_theta (CISPO)."""
    clip: Clip = Clip()
    """Bounds of the ratio."""
    kl: Kl = Kl()
    """Penalty on leaving the reference policy."""
    entropy_coef: NonNegative = 1e-4
    """c_H, the weight of the entropy in the loss."""
    advantage: Advantage = Advantage()
    """How rewards of a group become advantages."""
    loss_normalizer: Literal["sequence", "token", "constant"] = "sequence"
    """N: the mean per sequence (the paper), the batch's completion tokens, or a constant."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """pi_old: recomputed under the version being trained (the paper), or as sampled."""
    importance: Importance = Importance()
    """Correction from the sampler's policy to pi_old."""
    filters: Filters = Filters()
    """Which groups are not trained on."""
    fill: Fill = Fill()
    """When a step is full."""


class ZLoss(Block):
    """Penalty that keeps the logits near zero."""

    kind: Literal["max_logit", "logsumexp"] = "logsumexp"
    """`logsumexp`: coef (log sum_v exp z_v)^2 at each trained token (PaLM). `max_logit`: coef
    (max_v z_v)^2 (METAGENE-1)."""
    coef: NonNegative = 0.0
    """Weight of the penalty; 0 is off."""


class HeldOut(Block):
    """Documents that a supervised run never trains on."""

    tokens: Annotated[CountOrZero, Unit("tokens")] = 65536
    """Tokens in these documents, about; the seed chooses them. 0: none."""
    every: Annotated[Count, Unit("steps"), RESTART] = 10
    """Steps between two measurements of their loss; the last step has one too."""


class Supervised(Algorithm):
    """Cross entropy over packed documents."""

    updates_per_step: Annotated[Count, Unit("optimizer updates")] = 1
    """Optimizer updates of a step."""
    tokens_per_update: Tokens
    """Positions of an update, padding included; a multiple of `learner.packing.tokens` x
    `learner.packing.rows`."""
    publish_every: Annotated[Count, Unit("steps"), RESTART] = 1
    """Steps between two published versions; the last step has one too."""
    z_loss: ZLoss = ZLoss()
    """Penalty that keeps the logits near zero."""
    held_out: HeldOut = HeldOut()
    """Documents that are never trained on."""


class Pretrain(Supervised):
    """Cross entropy on all tokens of documents."""

    kind: Literal["pretrain"] = "pretrain"
    """See `grpo`."""


class Sft(Supervised):
    """Cross entropy on what the assistant says in conversations."""

    kind: Literal["sft"] = "sft"
    """See `grpo`."""


DEFAULT_KIND = "grpo"


def _kind(value: Any) -> Any:
    """Return the kind that a map names, or that an algorithm has."""
    if isinstance(value, dict):
        return value.get("kind", DEFAULT_KIND)
    return getattr(value, "kind", DEFAULT_KIND)


AnyAlgorithm = Annotated[
    Annotated[Grpo, Tag("grpo")]
    | Annotated[Pretrain, Tag("pretrain")]
    | Annotated[Sft, Tag("sft")],
    Discriminator(_kind),
]
"""One of the algorithms, chosen by `kind`."""


class Optimizer(Block):
    """The update rule and its learning rate.

    A field that `kind` or `schedule` does not use keeps its default; the linter refuses others.
    """

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """`adamw`; `sgd`, with Nesterov momentum; `muon` for the layers' matrices, with adamw for all
    else."""
    lr: Positive
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """For `adamw` and `muon`: decays of the means of the gradient and of its square."""
    eps: Positive = 1e-8
    """For `adamw` and `muon`: added to the root of the second mean."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """For `sgd` and `muon`: decay of the sum, or the mean, of gradients."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay a unit of learning rate."""
    clip_norm: Positive = 1.0
    """Largest global gradient norm."""
    warmup_updates: Annotated[CountOrZero, Unit("optimizer updates")] = 0
    """The learning rate grows linearly over these."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The learning rate after the warm-up: `linear` and `cosine` decay at once, `wsd` stays
    constant and decays linearly in the last `decay_updates` of the run."""
    decay_updates: Annotated[Count | None, Unit("optimizer updates")] = None
    """For `linear`, `cosine` and `wsd`: updates from `lr` down to `final_lr`."""
    final_lr: NonNegative = 0.0
    """For `linear`, `cosine` and `wsd`: learning rate after the decay."""
    max_skipped: Annotated[CountOrZero, Unit("optimizer updates"), RESTART] = 3
    """Updates in a row whose loss or gradient is not finite that are skipped; one more stops."""
    offload: Annotated[bool, RESTART, SITE] = False
    """Keeps the moments in the host's memory between updates."""


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
    """Memory bandwidth of one device; null: as its kind has it."""
    price_per_hour: Annotated[NonNegative | None, Unit("currency an hour, a device"), HOT] = None
    """Price of one device for an hour; null: it costs nothing."""


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
        """Devices of the learner."""
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
    """Values that a layer keeps for the backward pass: with `none` all, with `dots` its matrix
    products, with `attention` its input and the result of attention, with `full` its input, with
    `offload` its input in the host's memory. The others are computed again."""
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
