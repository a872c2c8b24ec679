"""Rules on rewards: their terms and targets, and recorded solve rates."""

from __future__ import annotations

from runspec.core.spec.schema import Reward, RunSpec
from runspec.lint.registry import Context, Found, found_by_loader, relation, rule


def length_term(spec: RunSpec) -> Reward | None:
    """Return the term that rewards the length asked for."""
    return next((term for term in spec.reward if term.kind == "target_length"), None)


@found_by_loader(group="reward")
def problems() -> None:
    """Every problem can be read, every task type is graded, and every grader can grade.

    `runspec lint --data` looks at it, and so do `apply` and `doctor`: a process imports the
    plug-ins, reads every row of every source and grades two answers to a problem of each task
    type. It finds plug-ins that do not import, malformed rows, task types without a reward, sources
    of which no prompt fits `data.max_prompt_tokens`, and graders that raise. Each would end the run
    or leave it without rewards. Rows that are left out are counted, and no fault. Of a run that
    trains on documents it reads the first document of each file.
    """


@rule("reward")
def task_advantage(context: Context) -> Found:
    """Advantages normalised by task need a length term that is added.

        A = (T - mean T) / (std T + 1e-6) + (P - mean P),  where R = T + P

    Only the form `exact` is a sum, P = - alpha |target - length|. `max` and `clip` multiply the
    task reward: there is no P that could keep its own scale.
    """
    term = length_term(context.spec)
    if term is None or context.spec.grpo.advantage.normalize != "task":
        return ()
    return relation(
        term.form == "exact",
        "algorithm.advantage.normalize",
        f"task needs a length term that is added to the task reward: form exact, not {term.form}",
        f"normalize: std, or reward: {{{term.name}: {{form: exact}}}}",
    )


@rule("reward")
def target_length(context: Context) -> Found:
    """A target_length term must name its form, its targets and, unless it clips, its alpha.

        exact   R = T - alpha |target - length|                         (INTELLECT-2, 3.1.2)
        max     R = T clip(alpha (target - length) + 0.5, 0, 1)         (L1, arXiv 2503.04697)
        clip    R = T if length <= target else 0

    The target is drawn for each group from `targets`, and the prompt tells it.
    """
    for term in context.spec.reward:
        if term.kind != "target_length":
            continue
        clips = term.form == "clip"
        for field, given, usual in (
            ("form", term.form, "exact"),
            ("alpha", term.alpha or clips, "3e-4"),
            ("targets", term.targets, "[1000, 2000]"),
        ):
            yield from relation(
                bool(given), f"reward.{term.name}", f"kind target_length needs {field}", usual
            )


@rule("reward")
def task_reward(context: Context) -> Found:
    """Some term of the reward must grade the task itself.

    A length term alone rewards any text of the right length. Nothing then tells a right answer
    from a wrong one, and the zero-variance filter, which looks at task rewards, drops every group.
    """
    return relation(
        any(term.kind != "target_length" for term in context.spec.reward),
        "reward",
        "no term grades the task itself",
        "add one such as {name: math, kind: math}",
    )


@rule("reward")
def length_prompt(context: Context) -> Found:
    """The prompt must tell the length that the reward asks for.

    `data.length_prompt` is appended to the problem with `{target}` filled in. Without it the policy
    cannot know which of the targets its group drew, and the length term is noise to it.
    """
    return relation(
        length_term(context.spec) is None or "{target}" in context.spec.data.length_prompt,
        "data.length_prompt",
        "must say {target}, the length asked for",
        "Think for {target} tokens before giving a response.",
    )


@rule("reward")
def one_term_a_kind(context: Context) -> Found:
    """Each kind of reward must appear once.

    A problem is graded by the term whose kind is its task's; of two terms of a kind one would never
    be asked.
    """
    first: dict[str, str] = {}
    for term in context.spec.reward:
        other = first.setdefault(term.kind, term.name)
        yield from relation(
            other == term.name,
            f"reward.{term.name}.kind",
            f"a second term of kind {term.kind}; {other} is the first",
            f"change {other} instead",
        )


@rule("reward")
def targets_reachable(context: Context) -> Found:
    """Every target length must be shorter than the output limit.

        target < max_new_tokens

    The length counts all output tokens, the end token included. At a target of the limit or beyond
    it a rollout that does as it was told is cut off before its answer, and gets no task reward.
    """
    term = length_term(context.spec)
    for pool in context.spec.samplers:
        if term is None:
            return
        longest, limit = max(term.targets or [0]), pool.max_new_tokens
        yield from relation(
            longest < limit,
            f"reward.{term.name}.targets",
            f"{longest} must be less than max_new_tokens = {limit} of pool {pool.name}",
            "leave room for the answer after the thinking",
            {"target": longest, "max_new_tokens": limit},
        )


@rule("reward", "warning")
def length_swamps_task(context: Context) -> Found:
    """The length penalty must not be able to outweigh the task reward.

        alpha x max |target - max_new_tokens| <= 1        for P = - alpha |target - length|

    Task rewards lie in [0, 1]. Where the worst length costs more than a right answer gives, a wrong
    answer of the right length beats a right one that ran on, and early in training, when most
    outputs run on, the penalty is all that the policy learns from. INTELLECT-2's own alpha (3e-4,
    up to 9 at the limit) exceeds the bound, and its authors report rising task rewards all
    the same.
    """
    term = length_term(context.spec)
    if term is None or term.form != "exact" or not term.alpha or not term.targets:
        return ()
    limit = max(pool.max_new_tokens for pool in context.spec.samplers)
    distance = max(abs(target - limit) for target in term.targets)
    return relation(
        term.alpha * distance <= 1,
        f"reward.{term.name}.alpha",
        f"{term.alpha:g} x {distance} tokens = {term.alpha * distance:.3g}: an output at the limit "
        "can lose more than a right answer gives",
        f"alpha <= {1 / (distance or 1):.2g}, or a lower max_new_tokens",
        {"alpha": term.alpha, "distance": distance, "max_new_tokens": limit},
    )


@rule("reward")
def solve_rate(context: Context) -> Found:
    """The offline filter must have rows to filter, and bounds of which the lower is not above.

        min <= max

    Problems are kept whose recorded solve rate lies in [min, max]; with the bounds the wrong way
    round none does. A generator records none: `python -m sampler solve-rates` measures those of
    its problems and writes them as rows. INTELLECT-2 kept 0.125 to 0.5 of eight tries by a 7B
    model.
    """
    for source in context.spec.data.sources:
        rate, where = source.solve_rate, f"data.sources.{source.name}.solve_rate"
        if rate is None:
            continue
        made = source.kind == "reasoning_gym"
        yield from relation(
            not made,
            where,
            "kind reasoning_gym makes problems, of which no solve rate is recorded",
            "measure them with `python -m sampler solve-rates`, and read its file",
        )
        yield from relation(
            made or rate.min <= rate.max,
            f"{where}.min",
            f"{rate.min:g} is above max = {rate.max:g}: no problem is kept",
            f"{{min: {rate.max:g}, max: {rate.min:g}}}",
            {"min": rate.min, "max": rate.max},
        )
