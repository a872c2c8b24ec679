"""Where a run lives and what it may use: identity, files, placement, secrets, budget, figures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from runspec.core.spec.fields import (
    HOT,
    NEWRUN,
    Block,
    Count,
    CountOrZero,
    Duration,
    Name,
    Positive,
    PublicKey,
    Reached,
    Share,
    Steps,
    StorageQuantity,
    Unit,
    VariableName,
)


class Identity(Block):
    """Root key that vouches for all signatures of the run."""

    root_public_key: PublicKey | None = None
    """Pinned by everyone; the run's earlier files hold only under the root that they began with.
    Null: the local backend makes a throw-away root."""


class Checkpoints(Block):
    """Full states of the learner, to go on from."""

    CHANGE = "restart"

    dir: Annotated[str | None, NEWRUN] = None
    """Where full states and new parameters lie, in a folder of the run's name: a path,
    s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; the run directory when null. All hosts of the learner
    write there. A run would not find those it has made elsewhere, and start from version 0."""
    every: Steps = 10
    """Rollout steps between full states."""
    keep: Annotated[Count, Unit("states")] = 3
    """Newest states that are kept."""


class Storage(Block):
    """Folders of runs."""

    CHANGE = "restart"

    dir: str | None = None
    """Folder of run directories where --runs-dir names none; `runs` when null. A run that is there
    moves only by hand."""
    scratch: str = "~/.cache/runspec"
    """Folder on each machine for roles that do not share the run directory."""
    rollouts: Annotated[Count | None, Unit("steps")] = None
    """Newest steps whose rollouts stay, for people to read; when null those that a learner may
    train again after a restart, which stay in any case."""
    shared: bool = False
    """Says that every host sees the same files under `dir` and `checkpoints.dir`, as on a network
    file system."""


class Kubernetes(Block):
    """Settings of a Kubernetes cluster."""

    CHANGE = "restart"

    image: str
    """Container image of every role that `images` does not name."""
    images: dict[str, str] = {}
    """Container image by role group: `trunk`, `learners`, island-<name>, `validators`, relay-<name>
    or a pool."""
    node_selectors: dict[str, dict[str, str]] = {}
    """Labels that the nodes of a role group must have, beside those of its TPU slice."""
    namespace: Name = "default"
    """Namespace of everything that the run makes there."""
    queue: str | None = None
    """Kueue's LocalQueue that admits the run; null: it starts at once."""
    storage: StorageQuantity = "100Gi"
    """Size of the volume of the run directory, and of that of the learner's full states."""
    storage_class: str | None = None
    """StorageClass of the run directory; null: the cluster's default."""
    shared_storage_class: str | None = None
    """StorageClass of `checkpoints.dir`, which several nodes write; null: the cluster's default."""
    models: str | None = None
    """PersistentVolumeClaim with the Hugging Face cache, which every role reads; null: none."""


class Metrics(Block):
    """Servers of figures for Prometheus: of publisher, learner, validators, evaluator and samplers.
    Coordinator, origin and relays have `/metrics` at their own address, always."""

    CHANGE = "restart"

    host: str = "127.0.0.1"
    """Address that each of them binds to, on its own machine. Whoever reaches it reads the
    figures. On Kubernetes that of the pod."""
    base_port: Annotated[int, Field(ge=1024, le=65000), Unit("port")] | None = None
    """First of the consecutive ports, one a process; free ones are chosen when null, and on a site
    29500 is the first."""


class Placement(Block):
    """Backend that starts the roles, and the machines they run on."""

    CHANGE = "restart"

    backend: Name = "local"
    """Program that starts and watches the roles: `local` on this machine, `ray` and `kubernetes` on
    a cluster, or a backend that an installed package offers."""
    kubernetes: Kubernetes | None = None
    """The cluster of backend `kubernetes`."""
    address: str = "auto"
    """Address of the Ray cluster, as `ray.init` takes it."""
    resources: dict[str, dict[str, Positive]] = {}
    """Ray resources that each process of a role group asks for besides its accelerators, by group:
    `trunk`, `learners`, `validators`, relay-<name>, pools."""
    host: str = "127.0.0.1"
    """Address that the trunk's servers bind to. On Ray that of the trunk's node, if it is
    loopback."""
    url: str | None = None
    """Where workers elsewhere reach the coordinator, as join links say it: a proxy with TLS."""
    base_port: Annotated[int, Field(ge=1024, le=65000), Unit("port")] | None = None
    """First of the consecutive ports used; free ones are chosen when null."""
    metrics: Metrics | None = None
    """Where roles without a server serve figures for Prometheus; null: nowhere."""
    restarts: Annotated[CountOrZero, Unit("deaths in a row"), HOT] = 5
    """Restarts in a row, without progress between them, after which a dying role stops the run."""
    devices: dict[str, list[CountOrZero]] = {}
    """Numbers of the accelerators that a role sees, by the role's name in `status`; a role that is
    not named sees all."""
    roles: list[str] | None = None
    """Groups that start here: `validators`, pools, relays as relay-<name>, islands after the first
    as island-<name>, and `learners`, the learner's processes after the first. Learner, publisher,
    origin and coordinator always start here. Null: every group. Whoever has the other machines
    starts the other groups."""


class SecretSource(Block):
    """Where a secret's value is when roles start; it is never in a spec."""

    CHANGE = "restart"

    env: VariableName
    """Environment variable of whoever applies the spec."""


class Secret(Block):
    """Something that roles need and nobody may read."""

    CHANGE = "restart"

    name: VariableName
    """Environment variable of every role."""
    source: Annotated[SecretSource, Field(alias="from")]
    """Where the value is."""


class Budget(Block):
    """Limits of time and cost; a run that reaches one stops and can be resumed."""

    CHANGE = "hot"

    max_hours: Annotated[Positive, Unit("hours up, over all sessions")] | None = None
    """Time."""
    max_cost: Annotated[Positive, Unit("the currency of price_per_hour")] | None = None
    """Hours up, times the prices of all hardware that names one."""


class Estimate(Block):
    """Measured figures that `runspec plan` uses in place of its own assumptions."""

    CHANGE = "hot"

    learner_mfu: Reached | None = None
    """Share of the peak FLOP/s that the learner's useful FLOPs reach."""
    sampler_mfu: Reached | None = None
    """The same of prefill in samplers and validators."""
    sampler_bandwidth: Reached | None = None
    """Share of the memory bandwidth that decoding reaches."""
    mean_prompt_tokens: Annotated[Positive | None, Unit("tokens")] = None
    """Mean length of a prompt; null: a quarter of data.max_prompt_tokens."""
    mean_new_tokens: Annotated[Positive | None, Unit("tokens")] = None
    """Mean length of an output; null: of the targets, or half of max_new_tokens."""
    filtered_share: Share | None = None
    """Share of the groups that the filters drop."""
    changed_share: Share | None = None
    """Share of the published elements whose bits a version changes; null: 0.01 in bfloat16, more
    where the learning rate is high, and 1 in float32."""


class Monitor(Block):
    """A tool that gets the run's figures, evaluations, spec, and some of its rollouts."""

    CHANGE = "restart"

    name: Name
    """Names its process, monitor-<name>, and its folder in the run directory."""
    kind: Name
    """`tensorboard`, `wandb`, `trackio`, or a kind that an installed package offers."""
    dir: str | None = None
    """Folder of the tool's files; null: monitors/<name> in the run directory."""
    project: Name = "runspec"
    """For `wandb` and `trackio`: project that the run is part of."""
    mode: Literal["online", "offline"] = "online"
    """For `wandb`: `offline` writes files, which `wandb sync` sends later."""
    python: str | None = None
    """For `trackio`: interpreter of the environment in which it is installed."""
    params: dict[str, Any] = {}
    """Settings of a kind that an installed package offers."""
    deadline: Duration = 60.0
    """Longest time that a call of the tool may take, and that the end of a trained run waits until
    everything is sent."""
