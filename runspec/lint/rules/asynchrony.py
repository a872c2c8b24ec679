"""Rules on lag: the graph of relays, how long versions are kept and travel, and deltas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from math import ceil, floor

from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import step_overlap
from runspec.estimate.assumed import changed_share
from runspec.estimate.broadcast import arrivals, version_size
from runspec.estimate.speed import learner_seconds, step_seconds
from runspec.lint import Context, Found, Violation, model_rule, relation, rule


@rule("asynchrony", runs="grpo")
def versions_kept(context: Context) -> Found:
    """Versions must be kept as long as rollouts of them are sampled and checked.

        keep_versions >= async_level + overlap + 2

    While step s is trained, rollouts of the versions s - async_level to s may train in it: that is
    async_level + 1 versions that workers fetch and validators recompute with. One more is being
    published meanwhile. With `learner.islands.overlap` version s itself is still being made, one
    step longer. With fewer a version is removed under those who need it.
    """
    spec, kept = context.spec, context.spec.broadcast.keep_versions
    level, overlap = spec.grpo.async_level, step_overlap(spec)
    needed = level + overlap + 2
    return relation(
        kept >= needed,
        "broadcast.keep_versions",
        f"{kept} is less than async_level + {'overlap + ' if overlap else ''}2 = {needed}: a "
        "version would be removed while rollouts of it are sampled and checked",
        f"keep_versions: {needed}",
        {"keep_versions": kept, "async_level": level} | ({"overlap": overlap} if overlap else {}),
    )


@rule("asynchrony", "warning", runs="grpo")
def lease_outlasts_step(context: Context) -> Found:
    """A lease should expire before the step that waits for it gives up.

        verify.lease_timeout < algorithm.fill.deadline

    Groups train in the order of their leases, so that short outputs gain nothing. A worker that
    vanishes holds its place until its lease expires, if no other waits for its groups. Where that
    takes as long as the step may fill, one lost worker is enough for a step to close short.
    """
    timeout, deadline = context.spec.verify.lease_timeout, context.spec.grpo.fill.deadline
    return relation(
        timeout < deadline,
        "verify.lease_timeout",
        f"{timeout:g} s is not less than fill.deadline = {deadline:g} s: a worker that vanishes "
        "holds up its step to the end",
        "a little more than the longest submission takes",
        {"lease_timeout_s": timeout, "deadline_s": deadline},
    )


@model_rule("asynchrony", runs="grpo")
def broadcast_time(context: Context, config: ModelConfig) -> Found:
    """A version must reach its slowest worker within the lag that is allowed.

        broadcast_s <= (async_level - overlap) x step_s

    The step that trains a rollout is at most `async_level` after the version that sampled it. Where
    a version travels longer than that many steps last, the worker at the end of the slowest
    declared path always samples too late: its rollouts expire, or the learner waits. A version of
    P parameters has 2 P bytes (4 P in float32), its delta as many as changed elements take
    (`runspec.estimate.broadcast`), sent over the links that `download` and `upload` declare,
    cut-through and shared (`runspec.estimate.broadcast`). `overlap` is `learner.islands.overlap`,
    with which a step begins before its version is made; step_s is the longer of training and
    sampling, neither waiting (`runspec.estimate.speed`). INTELLECT-2
    (arXiv 2505.07291): 14 minutes for 62 GB, steps of 22, async level 2. Silent where no link is
    declared, a speed is not known, or no lag is left and every step waits by intent.
    """
    spec = context.spec
    level = spec.grpo.async_level - step_overlap(spec)
    if level <= 0 or not graph_is_sound(spec):
        return
    size = version_size(spec, config)
    reached = arrivals(spec, size.follower)
    step_s = step_seconds(spec, config) if reached else None
    if step_s is None or reached[-1].seconds <= level * step_s:
        return
    slowest = reached[-1]
    helps = size.delta < size.follower and arrivals(spec, size.delta)[-1].seconds <= level * step_s
    yield Violation(
        tuple(slowest.limit.split(".")),
        f"{slowest.name} has a version {slowest.seconds:.0f} s after it is published, by way of "
        f"{', '.join(slowest.path[:-1])}; {level} steps last {level * step_s:.0f} s",
        numbers={
            "version_bytes": round(size.follower),
            "rate_bytes_s": round(slowest.rate),
            "broadcast_s": float(f"{slowest.seconds:.4g}"),
            "async_level": spec.grpo.async_level,
            "step_s": float(f"{step_s:.4g}"),
        },
        suggestion=("broadcast.format: delta, " if helps else "")
        + "a faster link, more relays, or a higher async_level",
    )


@model_rule("asynchrony", "warning", runs="grpo")
def idle_learner(context: Context, config: ModelConfig) -> Found:
    """The learner should train for half of the time or more.

        learner_s >= step_s / 2

    step_s is the longer of training and sampling (`runspec.estimate.speed`). Where sampling takes
    longer than twice the training, most of the learner's devices are paid for and wait. Volunteers
    whom `replicas` does not count make up for it. Silent where a speed is not known, and on CPUs,
    which the roles share.
    """
    spec = context.spec
    if spec.learner.hardware.kind == "cpu":
        return
    learner_s, step_s = learner_seconds(spec, config), step_seconds(spec, config)
    if learner_s is None or step_s is None or learner_s >= step_s / 2:
        return
    replicas, devices = sum(p.replicas for p in spec.samplers), spec.learner.mesh.devices
    more = ceil(replicas * step_s / learner_s) - replicas
    enough = max(1, floor(devices * learner_s / step_s))
    yield Violation(
        ("samplers",),
        f"replicas: {replicas} sample a step in {step_s:.0f} s, which {devices} devices train in "
        f"{learner_s:.0f} s: the learner is idle {1 - learner_s / step_s:.0%} of the time",
        numbers={"learner_s": float(f"{learner_s:.4g}"), "step_s": float(f"{step_s:.4g}")},
        suggestion=f"{more} more replicas, or a learner of {enough} devices",
    )


@model_rule("asynchrony", "warning")
def delta_gain(context: Context, config: ModelConfig) -> Found:
    """Deltas should be at most half of a version, or whole versions be sent.

        delta_bytes <= version_bytes / 2        delta = n (H(s) / 8 + s b)

    n elements of b bytes, of which a share s changes: about lr D^1/2 2^p, for adamw moves a
    weight by about lr, a usual one is D^-1/2, and numbers of p significant bits (8 in bfloat16, 24
    in float32) lie D^-1/2 2^-p apart. bfloat16 rounds most updates away at rates of 1e-6: 1 %
    changes (PULSE, arXiv 2602.03839). float32 keeps every one of them. Then a publisher that
    compares versions spends its time for nothing: what is not smaller goes out whole.
    `estimate.changed_share` takes the place of s where somebody measured it.
    """
    spec = context.spec
    if spec.broadcast.format != "delta":
        return ()
    size, share = version_size(spec, config), changed_share(spec, config).value
    narrower = ", or a run with dtype: bfloat16" if spec.broadcast.dtype == "float32" else ""
    return relation(
        size.delta <= size.whole / 2,
        "broadcast.format",
        f"{share:.0%} of the {spec.broadcast.dtype} elements change from one version to the next: "
        f"a delta has {size.delta / size.whole:.0%} of the bytes",
        f"format: full{narrower}",
        {
            "changed_share": float(f"{share:.3g}"),
            "delta_bytes": round(size.delta),
            "version_bytes": size.whole,
            "lr": spec.optimizer.lr,
        },
    )


@model_rule("asynchrony", "warning")
def anchor_distance(context: Context, config: ModelConfig) -> Found:
    """The deltas after an anchor should be no more than the anchor itself.

        (anchor_every - 1) x delta_bytes <= version_bytes

    Who joins, or was away for longer than versions are kept, fetches the newest anchor and every
    delta after it. Where those outweigh a whole version, joining takes more than twice as long as
    it has to, origin and relays keep as much for nothing, and an anchor sooner costs followers
    nothing: it carries a delta for them. Silent where `delta-gain` speaks.
    """
    spec = context.spec
    if spec.broadcast.format != "delta":
        return
    size = version_size(spec, config)
    if size.delta > size.whole / 2 or size.joiner <= 2 * size.whole:
        return
    most = int(size.whole / size.delta) + 1
    yield Violation(
        ("broadcast", "anchor_every"),
        f"who joins fetches up to {size.joiner / size.whole:.1f} times a whole version: an anchor "
        f"and {spec.broadcast.anchor_every - 1} deltas",
        numbers={
            "anchor_every": spec.broadcast.anchor_every,
            "delta_bytes": round(size.delta),
            "version_bytes": size.whole,
            "joiner_bytes": round(size.joiner),
        },
        suggestion=f"anchor_every: {most} or less",
    )


@model_rule("asynchrony", "warning", runs="grpo")
def whole_versions(context: Context, config: ModelConfig) -> Found:
    """Where links carry a delta within a step but no whole version, deltas should be sent.

        broadcast_s <= step_s        or not delta_s <= step_s

    A version that travels longer than a step takes is not the newest any more when it arrives:
    rollouts are as old as the lag allows, or the learner waits for them. The times are those of
    `broadcast-time`, with all bytes of a version and with those of a delta
    (`runspec.estimate.broadcast`). Samplers rebuild a version from what they hold, and check
    every tensor of it. Silent where `broadcast-time` speaks.
    """
    spec = context.spec
    if spec.broadcast.format != "full" or not graph_is_sound(spec):
        return
    size = version_size(spec, config)
    reached, with_deltas = arrivals(spec, size.whole), arrivals(spec, size.delta)
    step_s = step_seconds(spec, config) if reached else None
    if step_s is None or not with_deltas[-1].seconds <= step_s < reached[-1].seconds:
        return
    slowest, level = reached[-1], spec.grpo.async_level - step_overlap(spec)
    if 0 < level * step_s < slowest.seconds:
        return
    yield Violation(
        ("broadcast", "format"),
        f"{slowest.name} has a version {slowest.seconds:.0f} s after it is published, and a step "
        f"may take {step_s:.0f} s; what changed in it would be there after "
        f"{with_deltas[-1].seconds:.1f} s",
        numbers={
            "version_bytes": size.whole,
            "delta_bytes": round(size.delta),
            "broadcast_s": float(f"{slowest.seconds:.4g}"),
            "delta_s": float(f"{with_deltas[-1].seconds:.4g}"),
            "step_s": float(f"{step_s:.4g}"),
        },
        suggestion="format: delta",
    )


ORIGIN = "origin"


@rule("asynchrony")
def relay_upstream(context: Context) -> Found:
    """Every upstream of a relay must be the origin or a relay of the spec.

    A relay fetches policy versions from the servers of `upstream`, best first. A name that is no
    server gives it no address to ask, and whoever is below it waits. `origin` is the publisher's
    own server.
    """
    relays = _upstreams(context.spec)
    for name, above in relays.items():
        unknown = [other for other in above if other not in (ORIGIN, *relays)]
        yield from relation(
            not unknown,
            f"broadcast.relays.{name}.upstream",
            f"no relay {', '.join(unknown)}; known: {', '.join((ORIGIN, *relays))}",
            "name a relay of broadcast.relays, or origin",
        )


@rule("asynchrony")
def relay_cycle(context: Context) -> Found:
    """No relay may fetch from itself, not even by way of others.

        a -> b -> ... -> a  for no relay a

    A relay asks its upstreams for what it lacks, best first. On a cycle each is offered only what
    it has itself, for as long as it does not turn to another upstream: versions come late, or
    where there is no other upstream never.
    """
    for cycle in _cycles(_upstreams(context.spec)):
        yield Violation(
            ("broadcast", "relays", cycle[0], "upstream"),
            f"fetches from itself: {' from '.join(cycle)}",
            numbers={"relays_in_cycle": len(cycle) - 1},
            suggestion="let one of them fetch from origin alone",
        )


@rule("asynchrony")
def relay_path(context: Context) -> Found:
    """Every relay must have a path to the origin.

        relay -> upstream -> ... -> origin

    New versions enter the graph at the origin alone. A relay without a path to it never has any,
    and its workers wait until their patience ends. Relays on a cycle and unknown upstreams have
    rules of their own, `relay-cycle` and `relay-upstream`.
    """
    relays = _upstreams(context.spec)
    reached = _below_origin(relays)
    told = {name for cycle in _cycles(relays) for name in cycle}
    told |= {name for name, above in relays.items() if not {ORIGIN, *relays} >= set(above)}
    for name, above in relays.items():
        yield from relation(
            name in reached or name in told,
            f"broadcast.relays.{name}.upstream",
            f"fetches from {', '.join(above) or 'nobody'}: no path leads to the origin",
            "add origin",
        )


@rule("asynchrony")
def pool_relays(context: Context) -> Found:
    """The relays that a pool fetches from must be relays of the spec, each named once.

    Workers go down the list, best first, and to the origin at last. A name that is no relay gives
    no address; a second mention says nothing that the first did not.
    """
    known = _upstreams(context.spec)
    for pool in context.spec.samplers:
        wanted = pool.relays or []
        unknown = [name for name in dict.fromkeys(wanted) if name not in known]
        twice = [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]
        where = f"samplers.{pool.name}.relays"
        origin = "; origin comes last by itself" if ORIGIN in unknown else ""
        yield from relation(
            not unknown,
            where,
            f"no relay {', '.join(unknown)}; known: {', '.join(known) or 'none'}{origin}",
            "name relays of broadcast.relays",
        )
        yield from relation(
            not twice, where, f"names {', '.join(twice)} more than once", "name each once"
        )


def graph_is_sound(spec: RunSpec) -> bool:
    """Whether every relay can be reached from the origin, and all names are known."""
    relays = _upstreams(spec)
    named = {name for above in relays.values() for name in above}
    named |= {name for pool in spec.samplers for name in pool.relays or []}
    known = named <= {ORIGIN, *relays}
    return known and not _cycles(relays) and _below_origin(relays) == set(relays)


def _upstreams(spec: RunSpec) -> dict[str, list[str]]:
    relays = spec.broadcast.relays  # `reserved-names` tells of one that is called origin
    return {relay.name: relay.upstream for relay in relays if relay.name != ORIGIN}


def _below_origin(relays: Mapping[str, list[str]]) -> set[str]:
    below: dict[str, list[str]] = defaultdict(list)
    for name, above in relays.items():
        for upstream in above:
            below[upstream].append(name)
    reached, waiting = set(), [ORIGIN]
    while waiting:
        for name in below.pop(waiting.pop(), []):
            reached.add(name)
            waiting.append(name)
    return reached


def _cycles(relays: Mapping[str, list[str]]) -> list[list[str]]:
    """Cycles without a relay in common, each from a relay up to itself; none is left besides."""
    left = {name: [u for u in above if u in relays] for name, above in relays.items()}
    cycles = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            cycles.append(error.args[1][::-1])
            for name in set(cycles[-1]):
                del left[name]
        else:
            return cycles
