"""Rules on samplers and validators: lengths, engines, evaluations, precision and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.memory import CPU_HEAD_SIZES
from runspec.core.models.rope_scaling import Dynamic, Linear, Yarn
from runspec.core.spec.resolved import profile_text
from runspec.core.spec.role_names import elsewhere, validator_names
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.lint.registry import Context, Violation, model_rule, rule
from verify.thresholds import CALIBRATED, precision_of

if TYPE_CHECKING:
    from verify.profile import Profile


@model_rule("model-positions", "samplers", runs="all")
def model_positions(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """max_context must not exceed what the model's own config.json covers.

        model.max_context <= max_position_embeddings     x factor under linear or dynamic RoPE,
                                                         or original length x factor under YaRN

    `max_context` is what the run believes; the config says for which positions the model was
    trained. vLLM refuses a longer `max_model_len` when it starts.
    """
    model, covered = context.spec.model, _positions(config)
    if model.shape is None and model.max_context > covered:
        yield Violation(
            ("model", "max_context"),
            f"{model.max_context} is more than the {covered} positions that the model's "
            "config.json covers",
            numbers={"max_context": model.max_context, "positions": covered},
            suggestion=f"at most {covered}",
        )


def _positions(config: ModelConfig) -> int:
    scaling, own = config.rope_scaling, config.max_position_embeddings
    if isinstance(scaling, Linear | Dynamic):
        return int(own * scaling.factor)
    if isinstance(scaling, Yarn):
        return max(own, int(scaling.original_max_position_embeddings * scaling.factor))
    return own


@model_rule("cpu-head-size", "samplers", "warning")
def cpu_head_size(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """An engine on CPUs must be able to compute the model's heads.

    vLLM 0.32 has attention kernels on CPUs for heads of 32, 64, 80, 96, 112, 128, 160, 192, 224,
    256 and 512 (`get_supported_head_sizes` in `cpu_attn.py`). With another size it starts, and its
    first step ends the engine: `apply` does not start such a run. Tiny models for tests often have
    8 or 16.
    """
    yield from unsupported_heads(context.spec, config)


def unsupported_heads(spec: RunSpec, config: ModelConfig) -> Iterator[Violation]:
    """Engines on CPUs for a model with heads that vLLM does not compute there."""
    size = config.head_dim
    evaluator = spec.evaluator.hardware if spec.evaluations else None
    engines: dict[tuple[str, ...], Hardware | None] = {("evaluator",): evaluator}
    engines |= {("samplers", pool.name): pool.hardware for pool in spec.samplers}
    for where, hardware in engines.items():
        if hardware is not None and hardware.kind == "cpu" and size not in CPU_HEAD_SIZES:
            *sizes, last = map(str, CPU_HEAD_SIZES)
            yield Violation(
                (*where, "hardware", "kind"),
                f"vLLM on CPUs computes heads of {', '.join(sizes)} or {last}, and this model's "
                f"have {size}",
                numbers={"head_dim": size},
                suggestion="a GPU, or a model with heads of such a size",
            )


@rule("evaluation-names", "samplers")
def evaluation_names(context: Context) -> Iterator[Violation]:
    """An evaluation must name a source, a reward term and a pool that the spec has.

    The evaluator asks the problems of `source`, grades all of them with the term `grader` where
    that is set, and samples with the engine settings of `evaluator.pool`. A name that is not there
    leaves it nothing to ask, no way to grade, or no engine.
    """
    spec = context.spec
    sources = [source.name for source in spec.data.sources]
    terms = [term.name for term in spec.reward if term.kind != "target_length"]
    pools = [pool.name for pool in spec.samplers]
    asked: list[tuple[tuple[str, ...], str | None, list[str]]] = [
        (("evaluator", "pool"), spec.evaluator.pool, pools)
    ]
    for each in spec.evaluations:
        path: tuple[str, ...] = ("evaluations", each.name)
        asked += [((*path, "source"), each.source, sources)]
        asked += [((*path, "grader"), each.grader, terms)]
    for where, name, known in asked:
        if name is not None and name not in known:
            yield Violation(
                where,
                f"no {where[-1]} {name}; known: {', '.join(known)}",
                suggestion=f"name one of {', '.join(known)}",
            )


@rule("uncalibrated-precision", "verification")
def uncalibrated_precision(context: Context) -> Iterator[Violation]:
    """Proofs may be asked of a pool only where somebody measured what honest ones look like.

        (sampler, validator) is calibrated, or verify.profiles has one for the pool, or
        verify.thresholds names the sampler's precision

    The sampler's precision is its quantization or its dtype, the validator's `compute_dtype` of the
    learner. Measured here were float32 against float32, and bfloat16 against either
    (docs/verify.md). fp8 (e4m3) keeps 3 bits of a mantissa where bfloat16 keeps 7: honest work may
    well break the limits of bfloat16. float32 against bfloat16 has those limits too, untested.
    `python -m verify calibrate` measures a pool and writes a profile.
    """
    spec = context.spec
    given = {limits.name for limits in spec.verify.thresholds}
    profiles = [found for found in _profiles(context).values() if not isinstance(found, str)]
    validator = spec.learner.compute_dtype
    for pool in spec.samplers:
        sampler = precision_of(pool)
        calibrated = (sampler, validator) in CALIBRATED or sampler in given
        calibrated |= any(not profile.differences(spec, pool) for profile in profiles)
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
                suggestion="measure honest rollouts with `python -m verify calibrate` and name the "
                f"profile in verify.profiles, or limits in verify.thresholds, {sampler}",
            )


@rule("calibration-profile", "verification")
def calibration_profile(context: Context) -> Iterator[Violation]:
    """A profile must be signed by the run's root key, in date, and of this run's pools and model.

        signed by identity.root_public_key,   now <= expires,   one profile a pool

    A profile says by which limits strangers are judged (docs/verify.md, "Calibration"), so nobody
    but the root may sign one. It holds for the engine, precision and hardware of samplers and
    validators that it was measured with, for its temperature, top-p and top-k, and for models of
    that size: where any of these differs, the numbers of honest rollouts do too. One that covers no
    pool is never read, which is a warning: the pools have the published limits.
    """
    covered: dict[str, str] = {}
    for name, profile in _profiles(context).items():
        where = ("verify", "profiles", name)
        if isinstance(profile, str):
            yield Violation(
                where,
                profile,
                suggestion="calibrate again, or have the root sign it with `python -m verify "
                "sign-profile`",
            )
        else:
            yield from _misplaced(context, where, profile, covered)


def _misplaced(
    context: Context, where: tuple[str, ...], profile: Profile, covered: dict[str, str]
) -> Iterator[Violation]:
    spec = context.spec
    differences = {pool.name: profile.differences(spec, pool) for pool in spec.samplers}
    pools = [name for name, found in differences.items() if not found]
    if not pools:
        nearest = min(differences, key=lambda name: len(differences[name]))
        yield Violation(
            where,
            f"covers no pool; for {nearest} it was measured with {differences[nearest][0]}",
            suggestion="calibrate with the pool as it is, or take it out",
            severity="warning",
        )
    for name in pools:
        if name in covered:
            yield Violation(
                where,
                f"covers pool {name}, as {covered[name]} does",
                suggestion="take one of them out",
            )
        covered.setdefault(name, where[-1])
    for what, measured in profile.model.model_dump().items() if context.config else ():
        here = getattr(context.config, what)
        if here != measured:
            yield Violation(
                where,
                f"was measured on a model with {what} {measured}; this one has {here}",
                suggestion="calibrate with the run's model",
            )


def _profiles(context: Context) -> dict[str, Profile | str]:
    """Each profile by its name, or what is wrong with it."""
    if not context.spec.verify.profiles:
        return {}
    # Imported where there is a profile: keys and classes take time.
    from runspec.core.signed import BadSignature
    from verify.profile import open_profile

    root = context.spec.identity.root_public_key
    found: dict[str, Profile | str] = {}
    for item in context.spec.verify.profiles:
        if root is None:
            found[item.name] = "identity.root_public_key is null: no signature could be checked"
            continue
        try:
            text = profile_text(item, context.folder)
            found[item.name] = open_profile(text.encode("utf-8", "replace"), root_public_key=root)
        except UserError as error:
            found[item.name] = error.thing
        except BadSignature as error:
            found[item.name] = str(error)
    return found


@rule("validator-hardware", "verification")
def validator_hardware(context: Context) -> Iterator[Violation]:
    """Validators must not share the learner's accelerators.

        verify.hardware is given, where the learner is on accelerators and validators start here

    One process holds a TPU chip, and JAX takes most of a GPU's memory as it starts. A validator
    without hardware of its own would be on the learner's, and one of the two dies. Validators
    that `placement.roles` leaves to others take what their machine has.
    """
    spec = context.spec
    if (
        spec.verify.hardware is None
        and spec.learner.hardware.kind != "cpu"
        and set(validator_names(spec)) - elsewhere(spec)
    ):
        yield Violation(
            ("verify", "hardware"),
            f"is null: {spec.verify.validators} validators would be on the learner's "
            f"{spec.learner.hardware.kind}",
            suggestion="say what one validator has, like {kind: h100-80g, count: 2}",
        )
