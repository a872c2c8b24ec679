"""Rules on samplers and evaluations: lengths, engines, and what both share with the learner."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.entry_points import NO_TPU_SAMPLER
from runspec.core.models import Dynamic, Linear, ModelConfig, Yarn, device_count
from runspec.core.models.parameters import CPU_HEAD_SIZES
from runspec.core.schema import Hardware, RunSpec
from runspec.core.schema.source_files import plays_environments
from runspec.lint import Context, Found, Violation, divisors, model_rule, relation, rule


@rule("samplers")
def sampler_hardware(context: Context) -> Found:
    """Samplers and the evaluator must be on CPUs or GPUs.

    On TPUs vLLM 0.32 returns no custom logits processors (`v1/sample/logits_processor`), so tokens
    would be unseeded and without proof, and its workers cannot load a new version.
    """
    hardware = {f"samplers.{pool.name}": pool.hardware for pool in context.spec.samplers}
    if (own := context.spec.evaluator.hardware) is not None:
        hardware["evaluator"] = own
    for place, its in hardware.items():
        yield from relation(
            not its.kind.startswith("tpu"),
            f"{place}.hardware.kind",
            f"{its.kind}: {NO_TPU_SAMPLER}",
            "a kind of GPU, or cpu",
        )


@rule("samplers")
def context_fits(context: Context) -> Found:
    """The longest prompt and the longest output must fit into the engine's sequences.

        max_prompt_tokens + max_new_tokens <= max_model_len

    The engine stops a sequence at `max_model_len`, whatever it was asked for: the output limit
    would be shorter for long prompts, and those rollouts end without the answer or the end token.
    """
    prompt = context.spec.data.max_prompt_tokens
    for pool in context.spec.samplers:
        new, length = pool.max_new_tokens, pool.max_model_len
        yield from relation(
            prompt + new <= length,
            f"samplers.{pool.name}.max_model_len",
            f"{length} is less than max_prompt_tokens {prompt} + max_new_tokens {new} = "
            f"{prompt + new}",
            f"{prompt + new}, or fewer new tokens",
            {"max_prompt_tokens": prompt, "max_new_tokens": new, "max_model_len": length},
        )


@rule("samplers")
def model_len(context: Context) -> Found:
    """An engine must not make room for longer sequences than the model covers.

        max_model_len <= model.max_context

    Past the positions that it was trained for a model writes noise. Of a `model.shape` they end at
    `max_context`, of a named model the config.json says (`explain model-positions`).
    """
    positions = context.spec.model.max_context
    for pool in context.spec.samplers:
        yield from relation(
            pool.max_model_len <= positions,
            f"samplers.{pool.name}.max_model_len",
            f"{pool.max_model_len} is more than model.max_context = {positions}",
            f"at most {positions}",
            {"max_model_len": pool.max_model_len, "max_context": positions},
        )


@model_rule("samplers", runs="all")
def model_positions(context: Context, config: ModelConfig) -> Found:
    """max_context must not exceed what the model's own config.json covers.

        model.max_context <= max_position_embeddings     x factor under linear or dynamic RoPE,
                                                         or original length x factor under YaRN

    `max_context` is what the run believes; the config says for which positions the model was
    trained. vLLM refuses a longer `max_model_len` when it starts.
    """
    model, covered = context.spec.model, config.max_position_embeddings
    scaling = config.rope_scaling
    if isinstance(scaling, Linear | Dynamic):
        covered = int(covered * scaling.factor)
    elif isinstance(scaling, Yarn):
        covered = max(covered, int(scaling.original_max_position_embeddings * scaling.factor))
    return relation(
        model.shape is not None or model.max_context <= covered,
        "model.max_context",
        f"{model.max_context} is more than the {covered} positions that the model's config.json "
        "covers",
        f"at most {covered}",
        {"max_context": model.max_context, "positions": covered},
    )


@rule("samplers")
def packing_holds(context: Context) -> Found:
    """A packed row must hold the longest prompt with the longest output.

        max_prompt_tokens + max_new_tokens <= learner.packing.tokens
        max_model_len <= learner.packing.tokens     where an environment is played

    Samples are never cut: the first rollout that is longer than a row stops the learner. Rollouts
    of several turns have observations too, which no `max_new_tokens` counts.
    """
    packed, prompt = context.spec.learner.packing.tokens, context.spec.data.max_prompt_tokens
    played = plays_environments(context.spec)
    for pool in context.spec.samplers:
        if played:
            length = pool.max_model_len
            yield from relation(
                length <= packed,
                "learner.packing.tokens",
                f"{packed} cannot hold an episode of pool {pool.name}: max_model_len {length}",
                f"at least {length}",
                {"max_model_len": length, "packing.tokens": packed},
            )
        new = pool.max_new_tokens
        yield from relation(
            prompt + new <= packed,
            "learner.packing.tokens",
            f"{packed} cannot hold a sequence of pool {pool.name}: max_prompt_tokens {prompt} + "
            f"max_new_tokens {new} = {prompt + new}",
            f"at least {prompt + new}",
            {"max_prompt_tokens": prompt, "max_new_tokens": new, "packing.tokens": packed},
        )


@model_rule("samplers", runs="all")
def attention_window(context: Context, config: ModelConfig) -> Found:
    """A packed row must not be longer than the model is exact for.

        learner.packing.tokens <= sliding window, or the length where dynamic RoPE begins to stretch

    The learner attends over whole segments with fixed rotary frequencies. Past a model's sliding
    window, or where dynamic RoPE changes every key, that would be another model than the sampler's,
    so it is refused.
    """
    limit, packed = config.exact_length, context.spec.learner.packing.tokens
    if limit is None:
        return ()
    return relation(
        packed <= limit,
        "learner.packing.tokens",
        f"{packed}, but the model's attention window or dynamic RoPE begins to tell above {limit}",
        f"at most {limit}",
        {"packing.tokens": packed, "limit": limit},
    )


@model_rule("samplers", "warning")
def cpu_head_size(context: Context, config: ModelConfig) -> Found:
    """An engine on CPUs must be able to compute the model's heads.

    vLLM 0.32 has attention kernels on CPUs for heads of 32, 64, 80, 96, 112, 128, 160, 192, 224,
    256 and 512 (`get_supported_head_sizes` in `cpu_attn.py`). With another size it starts, and its
    first step ends the engine: `apply` does not start such a run. Tiny models for tests often have
    8 or 16.
    """
    return unsupported_heads(context.spec, config)


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


@rule("samplers", "warning")
def neutral_sampling(context: Context) -> Found:
    """Sampling should not cut the distribution that ratios are of: top_p 1, top_k off.

        token ~ softmax(logits / T) over the tokens kept

    Samplers and validators compute log-probs over the tokens that top-k and top-p keep. The learner
    computes log softmax(logits / T) over all tokens: its ratio to mu, which `importance.cap`
    corrects by, is too small by the share that was kept, a factor that differs from token to token.
    Nor can the loss pull up a token that sampling never shows. `old_logprobs: sampler` makes every
    ratio of the loss such a one.
    """
    for pool in context.spec.samplers:
        top_p, top_k = pool.sampling.top_p, pool.sampling.top_k
        for field, value, keeps_all, neutral in (
            ("top_p", top_p, top_p == 1.0, "1.0"),
            ("top_k", top_k, top_k <= 0, "-1"),
        ):
            yield from relation(
                keeps_all,
                f"samplers.{pool.name}.sampling.{field}",
                f"{value} cuts the distribution that the learner's ratios are of",
                neutral,
                {field: value},
            )


@rule("samplers")
def pool_devices(context: Context) -> Found:
    """A replica must have the devices that its parallelism divides the model over.

        parallel.tensor x parallel.data <= devices of a replica

    `hardware` of a pool is what one replica has, and one replica is one engine of `parallel.data`
    copies of the model, each over `parallel.tensor` ranks. With fewer devices it does not start: an
    error. With more the rest idle: a warning.
    """
    for pool in context.spec.samplers:
        devices, ranks = device_count(pool.hardware), pool.parallel.devices
        if devices is None and pool.hardware.kind == "cpu":
            continue
        devices = devices or 1
        short, copies = devices < ranks, pool.parallel.data
        yield from relation(
            devices == ranks,
            f"samplers.{pool.name}.parallel.tensor",
            f"{ranks} ranks on {devices} device{'s' if devices > 1 else ''}"
            + ("" if short else f": {devices - ranks} idle"),
            f"hardware: {{count: {ranks}}}, or parallel: {{tensor: {max(1, devices // copies)}}}",
            {"tensor": pool.parallel.tensor, "data": copies, "devices": devices},
            "error" if short else "warning",
        )


@model_rule("samplers")
def pool_heads(context: Context, config: ModelConfig) -> Found:
    """Tensor parallelism of a pool must divide the model's heads.

        num_attention_heads mod tensor = 0
        num_key_value_heads mod tensor = 0,  or  tensor mod num_key_value_heads = 0

    vLLM gives each rank whole query heads and refuses to start else. Of key/value heads each rank
    holds an equal share, or several ranks hold copies of one.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    fitting = [n for n in divisors(heads, heads) if kv_heads % n == 0 or n % kv_heads == 0]
    for pool in context.spec.samplers:
        ranks = pool.parallel.tensor
        yield from relation(
            heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0),
            f"samplers.{pool.name}.parallel.tensor",
            f"{ranks} ranks cannot share {heads} heads and {kv_heads} key/value heads",
            f"one of {', '.join(map(str, fitting))}",
            {"tensor": ranks, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        )


@rule("samplers")
def quantized_pool(context: Context) -> Found:
    """A quantised pool must be on GPUs, and of dtype bfloat16 beside the quantised matrices.

    vLLM 0.32 rounds matrices to fp8 as it loads them, and leaves norms, embeddings and activations
    between matrix products in `dtype`, for which its kernels take bfloat16. Its CPU build accepts
    the option and dies in the first load: the kernel is not in it. Workers refuse such a pool.
    """
    for pool in context.spec.samplers:
        if pool.quantization is None:
            continue
        yield from relation(
            pool.hardware.kind != "cpu",
            f"samplers.{pool.name}.quantization",
            f"vLLM does not quantise to {pool.quantization} on CPUs",
            "set it to null",
        )
        yield from relation(
            pool.dtype == "bfloat16",
            f"samplers.{pool.name}.dtype",
            f"{pool.quantization} matrices go with bfloat16 beside them, not {pool.dtype}",
            "dtype: bfloat16",
        )


@rule("samplers")
def trained_source(context: Context) -> Found:
    """At least one source must be trained on.

        some data.sources[].train

    A source with `train: false` is asked in evaluations only. Without another one, there is no
    problem for a lease.
    """
    sources = context.spec.data.sources
    return relation(
        any(source.train for source in sources),
        f"data.sources.{sources[0].name}.train",
        "no source is trained on",
        "set train to true, or add a source",
    )


@rule("samplers")
def evaluation_names(context: Context) -> Found:
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


@rule("samplers")
def evaluation_room(context: Context) -> Found:
    """Prompt and answer of an evaluation must fit into the context of the evaluator's engine.

        data.max_prompt_tokens + evaluations[].max_new_tokens <= samplers[].max_model_len

    The engine makes room for `max_model_len` tokens of a sequence. A longer answer than the pool's
    own may ask for more.
    """
    spec, prompt = context.spec, context.spec.data.max_prompt_tokens
    wanted = spec.evaluator.pool or spec.samplers[0].name
    pool = next((pool for pool in spec.samplers if pool.name == wanted), None)
    for evaluation in spec.evaluations:
        new = evaluation.max_new_tokens
        if pool is None or new is None:
            continue
        yield from relation(
            prompt + new <= pool.max_model_len,
            f"evaluations.{evaluation.name}.max_new_tokens",
            f"{prompt} tokens of a prompt and {new} of an answer, {pool.max_model_len} fit",
            f"at most {pool.max_model_len - prompt}, or raise max_model_len of {pool.name}",
            {"tokens": prompt + new, "max_model_len": pool.max_model_len},
        )
