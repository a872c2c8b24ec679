"""Lag: how long versions live, and how long they travel."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


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
            requires="keep_versions >= async_level + 2",
            suggestion=f"keep_versions: {needed}",
        )


@rule("lease-outlasts-step", "asynchrony", "warning")
def lease_outlasts_step(context: Context) -> Iterator[Violation]:
    """A lease should expire before the step that waits for it gives up.

        verify.lease_timeout < algorithm.fill.deadline

    Groups train in the order of their leases, so that short outputs gain nothing. A worker that
    vanishes holds its place until its lease expires and counts as withheld. Where that takes as
    long as the step may fill, one lost worker is enough for a step to close short, or to stall.
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
            requires="lease_timeout < deadline",
            suggestion="a little more than the longest submission takes",
        )
