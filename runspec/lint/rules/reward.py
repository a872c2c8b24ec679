"""Rewards, their targets, and the problems they grade."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule
from runspec.spec.schema import Reward, RunSpec


def length_reward(spec: RunSpec) -> Reward | None:
    """The term that names the target lengths, where the run has one."""
    return next((term for term in spec.reward if term.kind == "target_length"), None)


@rule("task-advantage", "reward")
def task_advantage(context: Context) -> Iterator[Violation]:
    """Advantages normalised by task need a length term that is added."""
    spec = context.spec
    if spec.algorithm.advantage.normalize != "task":
        return
    term = length_reward(spec)
    if term is not None and term.form != "exact":
        yield Violation(
            ("algorithm", "advantage", "normalize"),
            "task needs a length term that is added to the task reward: form exact, "
            f"not {term.form}",
        )


@rule("target-length", "reward")
def target_length(context: Context) -> Iterator[Violation]:
    """A target_length term names its form, its alpha and its targets."""
    spec = context.spec
    terms = [term for term in spec.reward if term.kind == "target_length"]
    for term in terms:
        needed = ("form", "targets") if term.form == "clip" else ("form", "alpha", "targets")
        for field in needed:
            if not getattr(term, field):
                yield Violation(("reward", term.name), f"kind target_length needs {field}")
    if len(terms) == len(spec.reward):
        yield Violation(("reward",), "no term grades the task itself")
    if terms and "{target}" not in spec.data.length_prompt:
        yield Violation(("data", "length_prompt"), "must say {target}, the length asked for")


@rule("one-term-a-kind", "reward")
def one_term_a_kind(context: Context) -> Iterator[Violation]:
    """Each kind of reward appears once."""
    spec = context.spec
    first: dict[str, str] = {}
    for term in spec.reward:
        if term.kind in first:
            yield Violation(
                ("reward", term.name, "kind"),
                f"a second term of kind {term.kind}; {first[term.kind]} is the first",
            )
        first.setdefault(term.kind, term.name)


@rule("targets-reachable", "reward")
def targets_reachable(context: Context) -> Iterator[Violation]:
    """Every target length must be shorter than the output limit."""
    spec = context.spec
    term = length_reward(spec)
    longest = max(term.targets or [0]) if term else 0
    for pool in spec.samplers:
        if term and longest >= pool.max_new_tokens:
            yield Violation(
                ("reward", term.name, "targets"),
                f"{longest} must be less than max_new_tokens = {pool.max_new_tokens} "
                f"of pool {pool.name}",
            )


@rule("source-fields", "reward")
def source_fields(context: Context) -> Iterator[Violation]:
    """A source names what its kind needs."""
    spec = context.spec
    needed = {"reasoning_gym": ("dataset", "size"), "parquet": ("uri",)}
    for source in spec.data.sources:
        for field in needed.get(source.kind, ()):
            if getattr(source, field) is None:
                yield Violation(
                    ("data", "sources", source.name), f"kind {source.kind} needs {field}"
                )
