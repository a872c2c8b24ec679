"""Rules on rewards: terms, targets, and the problems that they grade."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.spec.schema import Reward, RunSpec
from runspec.lint.registry import Context, Violation, rule


def length_reward(spec: RunSpec) -> Reward | None:
    """The term that names the target lengths, where the run has one."""
    return next((term for term in spec.reward if term.kind == "target_length"), None)


@rule("task-advantage", "reward")
def task_advantage(context: Context) -> Iterator[Violation]:
    """Advantages normalised by task need a length term that is added.

        A = (T - mean T) / (std T + 1e-6) + (P - mean P),  where R = T + P

    Only the form `exact` is a sum, P = - alpha |target - length|. `max` and `clip` multiply the
    task reward: there is no P that could keep its own scale.
    """
    spec = context.spec
    term = length_reward(spec)
    if spec.grpo.advantage.normalize != "task" or term is None or term.form == "exact":
        return
    yield Violation(
        ("algorithm", "advantage", "normalize"),
        f"task needs a length term that is added to the task reward: form exact, not {term.form}",
        suggestion=f"normalize: std, or reward: {{{term.name}: {{form: exact}}}}",
    )


@rule("target-length", "reward")
def target_length(context: Context) -> Iterator[Violation]:
    """A target_length term must name its form, its targets and, unless it clips, its alpha.

        exact   R = T - alpha |target - length|                         (INTELLECT-2, 3.1.2)
        max     R = T clip(alpha (target - length) + 0.5, 0, 1)         (L1, arXiv 2503.04697)
        clip    R = T if length <= target else 0

    The target is drawn for each group from `targets`, and the prompt tells it.
    """
    for term in context.spec.reward:
        if term.kind != "target_length":
            continue
        needed = ("form", "targets") if term.form == "clip" else ("form", "alpha", "targets")
        for field in needed:
            if not getattr(term, field):
                yield Violation(
                    ("reward", term.name),
                    f"kind target_length needs {field}",
                    suggestion={"form": "exact", "alpha": "3e-4", "targets": "[1000, 2000]"}[field],
                )


@rule("task-reward", "reward")
def task_reward(context: Context) -> Iterator[Violation]:
    """Some term of the reward must grade the task itself.

    A length term alone rewards any text of the right length. Nothing then tells a right answer
    from a wrong one, and the zero-variance filter, which looks at task rewards, drops every group.
    """
    if all(term.kind == "target_length" for term in context.spec.reward):
        yield Violation(
            ("reward",),
            "no term grades the task itself",
            suggestion="add one such as {name: math, kind: math}",
        )


@rule("length-prompt", "reward")
def length_prompt(context: Context) -> Iterator[Violation]:
    """The prompt must tell the length that the reward asks for.

    `data.length_prompt` is appended to the problem with `{target}` filled in. Without it the policy
    cannot know which of the targets its group drew, and the length term is noise to it.
    """
    spec = context.spec
    if length_reward(spec) is not None and "{target}" not in spec.data.length_prompt:
        yield Violation(
            ("data", "length_prompt"),
            "must say {target}, the length asked for",
            suggestion="Think for {target} tokens before giving a response.",
        )


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
    term = length_reward(spec)
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


@rule("length-swamps-task", "reward", "warning")
def length_swamps_task(context: Context) -> Iterator[Violation]:
    """The length penalty must not be able to outweigh the task reward.

        alpha x max |target - max_new_tokens| <= 1        for P = - alpha |target - length|

    Task rewards lie in [0, 1]. Where the worst length costs more than a right answer gives, a wrong
    answer of the right length beats a right one that ran on, and early in training, when most
    outputs run on, the penalty is all that the policy learns from. INTELLECT-2's own alpha (3e-4,
    up to 9 at the limit) exceeds the bound, and its authors report rising task rewards all
    the same.
    """
    spec = context.spec
    term = length_reward(spec)
    if term is None or term.form != "exact" or not term.alpha or not term.targets:
        return
    limit = max(pool.max_new_tokens for pool in spec.samplers)
    distance = max(abs(target - limit) for target in term.targets)
    if term.alpha * distance > 1:
        yield Violation(
            ("reward", term.name, "alpha"),
            f"{term.alpha:g} x {distance} tokens = {term.alpha * distance:.3g}: an output at the "
            "limit can lose more than a right answer gives",
            numbers={"alpha": term.alpha, "distance": distance, "max_new_tokens": limit},
            suggestion=f"alpha <= {1 / distance:.2g}, or a lower max_new_tokens",
        )
