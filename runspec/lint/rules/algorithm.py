"""Rules on the objective: batches, clip bounds, penalties."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, divisors, rule


@rule("updates-divide-batch", "algorithm", runs="grpo")
def updates_divide_batch(context: Context) -> Iterator[Violation]:
    """The rollouts of a step must divide evenly into its optimizer updates.

        prompts_per_step x group_size = n x updates_per_step,  n whole

    A step's P x G rollouts are cut into U batches, one an update. Where U does not divide them the
    batches differ in size, and with them the noise of the gradient and the weight of a rollout.
    INTELLECT-2 (arXiv 2505.07291): 256 x 16 = 8 x 512.
    """
    algorithm = context.spec.grpo
    rollouts = algorithm.prompts_per_step * algorithm.group_size
    if rollouts % algorithm.updates_per_step:
        yield Violation(
            ("algorithm", "updates_per_step"),
            f"{algorithm.updates_per_step} does not divide the {rollouts} rollouts of a step "
            f"({algorithm.prompts_per_step} prompts x {algorithm.group_size})",
            numbers={
                "prompts_per_step": algorithm.prompts_per_step,
                "group_size": algorithm.group_size,
                "updates_per_step": algorithm.updates_per_step,
            },
            suggestion=f"{divisors(algorithm.prompts_per_step, algorithm.updates_per_step)[-1]} "
            "does, in whole groups",
        )


@rule("whole-groups", "algorithm", "warning", runs="grpo")
def whole_groups(context: Context) -> Iterator[Violation]:
    """Each optimizer update of a step must get the same number of whole groups.

        prompts_per_step = n x updates_per_step,  n whole

    The learner never parts a group: update i of U trains the groups from round(i P / U) to
    round((i + 1) P / U). Where U does not divide the P groups, some updates train one group more
    than others. An error where U > P: there are updates without any rollout, which are not made.
    """
    algorithm = context.spec.grpo
    groups, updates = algorithm.prompts_per_step, algorithm.updates_per_step
    if groups % updates == 0 or groups * algorithm.group_size % updates:
        return  # fine, or `updates-divide-batch` says so
    few = updates > groups
    yield Violation(
        ("algorithm", "updates_per_step"),
        f"{groups} groups make {groups} of {updates} updates: the rest would get no rollout"
        if few
        else f"{groups} groups in {updates} updates: some train {groups // updates} groups, "
        f"others {groups // updates + 1}",
        numbers={"prompts_per_step": groups, "updates_per_step": updates},
        suggestion=f"{divisors(groups, updates)[-1]} updates get whole groups alike",
        severity="error" if few else "warning",
    )


@rule("group-size", "algorithm", runs="grpo")
def group_size(context: Context) -> Iterator[Violation]:
    """A group needs at least two rollouts: they are compared with one another.

        A_i = (R_i - mean R) / (std R + 1e-6),  std with ddof 1     (arXiv 2402.03300, 4.1.1)

    With a single rollout R - mean R is 0 and std R is 0 / 0: no advantage. The reference system
    trained such groups to NaN, which passes every filter; the learner here refuses them.
    """
    size = context.spec.grpo.group_size
    if size < 2:
        yield Violation(
            ("algorithm", "group_size"),
            f"{size} rollout a group has nothing to be compared with",
            numbers={"group_size": size},
            suggestion="8 and 16 are usual",
        )


@rule("clip-bounds", "algorithm", runs="grpo")
def clip_bounds(context: Context) -> Iterator[Violation]:
    """The bound on ratios of bad tokens must lie above the ordinary clip.

        delta > 1 + eps_high

    Two-sided clipping (INTELLECT-2, arXiv 2505.07291) takes, a token,

        min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A )

    Without delta the minimum is r A where A < 0 and r is large: it has no bound, and one token
    wrecks an update. A delta inside the clip range would cut the gradient of tokens that the clip
    means to keep. The paper's values: eps 0.2, delta 4.
    """
    algorithm = context.spec.grpo
    clip = algorithm.clip
    if algorithm.surrogate == "cispo" or clip.delta is None or clip.delta > 1 + clip.eps_high:
        return
    yield Violation(
        ("algorithm", "clip", "delta"),
        f"{clip.delta:g} must be greater than 1 + eps_high = {1 + clip.eps_high:g}",
        numbers={"delta": clip.delta, "eps_high": clip.eps_high},
        suggestion="4.0 is INTELLECT-2's; null is off",
    )


@rule("clip-lower", "algorithm", runs="grpo")
def clip_lower(context: Context) -> Iterator[Violation]:
    """The lower clip bound must be a ratio above 0.

        eps_low < 1,  as  1 - eps_low > 0

    A ratio of probabilities is never below 0: a bound there never acts, and the surrogate is not
    the one that was meant. CISPO (arXiv 2506.13585) may go without a lower bound, as its authors
    do, so the rule does not look there.
    """
    algorithm = context.spec.grpo
    if algorithm.surrogate == "clip" and algorithm.clip.eps_low >= 1:
        yield Violation(
            ("algorithm", "clip", "eps_low"),
            f"{algorithm.clip.eps_low:g} must be less than 1: no ratio is below 0",
            numbers={"eps_low": algorithm.clip.eps_low},
            suggestion="0.2 is usual",
        )


@rule("cispo", "algorithm", runs="grpo")
def cispo(context: Context) -> Iterator[Violation]:
    """CISPO weighs tokens by their own clipped ratio: it takes no sequence ratio and no delta.

        - clip(r_t, 1 - eps_low, 1 + eps_high) A log pi(o_t),  the ratio without gradient

    (arXiv 2506.13585, section 3.1). The weight is each token's own and bounded by 1 + eps_high:
    `ratio: sequence` would make it another method, and `clip.delta` would be read by nobody.
    """
    algorithm = context.spec.grpo
    if algorithm.surrogate != "cispo":
        return
    if algorithm.ratio != "token":
        yield Violation(
            ("algorithm", "ratio"),
            "surrogate: cispo weighs each token by its own ratio: it goes with ratio: token",
            suggestion="token",
        )
    if algorithm.clip.delta is not None:
        yield Violation(
            ("algorithm", "clip", "delta"),
            f"{algorithm.clip.delta:g} has no part in surrogate: cispo, whose weight 1 + eps_high "
            "bounds",
            numbers={"delta": algorithm.clip.delta},
            suggestion="null",
        )


@rule("stale-pi-old", "algorithm", "warning", runs="grpo")
def stale_pi_old(context: Context) -> Iterator[Violation]:
    """A single update a step with recomputed pi_old needs something that acts against lag.

        r = pi_theta / pi_old = 1  in the first update after pi_old was recomputed

    With one update a step there is no other: the clip never acts, and the gradient is the plain
    policy gradient on rollouts that are up to `async_level` versions old. The mismatch is between
    pi_old and the sampler's mu, and `importance.cap` corrects for it; with `old_logprobs: sampler`
    it is inside the ratio, where the clip bounds it. With several updates the clip sees at least
    the drift inside the step.
    """
    algorithm = context.spec.grpo
    recomputed = algorithm.old_logprobs == "recompute" and algorithm.importance.cap is None
    if recomputed and algorithm.updates_per_step == 1 and algorithm.async_level > 0:
        yield Violation(
            ("algorithm", "old_logprobs"),
            "in the only update of a step the recomputed ratio is 1: no clip acts, and nothing "
            f"corrects a lag of up to {algorithm.async_level}",
            numbers={"updates_per_step": 1, "async_level": algorithm.async_level},
            suggestion="old_logprobs: sampler, or importance: {cap: 2.0}",
        )


@rule("importance-cap", "algorithm", runs="grpo")
def importance_cap(context: Context) -> Iterator[Violation]:
    """An importance weight needs a recomputed pi_old.

        w = min(pi_old / mu, cap)

    mu is the sampler's policy. With `old_logprobs: sampler` pi_old is mu, w is 1 everywhere, and
    a cap in the spec claims a correction that nobody makes.
    """
    algorithm = context.spec.grpo
    if algorithm.importance.cap is not None and algorithm.old_logprobs == "sampler":
        yield Violation(
            ("algorithm", "importance", "cap"),
            "with old_logprobs: sampler the weight pi_old / mu is 1 everywhere",
            numbers={"cap": algorithm.importance.cap},
            suggestion="null, or old_logprobs: recompute",
        )


@rule("one-temperature", "algorithm", runs="grpo")
def one_temperature(context: Context) -> Iterator[Violation]:
    """All pools must sample at one temperature, which the loss uses too.

        log pi = log softmax(logits / T)

    in the sampler, in the validator and in the loss. The learner has one T: at another one the
    ratio of an unchanged policy would not be 1, and every token of the pool would look stale.
    """
    first = context.spec.samplers[0]
    for pool in context.spec.samplers[1:]:
        if pool.sampling.temperature != first.sampling.temperature:
            yield Violation(
                ("samplers", pool.name, "sampling", "temperature"),
                f"{pool.sampling.temperature:g} differs from {first.sampling.temperature:g} of "
                f"pool {first.name}: the loss knows one temperature",
                numbers={
                    "temperature": pool.sampling.temperature,
                    f"{first.name}.temperature": first.sampling.temperature,
                },
                suggestion=f"{first.sampling.temperature:g}",
            )


@rule("kl-reference", "algorithm", runs="grpo")
def kl_reference(context: Context) -> Iterator[Violation]:
    """A KL penalty needs a reference policy.

        loss += beta (exp(d) - d - 1),  d = log pi_ref - log pi_theta     (k3)

    `kl.reference: none` takes pi_ref away, and with it what beta weighs. The reference is version
    0, whose weights in `broadcast.dtype` lie beside the learner's.
    """
    kl = context.spec.grpo.kl
    if kl.coef > 0 and kl.reference == "none":
        yield Violation(
            ("algorithm", "kl", "reference"),
            f"none, but coef = {kl.coef:g} weighs the distance from a reference",
            suggestion="reference: initial, or coef: 0",
        )


@rule("kl-unused", "algorithm", "warning", runs="grpo")
def kl_unused(context: Context) -> Iterator[Violation]:
    """A reference policy needs a KL weight: without one nobody asks it.

    With `coef: 0` the penalty is 0 times anything, so the learner neither holds the reference (a
    copy of the weights in `broadcast.dtype`: 2 bytes a parameter in bfloat16, on every shard) nor
    scores with it (a forward pass over every batch). A spec that names `reference: initial` then
    says of the run what is not so.
    """
    kl = context.spec.grpo.kl
    if kl.coef == 0 and kl.reference == "initial":
        yield Violation(
            ("algorithm", "kl", "reference"),
            "initial, but coef = 0: no penalty is computed, and no reference is held",
            suggestion="a coef such as 1e-3, or reference: none",
        )


@rule("std-without-filter", "algorithm", runs="grpo")
def std_without_filter(context: Context) -> Iterator[Violation]:
    """Advantages divided by the group's std need the zero-variance filter.

        A = (R - mean R) / (std R + 1e-6),  R = T + P

    In a group whose task rewards T are all equal, what varies is the length term P alone; however
    small it is, the division makes unit advantages of it, so noise in length trains as hard as a
    right answer does. The filter drops such groups by their re-graded task rewards. (The reference
    system filtered by advantages of exactly zero, which almost never fires beside a length term.)
    Without a length term the advantages are 0 and the groups only cost: a warning then.
    """
    algorithm = context.spec.grpo
    if algorithm.advantage.normalize != "std" or algorithm.filters.zero_variance:
        return
    has_length = any(term.kind == "target_length" for term in context.spec.reward)
    yield Violation(
        ("algorithm", "filters", "zero_variance"),
        "false with normalize: std: "
        + (
            "groups that differ in length alone get unit advantages from it"
            if has_length
            else "groups without any advantage are trained on"
        ),
        suggestion="zero_variance: true, or advantage: {normalize: task}",
        severity="error" if has_length else "warning",
    )
