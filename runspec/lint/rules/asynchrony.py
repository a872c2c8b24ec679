"""Lag: how long versions live, and how long they travel."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.estimate.broadcast import arrivals
from runspec.estimate.rates import step_seconds
from runspec.estimate.version_size import version_size
from runspec.lint.registry import Context, Violation, rule
from runspec.lint.rules.relays import graph_is_sound


@rule("versions-kept", "asynchrony")
def versions_kept(context: Context) -> Iterator[Violation]:
    """Versions must be kept as long as rollouts of them are sampled and checked.

        keep_versions >= async_level + 2

    While step s is trained, rollouts of the versions s - async_level to s may train in it: that is
    async_level + 1 versions that workers fetch and validators recompute with. One more is being
    published meanwhile. With fewer a version is removed under those who need it.
    """
    needed = context.spec.algorithm.async_level + 2
    kept = context.spec.broadcast.keep_versions
    if kept < needed:
        yield Violation(
            ("broadcast", "keep_versions"),
            f"{kept} is less than async_level + 2 = {needed}: a version would be removed while "
            "rollouts of it are sampled and checked",
            numbers={"keep_versions": kept, "async_level": context.spec.algorithm.async_level},
            suggestion=f"keep_versions: {needed}",
        )


@rule("lease-outlasts-step", "asynchrony", "warning")
def lease_outlasts_step(context: Context) -> Iterator[Violation]:
    """A lease should expire before the step that waits for it gives up.

        verify.lease_timeout < algorithm.fill.deadline

    Groups train in the order of their leases, so that short outputs gain nothing. A worker that
    vanishes holds its place until its lease expires, if no other waits for its groups. Where that
    takes as long as the step may fill, one lost worker is enough for a step to close short.
    """
    timeout, deadline = (
        context.spec.verify.lease_timeout,
        context.spec.algorithm.fill.deadline,
    )
    if timeout >= deadline:
        yield Violation(
            ("verify", "lease_timeout"),
            f"{timeout:g} s is not less than fill.deadline = {deadline:g} s: a worker that "
            "vanishes holds up its step to the end",
            numbers={"lease_timeout_s": timeout, "deadline_s": deadline},
            suggestion="a little more than the longest submission takes",
        )


@rule("broadcast-time", "asynchrony")
def broadcast_time(context: Context) -> Iterator[Violation]:
    """A version must reach its slowest worker within the lag that is allowed.

        broadcast_s <= async_level x step_s

    The step that trains a rollout is at most `async_level` after the version that sampled it. Where
    a version travels longer than that many steps last, the worker at the end of the slowest
    declared path always samples too late: its rollouts expire, or the learner waits. A version of
    P parameters has 2 P bytes (4 P in float32), its delta as many as changed elements take
    (`runspec.estimate.version_size`), sent over the links that `download` and `upload` declare,
    cut-through and shared (`runspec.estimate.broadcast`); step_s is the longer of training and
    sampling, neither waiting (`runspec.estimate.rates`). INTELLECT-2
    (arXiv 2505.07291): 14 minutes for 62 GB, steps of 22, async level 2. Silent where no link is
    declared, a speed is not known, or async_level is 0 and every step waits by intent.
    """
    spec, config = context.spec, context.config
    level = spec.algorithm.async_level
    if config is None or level == 0 or not graph_is_sound(spec):
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
            "async_level": level,
            "step_s": float(f"{step_s:.4g}"),
        },
        suggestion=("broadcast.format: delta, " if helps else "")
        + "a faster link, more relays, or a higher async_level",
    )
