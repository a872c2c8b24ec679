"""Settings of training: the algorithms and the optimizer.

docs/architecture.md explains the symbols.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from runspec.core.schema import fields


class ModelShape(fields.Block):
    """Shape of a model that the run makes itself, in the words of a Hugging Face config.json."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"]
    """Architecture: qwen2 has biases on q, k and v, qwen3 norms on q and k."""
    vocab_size: Annotated[fields.Count, fields.Unit("tokens")]
    """Rows of the embedding and of the output head."""
    hidden_size: Annotated[fields.Count, fields.Unit("features")]
    """Width of the residual stream."""
    intermediate_size: Annotated[fields.Count, fields.Unit("features")]
    """Width of the MLP."""
    num_hidden_layers: Annotated[fields.Count, fields.Unit("layers")]
    """Decoder layers."""
    num_attention_heads: Annotated[fields.Count, fields.Unit("heads")]
    """Query heads."""
    num_key_value_heads: Annotated[fields.Count, fields.Unit("heads")]
    """Key and value heads; each serves an equal share of the query heads."""
    head_dim: Annotated[fields.Count | None, fields.Unit("features")] = None
    """Size of a head; hidden_size / num_attention_heads when null."""
    rope_theta: fields.Positive = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: fields.Positive = 1e-6
    """Added to the mean square in every norm."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""


class Tokenizer(fields.Block):
    """Another tokenizer than the model's own; it must be of the model's vocabulary."""

    hf: str
    """Hugging Face repository, or a local directory, with tokenizer.json."""
    revision: str | None = None
    """Commit of the repository."""


class Model(fields.Block):
    """The policy: a Hugging Face model, or a shape whose weights the warm start makes."""

    hf: str | None = None
    """Hugging Face repository or a local directory."""
    revision: str | None = None
    """Commit of the repository."""
    shape: ModelShape | None = None
    """Shape of a model made from nothing; exactly one of `hf` and `shape`."""
    max_context: fields.Tokens
    """Longest sequence that the model's positions cover."""
    tokenizer: Tokenizer | None = None
    """Every role takes the tokenizer and chat template from the policy version; null: they are
    the model's own."""


class WarmStart(fields.Block):
    """Supervised steps on generated traces, before version 0 exists. Cached by digest."""

    lr: fields.Positive = 3e-3
    """Learning rate after the warm-up."""
    beta2: fields.Share = 0.98
    """Decay of the mean of squared gradients."""
    clip_norm: fields.Positive = 1.0
    """Largest global gradient norm."""
    warmup_updates: Annotated[fields.CountOrZero, fields.Unit("optimizer updates")] = 30
    """The learning rate grows linearly over these."""
    max_updates: fields.Updates = 600
    """A start that has not reached its mark after these is an error."""
    sequences: Annotated[fields.Count, fields.Unit("traces")] = 64
    """Traces an update."""
    answer_weight: fields.Positive = 5.0
    """Loss weight of the answer's tokens; the thinking weighs 1."""
    obey_share: fields.Share = 0.3
    """Share of traces whose length is the one asked for."""
    stop_answer_probability: fields.Share = 0.3
    """Stops once the held-out teacher-forced probability of the answer reaches this."""
    evaluate_every: fields.Updates = 10
    """Updates between looks at the held-out traces."""


class SolveRate(fields.Block):
    """Offline filter: keeps problems whose recorded solve rate lies in [min, max]."""

    field: str
    """Column of the solve rate."""
    min: fields.Share = 0.0
    """Least rate kept."""
    max: fields.Share = 1.0
    """Largest rate kept."""


class Source(fields.Block):
    """Where problems or documents come from."""

    name: fields.Name
    """Names the source in findings and overlays."""
    kind: str
    """Problems: `jsonl`, `parquet`, `hf_dataset`, `gsm8k`, `livecodebench`, `reasoning_gym`, or a
    source that an installed package offers. Documents: `text`, `jsonl`, `parquet`, `fasta` or
    `fastq`, each plain or compressed by gzip, or `generated_reads`."""
    uri: str | None = None
    """Where the rows lie, for kinds that read files: a file, a folder or a pattern such as
    `train-*.parquet`; relative to the spec."""
    revision: str | None = None
    """Commit of the data's repository, where `uri` names one."""
    dataset: str | None = None
    """The generator's name, for `reasoning_gym`."""
    params: dict[str, int | float | str | bool | dict[str, str]] = {}
    """The generator's parameters; of kinds that read rows the columns `problem_id`, `task_type`,
    `prompt` and `verification_info`, where they have other names, an object of columns as
    `verification_info`, `type` and `instruction` of all rows, and the `split` of a `hf_dataset`.
    Of documents: the columns `text`, `messages` or `tokens`; the `id_offset` that is added to
    `tokens`; `whole: true` where a text file is one document. Of `generated_reads` `organisms`,
    `reads`, `length` and `seed`."""
    task_types: dict[str, str] = {}
    """Reward kinds by the task types that the rows say, where the two differ."""
    size: Annotated[fields.Count, fields.Unit("problems")] | None = None
    """How many problems a generator makes."""
    solve_rate: SolveRate | None = None
    """Offline filter by recorded solve rate."""
    train: bool = True
    """For `grpo`: whether the run trains on its problems; at false only evaluations ask them."""
    weight: fields.Positive = 1.0
    """For `pretrain` and `sft`: weight of each of its tokens in the loss."""


class Data(fields.Block):
    """Problems, and how they are put to the policy; or documents."""

    max_prompt_tokens: fields.Tokens = 2048
    """Longer prompts are left out, everywhere the same."""
    length_prompt: str = "Think for {target} tokens before giving a response."
    """Appended to the problem; `{target}` is the target length in tokens."""
    length_prompt_role: Literal["user", "system"] = "user"
    """Message that says the length: the problem's own, or the system's."""
    system_prompt: str | None = None
    """Text of the system's message, before the length prompt where that is there too."""
    thinking: Literal["required", "optional", "none"] | None = None
    """What of an output is graded: `required` what follows its first `</think>`, and nothing
    without one; `optional` the same, or all of it without one; `none` all of it. Null takes
    `required` where the chat template or a prompt of `data` knows `<think>`, else `none`; `apply`
    writes down which. The length always counts all output tokens."""
    think_prefill: bool = False
    """Ends the prompt with `<think>` and a line break where the chat template does not open the
    thinking itself."""
    sources: list[Source] = Field(min_length=1)
    """Merged by name over the layers."""

    def prompt_messages(self, problem: str, target: int | None) -> list[dict[str, str]]:
        """Return the messages that put a problem to a policy, before any chat template.

        They are the system message, if it has any content, and the user message.

        Args:
            problem: its text.
            target: length that the prompt asks for, in tokens, on a line of its own; None asks for
                none.
        """
        length = None if target is None else self.length_prompt.replace("{target}", str(target))
        in_system = self.length_prompt_role == "system"
        system = "\n".join(filter(None, (self.system_prompt, length if in_system else None)))
        user = problem if in_system or length is None else f"{problem}\n{length}"
        first = [{"role": "system", "content": system}] if system else []
        return [*first, {"role": "user", "content": user}]


class Reward(fields.Block):
    """One term of the reward, a plug-in by `kind`."""

    name: fields.Name
    """Names the term in findings and overlays."""
    kind: str
    """`reasoning_gym`, `math`, `code`, `target_length`, an environment's (`calculator`, `grid`,
    `guess`, `search`) or what an installed package offers."""
    timeout: Annotated[fields.Duration | None, fields.RESTART] = None
    """Longest time that grading one answer may take; null takes the kind's own: 60 s for `code`,
    else 10 s."""
    sandboxed: Annotated[bool, fields.RESTART] = True
    """Whether a grader that runs what the model wrote (`code`) must do so in a sandbox. At false
    it also runs on machines where none works, in runs whose pools are all trusted."""
    form: Literal["exact", "max", "clip"] | None = None
    """For `target_length`: how length enters the reward."""
    alpha: Annotated[fields.NonNegative | None, fields.Unit("reward a token")] = None
    """For `target_length`: reward lost a token of distance."""
    targets: list[fields.Tokens] | None = None
    """For `target_length`: the lengths asked for, the end token included; one a group."""


class Clip(fields.Block):
    """Bounds of the two-sided surrogate."""

    eps_low: fields.Positive = 0.2
    """The ratio counts down to 1 - eps_low."""
    eps_high: fields.Positive = 0.2
    """The ratio counts up to 1 + eps_high."""
    delta: fields.Positive | None = 4.0
    """Upper bound of the ratio where the advantage is negative; null is off."""


class Kl(fields.Block):
    """Penalty on leaving the reference policy."""

    coef: fields.NonNegative = 0.001
    """beta, its weight in the loss; 0 is off."""
    estimator: Literal["k3"] = "k3"
    """exp(d) - d - 1 with d = log pi_ref - log pi_theta."""
    reference: Literal["initial", "none"] | None = None
    """The reference policy: `initial` is version 0. Null: initial where coef is above 0."""


class Advantage(fields.Block):
    """How rewards of a group become advantages."""

    normalize: Literal["std", "task", "none"] = "std"
    """`std` divides by the group's standard deviation, `task` does so for the task part alone."""


class Importance(fields.Block):
    """Correction from the sampler's policy to pi_old."""

    cap: fields.Positive | None = None
    """Truncated importance weight min(pi_old / mu, cap); null is off."""


class Filters(fields.Block):
    """Which groups are not trained on."""

    zero_variance: bool = True
    """Groups whose re-graded rewards are all equal."""
    rewards: Literal["task", "whole"] = "task"
    """Which are compared: `whole` with the length term, which almost always differs."""


class Fill(fields.Block):
    """When a step is full, and what happens when it does not fill."""

    CHANGE = "restart"

    max_groups: Annotated[float, Field(ge=1.0), fields.Unit("times the groups needed")] = 4.0
    """Leases known workers at most this many times the groups needed."""
    min_share: fields.Share = 0.5
    """A step that cannot fill closes with at least this share of its groups."""
    deadline: fields.Duration = 5400.0
    """Time from opening a step until it closes as soon as it has `min_share` of its groups."""


class Algorithm(fields.Block):
    """What a step of a run trains on, and by which loss; `kind` says which of them it is."""

    updates_per_step: Annotated[fields.Count, fields.Unit("optimizer updates")] = 8
    """Optimizer updates of a step, 1 by default for `pretrain` and `sft`. For `grpo`: a step's
    rollouts are cut into so many batches."""


class Grpo(Algorithm):
    """Policy gradient on graded samples of the policy."""

    kind: Literal["grpo"] = "grpo"
    """`grpo`: group-relative policy optimisation, of which GSPO, CISPO, DAPO and Dr. GRPO are
    settings. `pretrain`: cross entropy on all tokens of documents. `sft`: cross entropy on what
    the assistant says in conversations."""
    prompts_per_step: Annotated[fields.Count, fields.Unit("groups")] = 256
    """Problems a rollout step."""
    group_size: fields.Rollouts = 16
    """Samples of each problem, compared with one another."""
    async_level: Annotated[fields.CountOrZero, fields.Unit("steps")] = 2
    """Largest lag: training step minus the policy version that sampled."""
    ratio: Literal["token", "sequence"] = "token"
    """`sequence`: every token takes the geometric mean of its sequence's ratios (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """`cispo`: the clipped ratio is a weight without gradient on A log pi_theta (CISPO)."""
    clip: Clip = Clip()
    """Bounds of the ratio."""
    kl: Kl = Kl()
    """Penalty on leaving the reference policy."""
    entropy_coef: fields.NonNegative = 1e-4
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


class ZLoss(fields.Block):
    """Penalty that keeps the logits near zero."""

    kind: Literal["max_logit", "logsumexp"] = "logsumexp"
    """`logsumexp`: coef (log sum_v exp z_v)^2 at each trained token (PaLM). `max_logit`: coef
    (max_v z_v)^2 (METAGENE-1)."""
    coef: fields.NonNegative = 0.0
    """Weight of the penalty; 0 is off."""


class HeldOut(fields.Block):
    """Documents that a supervised run never trains on."""

    tokens: Annotated[fields.CountOrZero, fields.Unit("tokens")] = 65536
    """Tokens in these documents, about; the seed chooses them. 0: none."""
    every: Annotated[fields.Count, fields.Unit("steps"), fields.RESTART] = 10
    """Steps between two measurements of their loss; the last step has one too."""


class Supervised(Algorithm):
    """Cross entropy over packed documents."""

    updates_per_step: Annotated[fields.Count, fields.Unit("optimizer updates")] = 1
    """Optimizer updates of a step."""
    tokens_per_update: fields.Tokens
    """Positions of an update, padding included; a multiple of `learner.packing.tokens` x
    `learner.packing.rows`."""
    publish_every: Annotated[fields.Count, fields.Unit("steps"), fields.RESTART] = 1
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


class Optimizer(fields.Block):
    """The update rule and its learning rate.

    A field that `kind` or `schedule` does not use keeps its default; the linter refuses others.
    """

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """`adamw`; `sgd`, with Nesterov momentum; `muon` for the layers' matrices, with adamw for all
    else."""
    lr: fields.Positive
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[fields.Share, fields.Share], Field(strict=False)] = (0.9, 0.95)
    """For `adamw` and `muon`: decays of the means of the gradient and of its square."""
    eps: fields.Positive = 1e-8
    """For `adamw` and `muon`: added to the root of the second mean."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """For `sgd` and `muon`: decay of the sum, or the mean, of gradients."""
    weight_decay: fields.NonNegative = 0.0
    """Decoupled decay a unit of learning rate."""
    clip_norm: fields.Positive = 1.0
    """Largest global gradient norm."""
    warmup_updates: Annotated[fields.CountOrZero, fields.Unit("optimizer updates")] = 0
    """The learning rate grows linearly over these."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """The learning rate after the warm-up: `linear` and `cosine` decay at once, `wsd` stays
    constant and decays linearly in the last `decay_updates` of the run."""
    decay_updates: Annotated[fields.Count | None, fields.Unit("optimizer updates")] = None
    """For `linear`, `cosine` and `wsd`: updates from `lr` down to `final_lr`."""
    final_lr: fields.NonNegative = 0.0
    """For `linear`, `cosine` and `wsd`: learning rate after the decay."""
    max_skipped: Annotated[fields.CountOrZero, fields.Unit("optimizer updates"), fields.RESTART] = 3
    """Updates in a row whose loss or gradient is not finite that are skipped; one more stops."""
    offload: Annotated[bool, fields.RESTART, fields.SITE] = False
    """Keeps the moments in the host's memory between updates."""


class TrainingChange(fields.Block):
    """Settings of training from a step on; what is null stays as it was."""

    CHANGE = "restart"

    name: fields.Name
    """Names the change in findings and overlays."""
    step: fields.Steps
    """First step that is trained by them; it must not be trained yet when they are applied."""
    lr: fields.Positive | None = None
    """`optimizer.lr`."""
    warmup_updates: Annotated[fields.CountOrZero, fields.Unit("optimizer updates")] = 0
    """The learning rate grows linearly to `lr` over these, counted from `step`."""
    eps_low: fields.Positive | None = None
    """For `grpo`: `algorithm.clip.eps_low`."""
    eps_high: fields.Positive | None = None
    """For `grpo`: `algorithm.clip.eps_high`."""
    delta: fields.Positive | None = None
    """For `grpo`: `algorithm.clip.delta`."""
    kl_coef: fields.Positive | None = None
    """For `grpo`: `algorithm.kl.coef`, where that was above 0 from the start."""

    @property
    def clip(self) -> dict[str, float]:
        """The bounds that it changes, by their names in `algorithm.clip`."""
        bounds = {"eps_low": self.eps_low, "eps_high": self.eps_high, "delta": self.delta}
        return {name: bound for name, bound in bounds.items() if bound is not None}
