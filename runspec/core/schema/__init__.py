"""Schema of runspec/v1: frozen data classes; every field has its meaning and unit.

Roles read a resolved spec through these classes only. `runspec.core.schema.load` makes one resolved
spec from YAML layers. This module has the spec itself, and how a run is kept, placed and paid for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from runspec.core.schema import fields
from runspec.core.schema.learner import (
    Attention,
    Hardware,
    IslandMember,
    Islands,
    Learner,
    Lora,
    Mesh,
    Outer,
    Packing,
    Remat,
)
from runspec.core.schema.samplers import (
    Backlog,
    Broadcast,
    CalibrationProfile,
    Evaluation,
    Evaluator,
    Origin,
    Relay,
    SamplerPool,
    Thresholds,
    Verify,
)
from runspec.core.schema.training import (
    AnyAlgorithm,
    Clip,
    Data,
    Fill,
    Grpo,
    Model,
    Optimizer,
    Pretrain,
    Reward,
    Sft,
    SolveRate,
    Source,
    Supervised,
    Tokenizer,
    TrainingChange,
    WarmStart,
    ZLoss,
)


class Identity(fields.Block):
    """Root key that vouches for all signatures of the run."""

    root_public_key: fields.PublicKey | None = None
    """Pinned by everyone; the run's earlier files hold only under the root that they began with.
    Null: the local backend makes a throw-away root."""


class Checkpoints(fields.Block):
    """Full states of the learner, to go on from."""

    CHANGE = "restart"

    dir: Annotated[str | None, fields.NEWRUN] = None
    """Where full states and new parameters lie, in a folder of the run's name: a path,
    s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; the run directory when null. All hosts of the learner
    write there. A run would not find those it has made elsewhere, and start from version 0."""
    every: fields.Steps = 10
    """Rollout steps between full states."""
    keep: Annotated[fields.Count, fields.Unit("states")] = 3
    """Newest states that are kept."""


class Audit(fields.Block):
    """Full states that are published, so that anybody can train steps again (docs/audit.md)."""

    CHANGE = "restart"

    states: fields.Steps
    """Steps between two of them: a multiple of `checkpoints.every`. What the steps between were
    trained on is published with each, once no open lease is of those steps."""
    keep: Annotated[Annotated[int, Field(ge=2)] | None, fields.Unit("states")] = None
    """Newest ones that stay in the store; all when null."""


class Storage(fields.Block):
    """Folders of runs."""

    CHANGE = "restart"

    dir: str | None = None
    """Folder of run directories where --runs-dir names none; `runs` when null. A run that is there
    moves only by hand."""
    scratch: str = "~/.cache/runspec"
    """Folder on each machine for roles that do not share the run directory."""
    rollouts: Annotated[fields.Count | None, fields.Unit("steps")] = None
    """Newest steps whose rollouts stay, for people to read; when null those that a learner may
    train again after a restart, which stay in any case."""
    shared: bool = False
    """Says that every host sees the same files under `dir` and `checkpoints.dir`, as on a network
    file system."""


class Kubernetes(fields.Block):
    """Settings of a Kubernetes cluster."""

    CHANGE = "restart"

    image: str
    """Container image of every role that `images` does not name."""
    images: dict[str, str] = {}
    """Container image by role group: `trunk`, `learners`, island-<name>, `validators`, relay-<name>
    or a pool."""
    node_selectors: dict[str, dict[str, str]] = {}
    """Labels that the nodes of a role group must have, beside those of its TPU slice."""
    namespace: fields.Name = "default"
    """Namespace of everything that the run makes there."""
    queue: str | None = None
    """Kueue's LocalQueue that admits the run; null: it starts at once."""
    storage: fields.StorageQuantity = "100Gi"
    """Size of the volume of the run directory, and of that of the learner's full states."""
    storage_class: str | None = None
    """StorageClass of the run directory; null: the cluster's default."""
    shared_storage_class: str | None = None
    """StorageClass of `checkpoints.dir`, which several nodes write; null: the cluster's default."""
    models: str | None = None
    """PersistentVolumeClaim with the Hugging Face cache, which every role reads; null: none."""


class Metrics(fields.Block):
    """Servers of figures for Prometheus: of publisher, learner, validators, evaluator and samplers.
    Coordinator, origin and relays have `/metrics` at their own address, always."""

    CHANGE = "restart"

    host: str = "127.0.0.1"
    """Address that each of them binds to, on its own machine. Whoever reaches it reads the
    figures. On Kubernetes that of the pod."""
    base_port: Annotated[int, Field(ge=1024, le=65000), fields.Unit("port")] | None = None
    """First of the consecutive ports, one a process; free ones are chosen when null, and on a site
    29500 is the first."""


class Placement(fields.Block):
    """Backend that starts the roles, and the machines they run on."""

    CHANGE = "restart"

    backend: fields.Name = "local"
    """Program that starts and watches the roles: `local` on this machine, `ray` and `kubernetes` on
    a cluster, or a backend that an installed package offers."""
    kubernetes: Kubernetes | None = None
    """The cluster of backend `kubernetes`."""
    address: str = "auto"
    """Address of the Ray cluster, as `ray.init` takes it."""
    resources: dict[str, dict[str, fields.Positive]] = {}
    """Ray resources that each process of a role group asks for besides its accelerators, by group:
    `trunk`, `learners`, `validators`, relay-<name>, pools."""
    host: str = "127.0.0.1"
    """Address that the trunk's servers bind to. On Ray that of the trunk's node, if it is
    loopback."""
    url: str | None = None
    """Where workers elsewhere reach the coordinator, as join links say it: a proxy with TLS."""
    base_port: Annotated[int, Field(ge=1024, le=65000), fields.Unit("port")] | None = None
    """First of the consecutive ports used; free ones are chosen when null."""
    metrics: Metrics | None = None
    """Where roles without a server serve figures for Prometheus; null: nowhere."""
    restarts: Annotated[fields.CountOrZero, fields.Unit("deaths in a row"), fields.HOT] = 5
    """Restarts in a row, without progress between them, after which a dying role stops the run."""
    devices: dict[str, list[fields.CountOrZero]] = {}
    """Numbers of the accelerators that a role sees, by the role's name in `status`; a role that is
    not named sees all."""
    roles: list[str] | None = None
    """Groups that start here: `validators`, pools, relays as relay-<name>, islands after the first
    as island-<name>, and `learners`, the learner's processes after the first. Learner, publisher,
    origin and coordinator always start here. Null: every group. Whoever has the other machines
    starts the other groups."""


class SecretSource(fields.Block):
    """Where a secret's value is when roles start; it is never in a spec."""

    CHANGE = "restart"

    env: fields.VariableName
    """Environment variable of whoever applies the spec."""


class Secret(fields.Block):
    """Something that roles need and nobody may read."""

    CHANGE = "restart"

    name: fields.VariableName
    """Environment variable of every role."""
    source: Annotated[SecretSource, Field(alias="from")]
    """Where the value is."""


class Budget(fields.Block):
    """Limits of time and cost; a run that reaches one stops and can be resumed."""

    CHANGE = "hot"

    max_hours: Annotated[fields.Positive, fields.Unit("hours up, over all sessions")] | None = None
    """Time."""
    max_cost: Annotated[fields.Positive, fields.Unit("the currency of price_per_hour")] | None = (
        None
    )
    """Hours up, times the prices of all hardware that names one."""


class Estimate(fields.Block):
    """Measured figures that `runspec plan` uses in place of its own assumptions."""

    CHANGE = "hot"

    learner_mfu: fields.Reached | None = None
    """Share of the peak FLOP/s that the learner's useful FLOPs reach."""
    sampler_mfu: fields.Reached | None = None
    """The same of prefill in samplers and validators."""
    sampler_bandwidth: fields.Reached | None = None
    """Share of the memory bandwidth that decoding reaches."""
    mean_prompt_tokens: Annotated[fields.Positive | None, fields.Unit("tokens")] = None
    """Mean length of a prompt; null: a quarter of data.max_prompt_tokens."""
    mean_new_tokens: Annotated[fields.Positive | None, fields.Unit("tokens")] = None
    """Mean length of an output; null: of the targets, or half of max_new_tokens."""
    filtered_share: fields.Share | None = None
    """Share of the groups that the filters drop."""
    changed_share: fields.Share | None = None
    """Share of the published elements whose bits a version changes; null: 0.01 in bfloat16, more
    where the learning rate is high, and 1 in float32."""


class Monitor(fields.Block):
    """A tool that gets the run's figures, evaluations, spec, and some of its rollouts."""

    CHANGE = "restart"

    name: fields.Name
    """Names its process, monitor-<name>, and its folder in the run directory."""
    kind: fields.Name
    """`tensorboard`, `wandb`, `trackio`, or a kind that an installed package offers."""
    dir: str | None = None
    """Folder of the tool's files; null: monitors/<name> in the run directory."""
    project: fields.Name = "runspec"
    """For `wandb` and `trackio`: project that the run is part of."""
    mode: Literal["online", "offline"] = "online"
    """For `wandb`: `offline` writes files, which `wandb sync` sends later."""
    python: str | None = None
    """For `trackio`: interpreter of the environment in which it is installed."""
    params: dict[str, Any] = {}
    """Settings of a kind that an installed package offers."""
    deadline: fields.Duration = 60.0
    """Longest time that a call of the tool may take, and that the end of a trained run waits until
    everything is sent."""


VERSION = "runspec/v1"
SUPERVISED = ("pretrain", "sft")
"""Kinds of `algorithm` that train on documents."""


class RunSpec(fields.Block):
    """Description of one run. See `docs/spec.md`."""

    version: Annotated[Literal["runspec/v1"], fields.RESTART]
    """Version of the schema; there is one."""
    kind: Literal["Run"] = "Run"
    """`Run`; a file of kind `Placement` holds the part that is a site's."""
    name: fields.Name
    """Names the run, its directory and its messages."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Every draw follows from it."""
    steps: Annotated[fields.Steps, fields.RESTART]
    """Steps; step s trains policy version s into s + 1. It may only be raised."""
    model: Model
    """The policy."""
    warm_start: WarmStart | None = None
    """For `grpo`: supervised steps that make version 0 of a `model.shape`."""
    data: Data
    """Problems, or documents."""
    algorithm: AnyAlgorithm = Grpo()
    """What a step trains on, and by which loss."""
    optimizer: Optimizer
    """The update rule."""
    changes: Annotated[list[TrainingChange], fields.RESTART] = []
    """Settings of training that change in the course of the run; merged by name over the layers."""
    reward: list[Reward] = []
    """For `grpo`: terms, added up; merged by name over the layers."""
    learner: Learner
    """The process, or processes, that train."""
    samplers: list[SamplerPool] = []
    """For `grpo`: pools of workers, merged by name over the layers."""
    evaluations: list[Evaluation] = []
    """For `grpo`: what policy versions are evaluated on; merged by name over the layers."""
    evaluator: Evaluator = Evaluator()
    """For `grpo`: the process that evaluates, where there are evaluations."""
    monitors: Annotated[list[Monitor], fields.SITE] = []
    """Tools that the run logs to; merged by name over the layers."""
    broadcast: Broadcast = Broadcast()
    """How policy versions travel."""
    verify: Verify = Verify()
    """For `grpo`: checks of what workers send."""
    identity: Identity = Identity()
    """Root key that vouches for all signatures of the run."""
    checkpoints: Annotated[Checkpoints, fields.SITE] = Checkpoints()
    """Full states of the learner."""
    audit: Annotated[Audit | None, fields.SITE] = None
    """Full states for strangers who train steps again; null: none is published."""
    storage: Annotated[Storage, fields.SITE] = Storage()
    """Folders of runs."""
    placement: Annotated[Placement, fields.SITE] = Placement()
    """Backend that starts the roles, and the machines they run on."""
    secrets: Annotated[list[Secret], fields.SITE] = []
    """Environment variables of the roles; merged by name."""
    budget: Annotated[Budget, fields.SITE] = Budget()
    """Limits of time and cost."""
    estimate: Annotated[Estimate, fields.SITE] = Estimate()
    """Measured figures for `runspec plan`."""

    @model_validator(mode="before")
    @classmethod
    def _without_validators(cls, value: Any) -> Any:
        """Let a run without workers have no validators by default."""
        verify = value.get("verify", {}) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(verify, dict):
            return value
        algorithm = value.get("algorithm")
        kind = algorithm.get("kind") if isinstance(algorithm, dict) else algorithm
        supervised = kind in SUPERVISED or isinstance(kind, Supervised)
        return value | {"verify": {"validators": 0, **verify}} if supervised else value

    @model_validator(mode="after")
    def _changes_fit(self) -> Self:
        steps = [change.step for change in self.changes]
        penalised = self.supervised is None and self.grpo.kl.coef > 0.0
        if len(set(steps)) < len(steps) or any(step >= self.steps for step in steps):
            raise ValueError("changes at different steps below `steps` were expected")
        if self.supervised is not None and any(change.clip for change in self.changes):
            raise ValueError("clip bounds of changes are for runs that sample")
        if not penalised and any(change.kl_coef for change in self.changes):
            raise ValueError("`kl_coef` of changes needs an `algorithm.kl.coef` above 0")
        return self

    @model_validator(mode="after")
    def _states_can_be_published(self) -> Self:
        if self.audit is not None:
            if self.audit.states % (every := self.checkpoints.every):
                raise ValueError(f"audit.states that are a multiple of {every} were expected")
            if self.learner.islands is not None:
                raise ValueError("audit needs a run with one learner: islands are not replayed")
            if "://" in (self.checkpoints.dir or ""):
                raise ValueError("audit needs a checkpoints.dir that is a path")
        return self

    def at_step(self, step: int) -> RunSpec:
        """Return the spec by which a step is trained.

        Of `changes` it has the newest one that has set the learning rate by then, or none.
        """
        optimizer, algorithm, rates = self.optimizer, self.algorithm, list[TrainingChange]()
        held = [change for change in self.changes if change.step <= step]
        for change in sorted(held, key=lambda change: change.step):
            if change.lr is not None:
                optimizer, rates = optimizer.model_copy(update={"lr": change.lr}), [change]
            if isinstance(algorithm, Grpo):
                clip = algorithm.clip.model_copy(update=change.clip)
                kl = {"coef": change.kl_coef or algorithm.kl.coef}
                parts = {"clip": clip, "kl": algorithm.kl.model_copy(update=kl)}
                algorithm = algorithm.model_copy(update=parts)
        settings = {"optimizer": optimizer, "algorithm": algorithm, "changes": rates}
        return self.model_copy(update=settings)

    @property
    def grpo(self) -> Grpo:
        """The algorithm of a run that samples; only what such a run reaches may ask for it."""
        assert isinstance(self.algorithm, Grpo), f"{self.algorithm.kind} has no samplers"
        return self.algorithm

    @property
    def supervised(self) -> Supervised | None:
        """The algorithm of a run that trains on documents; None for `grpo`."""
        return self.algorithm if isinstance(self.algorithm, Supervised) else None

    @property
    def holds_out(self) -> bool:
        """Whether a tenth of the problems is held out from training.

        A warm start shows by them whether it learns or memorises, and evaluations ask them.
        """
        trained = {source.name for source in self.data.sources if source.train}
        evaluated = any(each.source is None or each.source in trained for each in self.evaluations)
        return self.warm_start is not None or evaluated

    def publishes(self, version: int) -> bool:
        """Return whether the version after so many steps is published."""
        every = 1 if self.supervised is None else self.supervised.publish_every
        return version % every == 0 or version == self.steps


RunSpec.model_rebuild()
