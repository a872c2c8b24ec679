"""What pools compute in, and the limits that their proofs are judged by."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule
from verify.thresholds import CALIBRATED, precision_of


@rule("uncalibrated-precision", "verification")
def uncalibrated_precision(context: Context) -> Iterator[Violation]:
    """Proofs may be asked of a pool only where somebody measured what honest ones look like.

        (sampler, validator) is calibrated, or verify.thresholds names the sampler's precision

    The sampler's precision is its quantization or its dtype, the validator's `compute_dtype` of the
    learner. Measured here were float32 against float32, and bfloat16 against either
    (docs/verify.md). fp8 (e4m3) keeps 3 bits of a mantissa where bfloat16 keeps 7: honest work may
    well break the limits of bfloat16. float32 against bfloat16 has those limits too, untested.
    """
    spec = context.spec
    given = {limits.name for limits in spec.verify.thresholds}
    validator = spec.learner.compute_dtype
    for pool in spec.samplers:
        sampler = precision_of(pool)
        calibrated = (sampler, validator) in CALIBRATED or sampler in given
        if spec.verify.prefill_share > 0.0 and not calibrated:
            yield Violation(
                ("samplers", pool.name, "quantization" if pool.quantization else "dtype"),
                f"nobody measured what {sampler} looks like to a validator that computes in "
                f"{validator}",
                numbers={
                    "sampler": sampler,
                    "validator": validator,
                    "prefill_share": spec.verify.prefill_share,
                },
                requires="(sampler, validator) is calibrated, or verify.thresholds has sampler, "
                "or prefill_share = 0",
                suggestion=f"measure honest rollouts and name their limits in verify.thresholds, "
                f"{sampler}",
            )


@rule("unused-thresholds", "verification", "warning")
def unused_thresholds(context: Context) -> Iterator[Violation]:
    """Thresholds should be of a precision that some pool has.

    Limits are looked up by the pool's precision, its quantization or its dtype. Those of a
    precision that no pool has are never read: the limits of the pools are others than they seem.
    """
    present = {precision_of(pool) for pool in context.spec.samplers}
    for limits in context.spec.verify.thresholds:
        if limits.name not in present:
            yield Violation(
                ("verify", "thresholds", limits.name),
                f"no pool computes in {limits.name}; there is {', '.join(sorted(present))}",
                numbers={"pools": 0},
                requires="pools >= 1",
                suggestion="take it out, or rename it to a precision that a pool has",
            )


@rule("thresholds-order", "verification")
def thresholds_order(context: Context) -> Iterator[Violation]:
    """The limit of a mean must not exceed the limit of its parts.

        logprob_submission <= logprob_rollout,   gap_mean <= gap <= gap_max

    A submission's mean spreads less than a rollout's, and a mean gap less than a single token's. A
    looser limit on the mean can never be the one that decides, and `gap_max` below `gap` leaves
    `gap_share` without meaning: the two were exchanged.
    """
    for limits in context.spec.verify.thresholds:
        for low, high in (
            ("logprob_submission", "logprob_rollout"),
            ("gap_mean", "gap"),
            ("gap", "gap_max"),
        ):
            below, above = getattr(limits, low), getattr(limits, high)
            if below > above:
                yield Violation(
                    ("verify", "thresholds", limits.name, low),
                    f"{below:g} is above {high} = {above:g}",
                    numbers={low: below, high: above},
                    requires=f"{low} <= {high}",
                    suggestion="exchange them, or measure again",
                )


@rule("quantized-pool", "samplers")
def quantized_pool(context: Context) -> Iterator[Violation]:
    """A quantised pool must be on GPUs, and of dtype bfloat16 beside the quantised matrices.

    vLLM 0.32 rounds matrices to fp8 as it loads them, and leaves norms, embeddings and activations
    between matrix products in `dtype`, for which its kernels take bfloat16. Its CPU build accepts
    the option and dies in the first load: the kernel is not in it. Workers refuse such a pool.
    """
    for pool in context.spec.samplers:
        where = ("samplers", pool.name)
        if pool.quantization is not None and pool.hardware.kind == "cpu":
            yield Violation(
                (*where, "quantization"),
                f"vLLM does not quantise to {pool.quantization} on CPUs",
                numbers={"quantization": pool.quantization, "kind": pool.hardware.kind},
                requires="kind is not cpu",
                suggestion="set it to null",
            )
        if pool.quantization is not None and pool.dtype != "bfloat16":
            yield Violation(
                (*where, "dtype"),
                f"{pool.quantization} matrices go with bfloat16 beside them, not {pool.dtype}",
                numbers={"quantization": pool.quantization, "dtype": pool.dtype},
                requires="dtype = bfloat16",
                suggestion="dtype: bfloat16",
            )
