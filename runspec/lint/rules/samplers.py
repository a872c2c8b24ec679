"""Rules on samplers: lengths, engines, and what they must share with the learner."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.models.config import ModelConfig
from runspec.core.models.memory import CPU_HEAD_SIZES
from runspec.core.models.rope_scaling import Dynamic, Linear, Yarn
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.lint.registry import Context, Violation, model_rule


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
