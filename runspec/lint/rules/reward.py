"""Rules on rewards: terms, targets, and the problems that they grade."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("one-term-a-kind", "reward")
def one_term_a_kind(context: Context) -> Iterator[Violation]:
    """Each kind of reward must appear once.

    A problem is graded by the term whose kind is its task's; of two terms of a kind one would never
    be asked.
    """
    first: dict[str, str] = {}
    for term in context.spec.reward:
        if term.kind in first:
            yield Violation(
                ("reward", term.name, "kind"),
                f"a second term of kind {term.kind}; {first[term.kind]} is the first",
                suggestion=f"change {first[term.kind]} instead",
            )
        first.setdefault(term.kind, term.name)


@rule("targets-reachable", "reward")
def targets_reachable(context: Context) -> Iterator[Violation]:
    """Every target length must be shorter than the output limit.

        target < max_new_tokens

    The length counts all output tokens, the end token included. At a target of the limit or beyond
    it a rollout that does as it was told is cut off before its answer, and gets no task reward.
    """
    spec = context.spec
    term = next((term for term in spec.reward if term.kind == "target_length"), None)
    longest = max(term.targets or [0]) if term else 0
    for pool in spec.samplers:
        if term and longest >= pool.max_new_tokens:
            yield Violation(
                ("reward", term.name, "targets"),
                f"{longest} must be less than max_new_tokens = {pool.max_new_tokens} "
                f"of pool {pool.name}",
                numbers={"target": longest, "max_new_tokens": pool.max_new_tokens},
                suggestion="leave room for the answer after the thinking",
            )
