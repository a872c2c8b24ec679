"""What untrusted work needs to be checked."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("recomputable-sampling", "verification")
def recomputable_sampling(context: Context) -> Iterator[Violation]:
    """What is sampled must be what a validator can recompute."""
    spec = context.spec
    for pool in spec.samplers:
        sampling = pool.sampling
        where = ("samplers", pool.name, "sampling")
        if pool.trust == "untrusted" and not sampling.seeded:
            yield Violation(
                (*where, "seeded"),
                "an untrusted pool must sample by the lease's seed: without it best-of-n "
                "cannot be told from honest work",
            )
        if sampling.seeded or pool.trust == "untrusted":
            for field, value, neutral in (
                ("top_p", sampling.top_p, 1.0),
                ("top_k", sampling.top_k, -1),
            ):
                if value != neutral:
                    yield Violation(
                        (*where, field), f"must be {neutral} with seeded sampling, not {value}"
                    )
