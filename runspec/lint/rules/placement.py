"""Rules on placement and budget: names of roles, and the machines, ports and files they share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import floor

from runspec.core.address import is_loopback, parse_url, server_urls
from runspec.core.schema import RunSpec
from runspec.core.schema import role_names as roles
from runspec.estimate.assumed import hourly_price
from runspec.estimate.speed import step_seconds
from runspec.lint import Context, Found, Violation, relation, rule

_SHOWN = 12
"""Names that a message lists."""
RESERVED = (
    *("root", "trunk", "publisher", "coordinator", "learner", "learners"),
    *("validator", "validators", "evaluator", "origin", "relay"),
)


@rule("placement")
def monitor_python(context: Context) -> Found:
    """A monitor of kind `trackio` must name the interpreter of trackio's own environment.

    Packages that trackio needs and packages that a run needs exclude each other's versions. So
    trackio has an environment of its own, and the monitor speaks to a process there.
    """
    for monitor in context.spec.monitors:
        yield from relation(
            monitor.kind != "trackio" or monitor.python is not None,
            f"monitors.{monitor.name}",
            "kind trackio needs python",
            "`make trackio` makes .venv/trackio/bin/python",
        )


@rule("placement")
def no_cluster(context: Context) -> Found:
    """A run on Kubernetes needs a container image.

        placement.kubernetes is given, where placement.backend is kubernetes

    Every pod starts from an image that has the package (docs/backends.md, "Images"). Which one fits
    depends on the cluster's accelerators, so there is no default.
    """
    placement = context.spec.placement
    return relation(
        placement.backend != "kubernetes" or placement.kubernetes is not None,
        "placement.kubernetes",
        "the run is for Kubernetes, and no container image is named",
        "placement.kubernetes: {image: REGISTRY/IMAGE:TAG}",
    )


@rule("placement", "warning")
def image_digest(context: Context) -> Found:
    """Container images should be named by digest.

        placement.kubernetes.image = NAME@sha256:DIGEST

    What a tag names may change between two starts of a pod. Then roles of one run have different
    programs, and a step that is trained again has other bits.
    """
    cluster = context.spec.placement.kubernetes
    if context.spec.placement.backend != "kubernetes" or cluster is None:
        return
    tags = [each for each in {cluster.image, *cluster.images.values()} if "@sha256:" not in each]
    yield from relation(
        not tags,
        "placement.kubernetes.image",
        f"named by a tag: {', '.join(sorted(tags))}",
        "NAME@sha256:DIGEST, as the registry shows it",
    )


@rule("placement")
def local_storage(context: Context) -> Found:
    """Several learner hosts must write checkpoints to one place.

        checkpoints.dir: s3://... or gs://..., or a path with storage.shared,
        where learner.hosts > 1 and the hosts are not all this machine

    Every process of the learner writes its shards of a checkpoint under one folder; only the first
    needs the run directory. On a path that each host has for itself no checkpoint is ever whole.
    `local` starts processes on CPUs on this machine; `kubernetes` makes a volume that all share.
    """
    spec, backend = context.spec, context.spec.placement.backend
    hosts, folder = spec.learner.hosts, spec.checkpoints.dir
    together = backend == "local" and spec.learner.hardware.kind == "cpu"
    if hosts == 1 or together or backend == "kubernetes":
        return ()
    return relation(
        folder is not None and ("://" in folder or spec.storage.shared),
        "checkpoints.dir",
        f"{hosts} hosts would each write checkpoints to a {folder or 'run directory'} of their own",
        "name an object store (s3://BUCKET/FOLDER), or a folder on a network file system with "
        "storage.shared: true",
        {"hosts": hosts},
    )


@rule("placement")
def no_budget(context: Context) -> Found:
    """Hardware that is paid by the hour must have a budget.

        budget.max_hours or budget.max_cost, where some price_per_hour > 0

    A run that stalls over a weekend costs as much as one that learns. When the budget is spent the
    run stops, and can be resumed.
    """
    budget, price = context.spec.budget, hourly_price(context.spec) or 0.0
    return relation(
        price <= 0.0 or budget.max_hours is not None or budget.max_cost is not None,
        "budget",
        f"the hardware costs {price:g} an hour, and nothing ends that",
        f"max_cost: {price * 24:g} is a day",
        {"price_per_hour": price},
    )


@rule("placement")
def over_budget(context: Context) -> Found:
    """The money must last to the last step.

        steps x step_s / 3600 x price_per_hour <= max_cost

    step_s is the time of a step with every role always at work (`runspec.estimate.speed`), from
    measured speeds where the spec has them: `runspec plan` forecasts more. A run that its budget
    ends early is resumable, but the steps that were planned were never paid for. Silent where a
    speed is not known.
    """
    spec, allowed = context.spec, context.spec.budget.max_cost
    step_s, price = step_seconds(spec, context.config), hourly_price(spec)
    if step_s is None or price is None or allowed is None:
        return ()
    cost = spec.steps * step_s / 3600 * price
    return relation(
        cost <= allowed,
        "budget.max_cost",
        f"{allowed:g}, but {spec.steps} steps cost {cost:.0f} by the estimate",
        f"it pays {floor(allowed / (cost or 1.0) * spec.steps)} steps",
        {
            "steps": spec.steps,
            "step_s": float(f"{step_s:.4g}"),
            "price_per_hour": price,
            "cost": round(cost, 2),
            "max_cost": allowed,
        },
    )


@rule("placement", "warning")
def short_budget(context: Context) -> Found:
    """The hours of the budget should last to the last step.

        steps x step_s / 3600 <= max_hours

    step_s is that of `over-budget`: no run is faster, and `runspec plan` forecasts how much slower
    this one is. A run whose hours are over stops, and can be resumed with more. Silent where a
    speed is not known.
    """
    spec, allowed = context.spec, context.spec.budget.max_hours
    step_s = step_seconds(spec, context.config)
    if step_s is None or allowed is None:
        return ()
    hours = spec.steps * step_s / 3600
    return relation(
        hours <= allowed,
        "budget.max_hours",
        f"{allowed:g}, but {spec.steps} steps need {hours:.4g} hours at least",
        f"it lasts for {floor(allowed / (hours or 1.0) * spec.steps)} steps",
        {
            "steps": spec.steps,
            "step_s": float(f"{step_s:.4g}"),
            "needed": float(f"{hours:.4g}"),
            "max_hours": allowed,
        },
    )


@rule("placement")
def reserved_names(context: Context) -> Found:
    """No pool may be called like a role, and no relay `origin`.

    Keys and logs lie in files named after roles: a pool `validator` would have workers
    `validator-0`, whose key roles.json trusts with verdicts. `origin` in `upstream` and `relays`
    always means the publisher's own server.
    """
    for pool in context.spec.samplers:
        yield from relation(
            pool.name not in RESERVED,
            f"samplers.{pool.name}",
            "is the name of a role; call the pool something else",
            f"{pool.name}-pool, say",
        )
    for relay in context.spec.broadcast.relays:
        yield from relation(
            relay.name != "origin",
            f"broadcast.relays.{relay.name}",
            "origin is the publisher's own server, not a relay",
            "call it something else",
        )


@rule("placement")
def role_clash(context: Context) -> Found:
    """Every process must have a name of its own, and so must what `placement.roles` names.

        relay-<name>, <pool>-<i>, validator-<i>, learner-<i>, island-<name>, shares-<name>, ...

    Names are made of parts: the first worker of a pool `relay-eu` is `relay-eu-0`, and so is the
    relay `eu-0`. Two processes of one name would share a key, a log and a line in `status`. In
    `placement.roles` that pool and the relay `eu` are both `relay-eu`.
    """
    spec = context.spec
    workers = roles.worker_names(spec)
    processes = Counter(roles.role_names(spec))
    islands = map(roles.island_role, roles.island_names(spec))
    groups = Counter([*roles.relay_names(spec), *islands, *(pool.name for pool in spec.samplers)])
    counts = processes | groups  # of each name the larger
    for name, count in sorted(counts.items()):
        pool = workers.get(name, name)
        of_pool = any(pool == each.name for each in spec.samplers)
        yield from relation(
            count == 1 or pool in RESERVED,  # `reserved-names` says so
            f"samplers.{pool}" if of_pool else "learner.islands.members",
            f"{count} roles would be called {name}",
            "give the pool, the relay or the island another name",
        )


@rule("placement")
def unknown_role(context: Context) -> Found:
    """`placement` must name roles of the run in `roles`, `devices` and `kubernetes`.

    `roles` says what is started here: `validators`, a pool, relay-<name>, island-<name>, or
    `learners`, the learner's processes after the first; learner, publisher, origin and coordinator
    always are. `devices` goes by process, as `status` names them: `learner`, `<pool>-<i>`,
    `validator-<i>`. `kubernetes.images` and `kubernetes.node_selectors` go by group, the trunk
    included. A name that is nothing starts nothing and assigns nothing, in silence.
    """
    spec = context.spec
    startable = roles.placeable(spec)
    unknown = [name for name in dict.fromkeys(spec.placement.roles or []) if name not in startable]
    yield from relation(
        not unknown,
        "placement.roles",
        f"no role {', '.join(unknown)}; there is {', '.join(startable)}",
        "learner, publisher, origin and coordinator are started without being named",
    )
    groups = {"trunk", *startable}
    for field in ("images", "node_selectors") if spec.placement.kubernetes else ():
        for name in getattr(spec.placement.kubernetes, field):
            yield from relation(
                name in groups,
                f"placement.kubernetes.{field}.{name}",
                f"no role group {name}; there is {', '.join(sorted(groups))}",
                "use one of them",
            )
    processes = roles.role_names(spec)
    for name in spec.placement.devices:
        more = f" and {len(processes) - _SHOWN} more" if len(processes) > _SHOWN else ""
        yield from relation(
            name in processes,
            f"placement.devices.{name}",
            f"no process {name}; there is {', '.join(processes[:_SHOWN])}{more}",
            "workers are <pool>-<i>, validators validator-<i>",
        )


@rule("placement", "warning")
def shared_device(context: Context) -> Found:
    """An accelerator should belong to one process.

    JAX takes most of a GPU's memory when it starts, and vLLM plans with what is free at that
    moment: of two on one device the second finds no room, or both run out later. Where the shares
    are arranged by hand (XLA_PYTHON_CLIENT_MEM_FRACTION), suppress this with that reason. Roles on
    other machines have other accelerators under the same numbers.
    """
    spec = context.spec
    away = set(roles.elsewhere(spec))
    if spec.learner.hardware.kind != "cpu":
        away |= set(roles.learner_names(spec)[1:])
    for name, processes in roles.island_processes(spec).items():
        if roles.island_spec(spec, name).learner.hardware.kind != "cpu":
            away |= set(processes[1:])
    users: dict[int, list[str]] = defaultdict(list)
    for name, numbers in spec.placement.devices.items():
        for number in set(numbers) if name not in away else ():
            users[number].append(name)
    for number, names in sorted(users.items()):
        if len(names) > 1:
            yield Violation(
                ("placement", "devices", names[-1]),
                f"accelerator {number} is given to {' and '.join(names)}",
                suggestion="give each process devices of its own",
            )


@rule("placement")
def too_few_devices(context: Context) -> Found:
    """A process must see the accelerators that its part of the model is divided over.

        devices of a worker  >= parallel.tensor x parallel.data of its pool
        devices of a learner >= data x fsdp x context x tensor / hosts,  of an island likewise

    `placement.devices` hides all others from the process; with fewer it dies as it starts. CPUs
    have no such numbers.
    """
    spec = context.spec
    needed: dict[str, int] = {}
    if spec.learner.hardware.kind != "cpu":
        share = -(-spec.learner.mesh.devices // spec.learner.hosts)
        needed |= dict.fromkeys(roles.learner_names(spec), share)
    for name, processes in roles.island_processes(spec).items():
        own = roles.island_spec(spec, name).learner
        if own.hardware.kind != "cpu":
            needed |= dict.fromkeys(processes, -(-own.mesh.devices // own.hosts))
    pools = {pool.name: pool for pool in spec.samplers if pool.hardware.kind != "cpu"}
    for worker, name in roles.worker_names(spec).items():
        if name in pools:
            needed[worker] = pools[name].parallel.devices
    for name, numbers in spec.placement.devices.items():
        seen, least = len(set(numbers)), needed.get(name, 0)
        yield from relation(
            seen >= least,
            f"placement.devices.{name}",
            f"{seen} of the {least} accelerators that it divides its model over",
            f"name {least} devices",
            {"devices": seen, "needed": least},
        )


@rule("placement")
def server_url(context: Context) -> Found:
    """The URL of a server must be http or https, with a host.

    Workers reach the coordinator at `placement.url`, and fetch policy versions from
    `broadcast.origin.url` and `broadcast.relays[].url`, islands one another's shares at
    `learner.islands.members[].url`; the port is 80 or 443 where none is given.
    """
    for where, text in server_urls(context.spec).items():
        yield from relation(
            parse_url(text) is not None,
            ".".join((*where, "url")),
            f"{text[:80]!r} is no http or https URL with a host",
            "https://relay.example.org, say",
        )


@rule("placement")
def port_clash(context: Context) -> Found:
    """No two servers may listen at one address.

        base_port + 0 coordinator, + 1 origin, + 2 + i relay i, then learner and islands

    An http URL fixes the address of origin, relay or island, `placement.base_port` those of all
    others, on `placement.host`. The second server that wants an address dies as it starts. An https
    URL is a proxy's. `placement.metrics.base_port` fixes those of the other roles' figures, which
    are lost if the address is taken.
    """
    users: dict[tuple[str, int], str] = {}
    for role, where, host, port in _addresses(context.spec):
        at = ("this machine" if is_loopback(host) else host, port)
        other = users.setdefault(at, role)
        if other != role:
            yield Violation(
                where,
                f"{role} and {other} would both listen at {host}:{port}",
                suggestion="choose another port",
            )


def _addresses(spec: RunSpec) -> Iterator[tuple[str, tuple[str, ...], str, int]]:
    """Role, location, host and port of every server whose address the spec fixes."""
    urls, base = server_urls(spec), spec.placement.base_port
    named: dict[str, tuple[str, ...]] = {"origin": ("broadcast", "origin")}
    named |= {f"relay-{r.name}": ("broadcast", "relays", r.name) for r in spec.broadcast.relays}
    named |= {
        roles.shares_name(name): ("learner", "islands", "members", name)
        for name in roles.island_names(spec)
    }
    for position, role in enumerate(roles.server_names(spec)):
        where = named.get(role, ("placement", "base_port"))
        url = parse_url(urls[where]) if where in urls else None
        if url is not None and url.scheme == "http":
            yield role, (*where, "url"), url.host, url.port
        elif (url is not None or where not in urls) and base is not None:
            yield role, ("placement", "base_port"), spec.placement.host, base + position
    metrics = spec.placement.metrics
    if metrics is not None and metrics.base_port is not None:
        where = ("placement", "metrics", "base_port")
        for position, role in enumerate(roles.measured_roles(spec)):
            yield f"figures of {role}", where, metrics.host, metrics.base_port + position
