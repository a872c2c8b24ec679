"""Rules on islands: programs that train one model, each with its own machine."""

from __future__ import annotations

from runspec.core.spec.role_names import members
from runspec.lint.registry import Context, Found, relation, rule


@rule("algorithm")
def island_trunk(context: Context) -> Found:
    """The first island must not name a machine: it has the learner's.

        learner.islands.members[0]: no hardware, mesh, hosts or rows

    The first island is the process `learner`, which has the run directory and publishes the
    versions. `learner.hardware`, `mesh`, `hosts` and `packing.rows` are its own; the other islands
    have the same where they do not name theirs.
    """
    for member in members(context.spec)[:1]:
        own = {
            "hardware": member.hardware,
            "mesh": member.mesh,
            "hosts": member.hosts,
            "rows": member.rows,
        }
        for key, value in own.items():
            there = "packing.rows" if key == "rows" else key
            yield from relation(
                value is None,
                f"learner.islands.members.{member.name}.{key}",
                f"{member.name} is the first island, whose {key} is learner.{there}",
                f"set learner.{there}",
            )


@rule("placement")
def island_backend(context: Context) -> Found:
    """Islands need another backend than Ray.

        placement.backend: not ray, where learner.islands is given

    Islands are for machines that no fast network joins; a Ray cluster is one that does, and one
    learner over its nodes trains faster. `local` starts islands on this machine, `kubernetes` on a
    cluster; `runspec prepare` lets people start each on a machine of their own.
    """
    spec = context.spec
    return relation(
        spec.learner.islands is None or spec.placement.backend != "ray",
        "placement.backend",
        "the Ray backend places no islands",
        "local, kubernetes, or learner.islands: null",
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
