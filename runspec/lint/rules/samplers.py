"""Rules on samplers: lengths, engines, and what they must share with the learner."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.models.config import Dynamic, Linear, ModelConfig, Yarn
from runspec.core.models.hardware import device_count
from runspec.core.models.memory import CPU_HEAD_SIZES
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.lint.registry import Context, Violation, divisors, model_rule, rule


@rule("context-fits", "samplers")
def context_fits(context: Context) -> Iterator[Violation]:
    """The longest prompt and the longest output must fit into the engine's sequences.

        max_prompt_tokens + max_new_tokens <= max_model_len

    The engine stops a sequence at `max_model_len`, whatever it was asked for: the output limit
    would be shorter for long prompts, and those rollouts end without the answer or the end token.
    """
    prompt = context.spec.data.max_prompt_tokens
    for pool in context.spec.samplers:
        longest = prompt + pool.max_new_tokens
        if longest > pool.max_model_len:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is less than max_prompt_tokens {prompt} + max_new_tokens "
                f"{pool.max_new_tokens} = {longest}",
                numbers={
                    "max_prompt_tokens": prompt,
                    "max_new_tokens": pool.max_new_tokens,
                    "max_model_len": pool.max_model_len,
                },
                suggestion=f"{longest}, or fewer new tokens",
            )


@rule("model-len", "samplers")
def model_len(context: Context) -> Iterator[Violation]:
    """An engine must not make room for longer sequences than the model covers.

        max_model_len <= model.max_context

    Past the positions that it was trained for a model writes noise. Of a `model.shape` they end at
    `max_context`, of a named model the config.json says (`explain model-positions`).
    """
    positions = context.spec.model.max_context
    for pool in context.spec.samplers:
        if pool.max_model_len > positions:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is more than model.max_context = {positions}",
                numbers={"max_model_len": pool.max_model_len, "max_context": positions},
                suggestion=f"at most {positions}",
            )


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


@rule("packing-holds", "samplers")
def packing_holds(context: Context) -> Iterator[Violation]:
    """A packed row must hold the longest prompt with the longest output.

        max_prompt_tokens + max_new_tokens <= learner.packing.tokens

    Samples are never cut: the first rollout that is longer than a row stops the learner.
    """
    spec = context.spec
    packed, prompt = spec.learner.packing.tokens, spec.data.max_prompt_tokens
    for pool in spec.samplers:
        longest = prompt + pool.max_new_tokens
        if packed < longest:
            yield Violation(
                ("learner", "packing", "tokens"),
                f"{packed} cannot hold a sequence of pool {pool.name}: max_prompt_tokens {prompt} "
                f"+ max_new_tokens {pool.max_new_tokens} = {longest}",
                numbers={
                    "max_prompt_tokens": prompt,
                    "max_new_tokens": pool.max_new_tokens,
                    "packing.tokens": packed,
                },
                suggestion=f"at least {longest}",
            )


@model_rule("attention-window", "samplers", runs="all")
def attention_window(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """A packed row must not be longer than the model is exact for.

        learner.packing.tokens <= sliding window, or the length where dynamic RoPE begins to stretch

    The learner attends over whole segments with fixed rotary frequencies. Past a model's sliding
    window, or where dynamic RoPE changes every key, that would be another model than the sampler's,
    so it is refused.
    """
    limit, packed = config.exact_length, context.spec.learner.packing.tokens
    if limit is not None and packed > limit:
        yield Violation(
            ("learner", "packing", "tokens"),
            f"{packed}, but the model's attention window or dynamic RoPE begins to tell above "
            f"{limit}",
            numbers={"packing.tokens": packed, "limit": limit},
            suggestion=f"at most {limit}",
        )


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


@rule("neutral-sampling", "samplers", "warning")
def neutral_sampling(context: Context) -> Iterator[Violation]:
    """Sampling should not cut the distribution that ratios are of: top_p 1, top_k off.

        token ~ softmax(logits / T) over the tokens kept

    Samplers and validators compute log-probs over the tokens that top-k and top-p keep. The learner
    computes log softmax(logits / T) over all tokens: its ratio to mu, which `importance.cap`
    corrects by, is too small by the share that was kept, a factor that differs from token to token.
    Nor can the loss pull up a token that sampling never shows. `old_logprobs: sampler` makes every
    ratio of the loss such a one.
    """
    for pool in context.spec.samplers:
        sampling = pool.sampling
        for field, value, cuts, neutral in (
            ("top_p", sampling.top_p, sampling.top_p < 1.0, "1.0"),
            ("top_k", sampling.top_k, sampling.top_k > 0, "-1"),
        ):
            if cuts:
                yield Violation(
                    ("samplers", pool.name, "sampling", field),
                    f"{value} cuts the distribution that the learner's ratios are of",
                    numbers={field: value},
                    suggestion=neutral,
                )


@rule("pool-devices", "samplers")
def pool_devices(context: Context) -> Iterator[Violation]:
    """A replica must have the devices that its parallelism divides the model over.

        parallel.tensor x parallel.data <= devices of a replica

    `hardware` of a pool is what one replica has, and one replica is one engine of `parallel.data`
    copies of the model, each over `parallel.tensor` ranks. With fewer devices it does not start: an
    error. With more the rest idle: a warning.
    """
    for pool in context.spec.samplers:
        devices, ranks = device_count(pool.hardware), pool.parallel.devices
        if devices is None and pool.hardware.kind != "cpu":
            devices = 1
        if devices is None or devices == ranks:
            continue
        short = devices < ranks
        yield Violation(
            ("samplers", pool.name, "parallel", "tensor"),
            f"{ranks} ranks on {devices} device{'s' if devices > 1 else ''}"
            + ("" if short else f": {devices - ranks} idle"),
            numbers={
                "tensor": pool.parallel.tensor,
                "data": pool.parallel.data,
                "devices": devices,
            },
            suggestion=f"hardware: {{count: {ranks}}}, or parallel: "
            f"{{tensor: {max(1, devices // pool.parallel.data)}}}",
            severity="error" if short else "warning",
        )


@model_rule("pool-heads", "samplers")
def pool_heads(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """Tensor parallelism of a pool must divide the model's heads.

        num_attention_heads mod tensor = 0
        num_key_value_heads mod tensor = 0,  or  tensor mod num_key_value_heads = 0

    vLLM gives each rank whole query heads and refuses to start else. Of key/value heads each rank
    holds an equal share, or several ranks hold copies of one.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for pool in context.spec.samplers:
        ranks = pool.parallel.tensor
        if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
            continue
        fitting = [n for n in divisors(heads, heads) if kv_heads % n == 0 or n % kv_heads == 0]
        yield Violation(
            ("samplers", pool.name, "parallel", "tensor"),
            f"{ranks} ranks cannot share {heads} heads and {kv_heads} key/value heads",
            numbers={
                "tensor": ranks,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
            },
            suggestion=f"one of {', '.join(map(str, fitting))}",
        )
