"""Rules on islands: programs that train one model, each with its own machine."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.spec.islands import members
from runspec.lint.registry import Context, Violation, rule

_ISLANDS = ("learner", "islands")


@rule("island-trunk", "algorithm")
def island_trunk(context: Context) -> Iterator[Violation]:
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
            if value is not None:
                there = "packing.rows" if key == "rows" else key
                yield Violation(
                    (*_ISLANDS, "members", member.name, key),
                    f"{member.name} is the first island, whose {key} is learner.{there}",
                    suggestion=f"set learner.{there}",
                )


@rule("island-backend", "placement")
def island_backend(context: Context) -> Iterator[Violation]:
    """Islands need another backend than Ray.

        placement.backend: not ray, where learner.islands is given

    Islands are for machines that no fast network joins; a Ray cluster is one that does, and one
    learner over its nodes trains faster. `local` starts islands on this machine, `kubernetes` on a
    cluster; `runspec prepare` lets people start each on a machine of their own.
    """
    spec = context.spec
    if spec.learner.islands is not None and spec.placement.backend == "ray":
        yield Violation(
            ("placement", "backend"),
            "the Ray backend places no islands",
            suggestion="local, kubernetes, or learner.islands: null",
        )


@rule("island-masters", "algorithm")
def island_masters(context: Context) -> Iterator[Violation]:
    """Islands must keep their weights in float32.

        learner.master_dtype: float32

    An island's share is the difference of two parameter vectors, of the start and the end of a
    step. In bfloat16 most of it is rounding error: neighbours of w lie 2^-8 |w| apart, and a step
    moves a weight by far less at learning rates of 1e-6.
    """
    learner = context.spec.learner
    if learner.islands is not None and learner.master_dtype != "float32":
        yield Violation(
            ("learner", "master_dtype"),
            f"{learner.master_dtype} rounds away what the islands' shares are made of",
            suggestion="float32",
        )


@rule("island-lora", "algorithm")
def island_lora(context: Context) -> Iterator[Violation]:
    """Islands must train the weights themselves, not adapters.

        learner.lora: null

    Islands average the change of the weights. The change of W + (alpha / rank) A B is no mean of
    changes of A and of B.
    """
    learner = context.spec.learner
    if learner.islands is not None and learner.lora is not None:
        yield Violation(
            ("learner", "lora"),
            "islands do not train adapters",
            suggestion="null, or one learner",
        )


@rule("island-quorum", "algorithm")
def island_quorum(context: Context) -> Iterator[Violation]:
    """The quorum must not be larger than the number of islands.

        quorum <= islands

    A step is committed once `quorum` islands have offered their shares and `grace` has passed. A
    larger quorum is never reached: each step would wait until the deadline, and stop the run.
    """
    islands = context.spec.learner.islands
    if islands is None or islands.quorum is None or islands.quorum <= len(islands.members):
        return
    yield Violation(
        (*_ISLANDS, "quorum"),
        f"{islands.quorum} of {len(islands.members)} islands",
        numbers={"quorum": islands.quorum, "islands": len(islands.members)},
        suggestion="null: all of them",
    )


@rule("island-groups", "algorithm", runs="grpo")
def island_groups(context: Context) -> Iterator[Violation]:
    """Every island must have a group for each of its updates.

        prompts_per_step >= islands x updates_per_step

    A step's groups are divided among the islands, and each cuts its part into `updates_per_step`
    batches. An update without a group trains on nothing.
    """
    algorithm, count = context.spec.grpo, len(members(context.spec))
    needed = count * algorithm.updates_per_step
    if algorithm.prompts_per_step < needed:
        yield Violation(
            ("algorithm", "prompts_per_step"),
            f"{algorithm.prompts_per_step} groups for {count} islands x "
            f"{algorithm.updates_per_step} updates",
            numbers={
                "prompts_per_step": algorithm.prompts_per_step,
                "islands": count,
                "updates_per_step": algorithm.updates_per_step,
            },
            suggestion=f"at least {needed}, or fewer updates_per_step",
        )


@rule("island-overlap", "algorithm", runs="grpo")
def island_overlap(context: Context) -> Iterator[Violation]:
    """Islands that overlap steps need pi_old as sampled, and a lag.

        old_logprobs: sampler  and  async_level >= 1,  where learner.islands.overlap is 1

    With overlap an island begins step s while version s is still being made, from parameters that
    no version has. pi_old cannot be recomputed under them by anybody else. And rollouts of version
    s cannot be there yet: with `async_level: 0` every step would wait for the version that its own
    training makes.
    """
    spec = context.spec
    if spec.learner.islands is None or spec.learner.islands.overlap == 0:
        return
    if spec.grpo.old_logprobs != "sampler":
        yield Violation(
            ("algorithm", "old_logprobs"),
            f"{spec.grpo.old_logprobs}, with learner.islands.overlap: 1",
            suggestion="sampler, or overlap: 0",
        )
    if spec.grpo.async_level < 1:
        yield Violation(
            ("algorithm", "async_level"),
            "0, but a step begins before its version is made",
            numbers={"async_level": spec.grpo.async_level, "overlap": 1},
            suggestion="at least 1, or learner.islands.overlap: 0",
        )


@rule("island-momentum", "algorithm", "warning")
def island_momentum(context: Context) -> Iterator[Violation]:
    """The sparse codec should go without outer momentum.

        outer.momentum = 0,  where codec.kind: sparse

    What a sparse share leaves out is added to later ones, so a change arrives many steps after it
    was made. Momentum carries it on for 1 / (1 - momentum) further steps. SparseLoCo (arXiv
    2508.15706) and PULSELoCo (arXiv 2602.03839) have none: the error feedback takes its place.
    """
    islands = context.spec.learner.islands
    if islands is None or islands.codec.kind != "sparse" or islands.outer.momentum == 0.0:
        return
    yield Violation(
        (*_ISLANDS, "outer", "momentum"),
        f"{islands.outer.momentum:g} with codec sparse",
        numbers={"momentum": islands.outer.momentum},
        suggestion="0.0",
    )
