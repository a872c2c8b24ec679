"""Settings of training: the algorithms and the optimizer.

docs/architecture.md explains the symbols.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from runspec.core.spec.fields import (
    RESTART,
    SITE,
    Block,
    Count,
    CountOrZero,
    Duration,
    NonNegative,
    Positive,
    Rollouts,
    Share,
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
