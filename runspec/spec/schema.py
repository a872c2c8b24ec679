"""The schema of runspec/v1: plain frozen data, every field with its meaning and unit.

Roles read a resolved spec through these classes and through nothing else. How YAML layers become
one resolved spec is the business of `runspec.spec.load`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from runspec.spec.values import Count, Duration, Name, Positive, PublicKey, Share, VariableName

FloatType = Literal["float32", "bfloat16"]


class Block(BaseModel):
    """A map of the spec: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelShape(Block):
    """Shape of a model that the run makes itself, in the words of a Hugging Face config.json."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"]
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count | None = None
    """Size of a head; hidden_size / num_attention_heads when null."""
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False


class Model(Block):
    """The policy: a Hugging Face model, or a shape whose weights the warm start makes."""

    hf: str | None = None
    """Hugging Face repository or a local directory."""
    revision: str | None = None
    """Commit of the repository."""
    shape: ModelShape | None = None
    """Shape of a model made from nothing; exactly one of `hf` and `shape`."""
    max_context: Count
    """Longest sequence that the model's positions cover, in tokens."""


class WarmStart(Block):
    """Supervised steps on generated traces, before version 0 exists. Cached by digest."""

    lr: Positive = 3e-3
    beta2: Share = 0.98
    clip_norm: Positive = 1.0
    warmup_updates: int = Field(30, ge=0)
    max_updates: Count = 600
    """Updates after which a start that has not reached its mark is an error."""
    sequences: Count = 64
    """Traces an update."""
    answer_weight: Positive = 5.0
    """Loss weight of the answer's tokens; the thinking weighs 1."""
    obey_share: Share = 0.3
    """Share of traces whose length is the one asked for."""
    stop_answer_probability: Share = 0.3
    """Stops once the held-out teacher-forced probability of the answer reaches this."""
    evaluate_every: Count = 10
    """Updates between looks at the held-out traces."""


class SolveRate(Block):
    """Offline filter: keeps problems whose recorded solve rate lies in [min, max]."""

    field: str
    min: Share = 0.0
    max: Share = 1.0


class Source(Block):
    """Where problems come from."""

    name: Name
    kind: str
    """`reasoning_gym`, `parquet`, ...: a source that an installed package offers."""
    uri: str | None = None
    """Where the rows lie, for kinds that read files."""
    dataset: str | None = None
    """The generator's name, for `reasoning_gym`."""
    params: dict[str, int | float | str | bool] = {}
    """The generator's parameters."""
    size: Count | None = None
    """How many problems a generator makes."""
    solve_rate: SolveRate | None = None


class Data(Block):
    max_prompt_tokens: Count
    """Longer prompts are left out, everywhere the same."""
    length_prompt: str = "Think for {target} tokens before giving a response."
    """Appended to the problem; `{target}` is the target length in tokens."""
    sources: list[Source] = Field(min_length=1)


class Clip(Block):
    """Bounds of the two-sided surrogate."""

    eps_low: Positive = 0.2
    eps_high: Positive = 0.2
    delta: Positive | None = 4.0
    """Upper bound of the ratio where the advantage is negative; null is off."""


class Kl(Block):
    coef: float = Field(0.001, ge=0.0)
    estimator: Literal["k3"] = "k3"


class Advantage(Block):
    normalize: Literal["std", "task", "none"] = "std"


class Importance(Block):
    cap: Positive | None = None
    """Truncated importance weight min(pi_old / mu, cap); null is off."""


class Filters(Block):
    zero_variance: bool = True
    """Groups whose re-graded task rewards are all equal are not trained on."""


class Fill(Block):
    """When a step is full, and what happens when it does not fill."""

    max_groups: float = Field(4.0, ge=1.0)
    """Leases at most this many times the groups needed."""
    min_share: Share = 0.5
    """A step that cannot fill closes with at least this share of its groups; else it stalls."""
    deadline: Duration = 5400.0
    """Time from opening a step to giving up on filling it."""


class Algorithm(Block):
    kind: Literal["grpo"] = "grpo"
    prompts_per_step: Count = 256
    group_size: int = Field(16, ge=2)
    updates_per_step: Count = 8
    async_level: int = Field(2, ge=0)
    """Largest lag: training step minus the policy version that sampled."""
    ratio: Literal["token", "sequence"] = "token"
    """`sequence`: every token takes the geometric mean of its sequence's ratios (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """`cispo`: the clipped ratio is a weight without gradient on A log pi_theta (CISPO)."""
    clip: Clip = Clip()
    kl: Kl = Kl()
    entropy_coef: float = Field(1e-4, ge=0.0)
    advantage: Advantage = Advantage()
    loss_normalizer: Literal["sequence", "token", "constant"] = "sequence"
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    importance: Importance = Importance()
    filters: Filters = Filters()
    fill: Fill = Fill()


class Optimizer(Block):
    kind: Literal["adamw"] = "adamw"
    lr: Positive
    betas: tuple[Share, Share] = Field((0.9, 0.95), strict=False)
    eps: Positive = 1e-8
    weight_decay: float = Field(0.0, ge=0.0)
    clip_norm: Positive = 1.0
    warmup_updates: int = Field(0, ge=0)
    schedule: Literal["constant"] = "constant"
    max_skipped: int = Field(3, ge=0)
    """Updates in a row whose loss or gradient is not finite that are skipped; one more stops."""
    offload: bool = False
    """Keeps the moments in the host's memory between updates."""


class Reward(Block):
    """One term of the reward, a plug-in by `kind`."""

    name: Name
    kind: str
    """`reasoning_gym`, `math`, `code`, `target_length` or what an installed package offers."""
    timeout: Duration | None = None
    form: Literal["exact", "max", "clip"] | None = None
    """For `target_length`: how length enters the reward."""
    alpha: float | None = Field(None, ge=0.0)
    """For `target_length`: reward lost a token of distance."""
    targets: list[Count] | None = None
    """For `target_length`: the lengths asked for, in tokens; one a group."""


class Hardware(Block):
    kind: str
    """`cpu`, `h100-80g`, `tpu-v5p`, ..."""
    topology: str | None = None
    """TPU slice, like 4x4x4; the learner's are `learner.mesh.slices` of it."""
    count: Count | None = None
    """Devices; follows from the topology and the slices on a TPU. On a CPU: virtual devices."""


class Mesh(Block):
    """How the learner's devices divide the work; the product is their number."""

    data: Count = 1
    """Copies of the parameters, each on its own rows."""
    fsdp: Count = 1
    """Rows too; parameters and optimizer state are cut over it."""
    context: Count = 1
    """Positions of a row."""
    tensor: Count = 1
    """Heads, MLP columns and vocabulary."""
    slices: Count = 1
    """TPU slices, or groups of hosts, joined by the slower data-centre network."""
    slice_axis: Literal["data", "fsdp"] = "data"
    """The axis that crosses from slice to slice; `slices` divides its size."""


class Packing(Block):
    tokens: Count
    """Length of a packed row."""
    rows: Count
    """Rows of one microbatch, over all devices."""


Remat = Literal["none", "dots", "attention", "full", "offload"]
Attention = Literal["auto", "xla", "splash", "cudnn"]


class Lora(Block):
    """Low-rank adapters: W + (alpha / rank) A B, of which A and B are trained and W is not."""

    rank: Count = 16
    alpha: Positive = 32.0
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(
        ["q", "k", "v", "o", "gate", "up", "down"], min_length=1
    )
    """The matrices of every layer that get adapters."""


class Learner(Block):
    hardware: Hardware
    hosts: Count = 1
    """Processes that join one program through `jax.distributed`, an equal share of devices each."""
    mesh: Mesh = Mesh()
    packing: Packing
    remat: Remat = "full"
    """What a layer keeps for the backward pass: `none` everything, `dots` its matrix products,
    `attention` its input and what attention gave, `full` its input, `offload` its input, in the
    host's memory. The rest is computed again."""
    attention: Attention = "auto"
    """The kernel: `splash` on TPU, `cudnn` on GPU, `xla` everywhere; `auto` goes by platform."""
    compute_dtype: FloatType = "bfloat16"
    """Type of activations and of the weights in matrix products; masters are float32."""
    lora: Lora | None = None
    """Trains adapters instead of the weights."""
    compile_cache: str | None = None
    """Folder of compiled programs, shared by restarts; in the run directory when null."""


class Parallel(Block):
    tensor: Count = 1


class Sampling(Block):
    temperature: Positive = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1)
    seeded: bool = True
    """Gumbel noise from the lease, so that a validator can recompute which token had to come."""


class SamplerPool(Block):
    name: Name
    engine: Literal["vllm"] = "vllm"
    trust: Literal["trusted", "untrusted"] = "untrusted"
    hardware: Hardware
    replicas: Count = 1
    """Processes that the local backend starts for this pool."""
    parallel: Parallel = Parallel()
    dtype: FloatType = "bfloat16"
    max_model_len: Count
    max_new_tokens: Count
    groups_per_submission: Count = 4
    sampling: Sampling = Sampling()


class Relay(Block):
    name: Name
    url: str | None = None
    """Where it listens; the local backend chooses when null."""
    upstream: list[str] = Field(default=["origin"], min_length=1)


class Broadcast(Block):
    dtype: FloatType = "bfloat16"
    """Type of the published weights: a policy version is these bits."""
    keep_versions: int = Field(5, ge=1)
    anchor_every: Count = 20
    chunk_bytes: Count = 16 * 1024 * 1024
    relays: list[Relay] = []


class Verify(Block):
    validators: Count = 1
    engine: str = "jax"
    """Prefill engine: an entry point of the group `runspec.prefill`."""
    prefill_share: Share = 1.0
    """Share of submissions whose log-probs, noise and proofs are recomputed."""
    lease_timeout: Duration = 1800.0
    """Time from a lease to its submission; after it the lease counts as withheld."""


class Identity(Block):
    root_public_key: PublicKey | None = None
    """Pinned by everyone. Null: the local backend makes a throw-away root."""


class Checkpoints(Block):
    dir: str | None = None
    """Where full states lie; the run directory when null."""
    every: Count = 10
    """Rollout steps between full states."""
    keep: Count = 3


class Placement(Block):
    backend: Literal["local"] = "local"
    host: str = "127.0.0.1"
    """Address that the local backend's servers bind to."""
    base_port: int | None = Field(None, ge=1024, le=65000)
    """First of the consecutive ports used; free ones are chosen when null."""
    restarts: int = Field(5, ge=0)
    """Restarts in a row, without progress between them, after which a dying role stops the run."""


class SecretSource(Block):
    env: VariableName
    """Environment variable of whoever applies the spec."""


class Secret(Block):
    name: VariableName
    """Environment variable of every role."""
    source: SecretSource = Field(alias="from")


class Budget(Block):
    max_hours: Positive | None = None


class RunSpec(Block):
    """One run, said once. See `docs/runspec.md`."""

    version: Literal["runspec/v1"]
    name: Name
    seed: int = Field(ge=0, lt=2**63)
    steps: Count
    """Rollout steps; step s trains policy version s into s + 1."""
    model: Model
    warm_start: WarmStart | None = None
    data: Data
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer
    reward: list[Reward] = Field(min_length=1)
    learner: Learner
    samplers: list[SamplerPool] = Field(min_length=1)
    broadcast: Broadcast = Broadcast()
    verify: Verify = Verify()
    identity: Identity = Identity()
    checkpoints: Checkpoints = Checkpoints()
    placement: Placement = Placement()
    secrets: list[Secret] = []
    budget: Budget = Budget()
