"""Rules on the objective (batches, clip bounds, penalties), and on islands that train one model."""

from __future__ import annotations

from runspec.core.schema.role_names import island_processes, island_spec, members
from runspec.lint import Context, Found, divisors, relation, rule


@rule("algorithm", runs="grpo")
def updates_divide_batch(context: Context) -> Found:
    """The rollouts of a step must divide evenly into its optimizer updates.

        prompts_per_step x group_size = n x updates_per_step,  n whole

    A step's P x G rollouts are cut into U batches, one an update. Where U does not divide them the
    batches differ in size, and with them the noise of the gradient and the weight of a rollout.
    INTELLECT-2 (arXiv 2505.07291): 256 x 16 = 8 x 512.
    """
    algorithm = context.spec.grpo
    prompts, size = algorithm.prompts_per_step, algorithm.group_size
    updates = algorithm.updates_per_step
    return relation(
        prompts * size % updates == 0,
        "algorithm.updates_per_step",
        f"{updates} does not divide the {prompts * size} rollouts of a step "
        f"({prompts} prompts x {size})",
        f"{divisors(prompts, updates)[-1]} does, in whole groups",
        {"prompts_per_step": prompts, "group_size": size, "updates_per_step": updates},
    )


@rule("algorithm", "warning", runs="grpo")
def whole_groups(context: Context) -> Found:
    """Each optimizer update of a step must get the same number of whole groups.

        prompts_per_step = n x updates_per_step,  n whole

    The learner never parts a group: update i of U trains the groups from round(i P / U) to
    round((i + 1) P / U). Where U does not divide the P groups, some updates train one group more
    than others. An error where U > P: there are updates without any rollout, which are not made.
    """
    algorithm = context.spec.grpo
    groups, updates = algorithm.prompts_per_step, algorithm.updates_per_step
    if groups * algorithm.group_size % updates:
        return ()  # `updates-divide-batch` says so
    few = updates > groups
    return relation(
        groups % updates == 0,
        "algorithm.updates_per_step",
        f"{groups} groups make {groups} of {updates} updates: the rest would get no rollout"
        if few
        else f"{groups} groups in {updates} updates: some train {groups // updates} groups, "
        f"others {groups // updates + 1}",
        f"{divisors(groups, updates)[-1]} updates get whole groups alike",
        {"prompts_per_step": groups, "updates_per_step": updates},
        "error" if few else "warning",
    )


@rule("algorithm", runs="grpo")
def group_size(context: Context) -> Found:
    """A group needs at least two rollouts: they are compared with one another.

        A_i = (R_i - mean R) / (std R + 1e-6),  std with ddof 1     (arXiv 2402.03300, 4.1.1)

    With a single rollout R - mean R is 0 and std R is 0 / 0: no advantage. The reference system
    trained such groups to NaN, which passes every filter; the learner here refuses them.
    """
    size = context.spec.grpo.group_size
    return relation(
        size >= 2,
        "algorithm.group_size",
        f"{size} rollout a group has nothing to be compared with",
        "8 and 16 are usual",
        {"group_size": size},
    )


@rule("algorithm", runs="grpo")
def clip_bounds(context: Context) -> Found:
    """The bound on ratios of bad tokens must lie above the ordinary clip.

        delta > 1 + eps_high

    Two-sided clipping (INTELLECT-2, arXiv 2505.07291) takes, a token,

        min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A )

    Without delta the minimum is r A where A < 0 and r is large: it has no bound, and one token
    wrecks an update. A delta inside the clip range would cut the gradient of tokens that the clip
    means to keep. The paper's values: eps 0.2, delta 4.
    """
    algorithm = context.spec.grpo
    delta, high = algorithm.clip.delta, algorithm.clip.eps_high
    if algorithm.surrogate == "cispo" or delta is None:
        return ()
    return relation(
        delta > 1 + high,
        "algorithm.clip.delta",
        f"{delta:g} must be greater than 1 + eps_high = {1 + high:g}",
        "4.0 is INTELLECT-2's; null is off",
        {"delta": delta, "eps_high": high},
    )


@rule("algorithm", runs="grpo")
def clip_lower(context: Context) -> Found:
    """The lower clip bound must be a ratio above 0.

        eps_low < 1,  as  1 - eps_low > 0

    A ratio of probabilities is never below 0: a bound there never acts, and the surrogate is not
    the one that was meant. CISPO (arXiv 2506.13585) may go without a lower bound, as its authors
    do, so the rule does not look there.
    """
    low = context.spec.grpo.clip.eps_low
    return relation(
        context.spec.grpo.surrogate != "clip" or low < 1,
        "algorithm.clip.eps_low",
        f"{low:g} must be less than 1: no ratio is below 0",
        "0.2 is usual",
        {"eps_low": low},
    )


@rule("algorithm", runs="grpo")
def cispo(context: Context) -> Found:
    """CISPO weighs tokens by their own clipped ratio: it takes no sequence ratio and no delta.

        - clip(r_t, 1 - eps_low, 1 + eps_high) A log pi(o_t),  the ratio without gradient

    (arXiv 2506.13585, section 3.1). The weight is each token's own and bounded by 1 + eps_high:
    `ratio: sequence` would make it another method, and `clip.delta` would be read by nobody.
    """
    algorithm = context.spec.grpo
    if algorithm.surrogate != "cispo":
        return
    yield from relation(
        algorithm.ratio == "token",
        "algorithm.ratio",
        "surrogate: cispo weighs each token by its own ratio: it goes with ratio: token",
        "token",
    )
    delta = algorithm.clip.delta or 0.0
    yield from relation(
        algorithm.clip.delta is None,
        "algorithm.clip.delta",
        f"{delta:g} has no part in surrogate: cispo, whose weight 1 + eps_high bounds",
        "null",
        {"delta": delta},
    )


@rule("algorithm", "warning", runs="grpo")
def stale_pi_old(context: Context) -> Found:
    """A single update a step with recomputed pi_old needs something that acts against lag.

        r = pi_theta / pi_old = 1  in the first update after pi_old was recomputed

    With one update a step there is no other: the clip never acts, and the gradient is the plain
    policy gradient on rollouts that are up to `async_level` versions old. The mismatch is between
    pi_old and the sampler's mu, and `importance.cap` corrects for it; with `old_logprobs: sampler`
    it is inside the ratio, where the clip bounds it. With several updates the clip sees at least
    the drift inside the step.
    """
    algorithm = context.spec.grpo
    if algorithm.old_logprobs != "recompute" or algorithm.importance.cap is not None:
        return ()
    return relation(
        algorithm.updates_per_step > 1 or algorithm.async_level == 0,
        "algorithm.old_logprobs",
        "in the only update of a step the recomputed ratio is 1: no clip acts, and nothing "
        f"corrects a lag of up to {algorithm.async_level}",
        "old_logprobs: sampler, or importance: {cap: 2.0}",
        {"updates_per_step": 1, "async_level": algorithm.async_level},
    )


@rule("algorithm", runs="grpo")
def importance_cap(context: Context) -> Found:
    """An importance weight needs a recomputed pi_old.

        w = min(pi_old / mu, cap)

    mu is the sampler's policy. With `old_logprobs: sampler` pi_old is mu, w is 1 everywhere, and
    a cap in the spec claims a correction that nobody makes.
    """
    cap = context.spec.grpo.importance.cap
    return relation(
        cap is None or context.spec.grpo.old_logprobs != "sampler",
        "algorithm.importance.cap",
        "with old_logprobs: sampler the weight pi_old / mu is 1 everywhere",
        "null, or old_logprobs: recompute",
        {"cap": cap or 0.0},
    )


@rule("algorithm", runs="grpo")
def one_temperature(context: Context) -> Found:
    """All pools must sample at one temperature, which the loss uses too.

        log pi = log softmax(logits / T)

    in the sampler, in the validator and in the loss. The learner has one T: at another one the
    ratio of an unchanged policy would not be 1, and every token of the pool would look stale.
    """
    first, *others = context.spec.samplers
    wanted = first.sampling.temperature
    for pool in others:
        temperature = pool.sampling.temperature
        yield from relation(
            temperature == wanted,
            f"samplers.{pool.name}.sampling.temperature",
            f"{temperature:g} differs from {wanted:g} of pool {first.name}: the loss knows one "
            "temperature",
            f"{wanted:g}",
            {"temperature": temperature, f"{first.name}.temperature": wanted},
        )


@rule("algorithm", runs="grpo")
def kl_reference(context: Context) -> Found:
    """A KL penalty needs a reference policy.

        loss += beta (exp(d) - d - 1),  d = log pi_ref - log pi_theta     (k3)

    `kl.reference: none` takes pi_ref away, and with it what beta weighs. The reference is version
    0, whose weights in `broadcast.dtype` lie beside the learner's.
    """
    kl = context.spec.grpo.kl
    return relation(
        kl.reference != "none" or kl.coef == 0,
        "algorithm.kl.reference",
        f"none, but coef = {kl.coef:g} weighs the distance from a reference",
        "reference: initial, or coef: 0",
    )


@rule("algorithm", "warning", runs="grpo")
def kl_unused(context: Context) -> Found:
    """A reference policy needs a KL weight: without one nobody asks it.

    With `coef: 0` the penalty is 0 times anything, so the learner neither holds the reference (a
    copy of the weights in `broadcast.dtype`: 2 bytes a parameter in bfloat16, on every shard) nor
    scores with it (a forward pass over every batch). A spec that names `reference: initial` then
    says of the run what is not so.
    """
    kl = context.spec.grpo.kl
    return relation(
        kl.reference != "initial" or kl.coef > 0,
        "algorithm.kl.reference",
        "initial, but coef = 0: no penalty is computed, and no reference is held",
        "a coef such as 1e-3, or reference: none",
    )


@rule("algorithm", "warning", runs="grpo")
def std_without_filter(context: Context) -> Found:
    """Advantages divided by the group's std need the zero-variance filter.

        A = (R - mean R) / (std R + 1e-6),  R = T + P

    In a group whose task rewards T are all equal, what varies is the length term P alone; however
    small it is, the division makes unit advantages of it, so noise in length trains as hard as a
    right answer does. `rewards: task` drops such groups. `rewards: whole` keeps them, as the
    reference system did, and drops those without any advantage, which only cost. docs/evidence.md
    has what each learns.
    """
    algorithm = context.spec.grpo
    return relation(
        algorithm.advantage.normalize != "std" or algorithm.filters.zero_variance,
        "algorithm.filters.zero_variance",
        "false with normalize: std: groups without any advantage are trained on",
        "zero_variance: true, or advantage: {normalize: task}",
    )


@rule("algorithm")
def island_trunk(context: Context) -> Found:
    """The first island must not name a machine: it has the learner's.

        learner.islands.members[0]: no hardware, mesh, hosts or rows

    The first island is the process `learner`, which has the run directory and publishes the
    versions. `learner.hardware`, `mesh`, `hosts` and `packing.rows` are its own; the other islands
    have the same where they do not name theirs.
    """
    for member in members(context.spec)[:1]:
        for key in ("hardware", "mesh", "hosts", "rows"):
            there = "packing.rows" if key == "rows" else key
            yield from relation(
                getattr(member, key) is None,
                f"learner.islands.members.{member.name}.{key}",
                f"{member.name} is the first island, whose {key} is learner.{there}",
                f"set learner.{there}",
            )


@rule("placement")
def island_backend(context: Context) -> Found:
    """On Ray the processes of an island must not be a slice's.

        placement.backend: ray   ->   learner.islands.members[].hosts: 1 on TPUs

    The hosts of such a program must be of one slice. Ray says of which the trunk's node is, and the
    learner's other hosts are taken from that; for islands after the first nothing names a slice.
    """
    spec = context.spec
    for name, processes in island_processes(spec).items():
        kind = island_spec(spec, name).learner.hardware.kind
        yield from relation(
            spec.placement.backend != "ray" or len(processes) == 1 or not kind.startswith("tpu"),
            "placement.backend",
            f"{name} has {len(processes)} hosts of {kind}, and Ray is told of no slice for it",
            "an island of one host, or `runspec prepare` and a machine for each process",
        )


@rule("algorithm")
def island_masters(context: Context) -> Found:
    """Islands must keep their weights in float32.

        learner.master_dtype: float32

    An island's share is the difference of two parameter vectors, of the start and the end of a
    step. In bfloat16 most of it is rounding error: neighbours of w lie 2^-8 |w| apart, and a step
    moves a weight by far less at learning rates of 1e-6.
    """
    learner = context.spec.learner
    return relation(
        learner.islands is None or learner.master_dtype == "float32",
        "learner.master_dtype",
        f"{learner.master_dtype} rounds away what the islands' shares are made of",
        "float32",
    )


@rule("algorithm")
def island_lora(context: Context) -> Found:
    """Islands must train the weights themselves, not adapters.

        learner.lora: null

    Islands average the change of the weights. The change of W + (alpha / rank) A B is no mean of
    changes of A and of B.
    """
    learner = context.spec.learner
    return relation(
        learner.islands is None or learner.lora is None,
        "learner.lora",
        "islands do not train adapters",
        "null, or one learner",
    )


@rule("algorithm")
def island_quorum(context: Context) -> Found:
    """The quorum must not be larger than the number of islands.

        quorum <= islands

    A step is committed once `quorum` islands have offered their shares and `grace` has passed. A
    larger quorum is never reached: each step would wait until the deadline, and stop the run.
    """
    islands = context.spec.learner.islands
    if islands is None or islands.quorum is None:
        return ()
    return relation(
        islands.quorum <= len(islands.members),
        "learner.islands.quorum",
        f"{islands.quorum} of {len(islands.members)} islands",
        "null: all of them",
        {"quorum": islands.quorum, "islands": len(islands.members)},
    )


@rule("algorithm", runs="grpo")
def island_groups(context: Context) -> Found:
    """Every island must have a group for each of its updates.

        prompts_per_step >= islands x updates_per_step

    A step's groups are divided among the islands, and each cuts its part into `updates_per_step`
    batches. An update without a group trains on nothing.
    """
    algorithm, count = context.spec.grpo, len(members(context.spec))
    groups, updates = algorithm.prompts_per_step, algorithm.updates_per_step
    return relation(
        groups >= count * updates,
        "algorithm.prompts_per_step",
        f"{groups} groups for {count} islands x {updates} updates",
        f"at least {count * updates}, or fewer updates_per_step",
        {"prompts_per_step": groups, "islands": count, "updates_per_step": updates},
    )


@rule("algorithm", runs="grpo")
def island_overlap(context: Context) -> Found:
    """Islands that overlap steps need pi_old as sampled, and a lag.

        old_logprobs: sampler  and  async_level >= 1,  where learner.islands.overlap is 1

    With overlap an island begins step s while version s is still being made, from parameters that
    no version has. pi_old cannot be recomputed under them by anybody else. And rollouts of version
    s cannot be there yet: with `async_level: 0` every step would wait for the version that its own
    training makes.
    """
    islands, algorithm = context.spec.learner.islands, context.spec.grpo
    if islands is None or islands.overlap == 0:
        return
    yield from relation(
        algorithm.old_logprobs == "sampler",
        "algorithm.old_logprobs",
        f"{algorithm.old_logprobs}, with learner.islands.overlap: 1",
        "sampler, or overlap: 0",
    )
    yield from relation(
        algorithm.async_level >= 1,
        "algorithm.async_level",
        "0, but a step begins before its version is made",
        "at least 1, or learner.islands.overlap: 0",
        {"async_level": algorithm.async_level, "overlap": 1},
    )


@rule("algorithm", "warning")
def island_momentum(context: Context) -> Found:
    """The sparse codec should go without outer momentum.

        outer.momentum = 0,  where codec.kind: sparse

    What a sparse share leaves out is added to later ones, so a change arrives many steps after it
    was made. Momentum carries it on for 1 / (1 - momentum) further steps. SparseLoCo (arXiv
    2508.15706) and PULSELoCo (arXiv 2602.03839) have none: the error feedback takes its place.
    """
    islands = context.spec.learner.islands
    if islands is None or islands.codec.kind != "sparse":
        return ()
    return relation(
        islands.outer.momentum == 0.0,
        "learner.islands.outer.momentum",
        f"{islands.outer.momentum:g} with codec sparse",
        "0.0",
        {"momentum": islands.outer.momentum},
    )
