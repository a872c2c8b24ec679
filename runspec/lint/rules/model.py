"""Rules on the model: its shape, version 0, adapters and tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models.family import model_names, named_model
from runspec.core.models.parameters import matrix_shapes
from runspec.core.schema.source_files import column_of
from runspec.lint import (
    Context,
    Found,
    TokenizerFiles,
    Violation,
    divisors,
    model_rule,
    relation,
    rule,
)
from runspec.lock import is_on_hub, require_files

PADDING = 0.01
"""Share of a vocabulary by which models of a family differ: rows that no token has."""


@rule("model")
def shape_heads(context: Context) -> Found:
    """The heads of a shape must divide its width and one another, and be of even size.

        hidden_size = H x h,  h even         H = n x K,  n whole

    H query heads of size h, K key/value heads, each of which serves H / K query heads. RoPE turns
    pairs of a head's numbers, so h is even.
    """
    shape = context.spec.model.shape
    if shape is None:
        return
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size
    if shape.head_dim is None:
        yield from relation(
            width % (2 * heads) == 0,
            "model.shape.hidden_size",
            f"{width} does not give {heads} heads of an even size",
            f"{-(-width // (2 * heads)) * 2 * heads}",
            {"hidden_size": width, "num_attention_heads": heads},
        )
    else:
        yield from relation(
            shape.head_dim % 2 == 0,
            "model.shape.head_dim",
            f"{shape.head_dim} is odd, RoPE turns pairs",
            f"{shape.head_dim + 1}",
            {"head_dim": shape.head_dim},
        )
    yield from relation(
        heads % kv_heads == 0,
        "model.shape.num_key_value_heads",
        f"{kv_heads} does not divide {heads} heads",
        f"{divisors(heads, kv_heads)[-1]}",
        {"num_key_value_heads": kv_heads, "num_attention_heads": heads},
    )


@rule("model")
def one_model(context: Context) -> Found:
    """Exactly one of `model.hf` and `model.shape` must be given.

    The first names weights that exist, the second the shape of weights that the run makes: by its
    warm start, or at random where it trains on documents. With both it would be open which is
    version 0; with neither there is none. `model.revision` is the commit of `model.hf`, and means
    nothing without it.
    """
    model = context.spec.model
    both = model.hf is not None and model.shape is not None
    yield from relation(
        (model.hf is None) != (model.shape is None),
        "model",
        f"exactly one of hf and shape is needed, {'both were' if both else 'neither was'} given",
        "null takes one away" if both else "name a Hugging Face repository in hf",
    )
    yield from relation(
        model.revision is None or model.hf is not None,
        "model.revision",
        "is the commit of model.hf, which is not given",
        "set it to null",
    )


@rule("model", runs="grpo")
def warm_start(context: Context) -> Found:
    """A `model.shape` must have a warm start, and a model with weights must have none.

    A shape is not weights: the supervised steps of `warm_start` make them before version 0 exists.
    Reinforcement learning alone cannot, for random weights are never right and the reward says
    nothing. A model of `model.hf` is version 0 as it is.
    """
    shape, warm = context.spec.model.shape, context.spec.warm_start
    yield from relation(
        shape is None or warm is not None,
        "model.shape",
        "has no weights: warm_start must make them",
        "warm_start: {} takes the defaults",
    )
    yield from relation(
        shape is not None or warm is None,
        "warm_start",
        "makes the weights of a model.shape, and none is given",
        "set it to null",
    )


@rule("model", runs="supervised")
def shape_tokenizer(context: Context) -> Found:
    """A `model.shape` that trains on documents must name a tokenizer.

    A shape has no files, so no tokenizer comes with it. `python -m learner_jax tokenizer train`
    makes one from the documents themselves; `model.tokenizer.hf` names its directory, relative to
    the spec. The tokenizer becomes part of every version.
    """
    model = context.spec.model
    return relation(
        model.shape is None or model.tokenizer is not None,
        "model.shape",
        "has no tokenizer: model.tokenizer must name one",
        "tokenizer: {hf: DIRECTORY}, with its tokenizer.json",
    )


@rule("model")
def lora_targets(context: Context) -> Found:
    """Each matrix must be named once among the targets of adapters.

        W + (alpha / rank) A B       (LoRA, arXiv 2106.09685)

    A matrix has one A and one B; a name given twice is a slip for another one.
    """
    targets = context.spec.learner.lora.targets if context.spec.learner.lora else []
    for target, count in sorted(Counter(targets).items()):
        yield from relation(
            count == 1,
            "learner.lora.targets",
            f"names {target} more than once",
            f"[{', '.join(dict.fromkeys(targets))}]",
            {target: count},
        )


@rule("model")
def model_config(context: Context) -> Found:
    """The model's config.json must be readable, and of a decoder that the learner computes.

    A local `model.hf` directory is read without a network, and so are the shapes that ship with
    runspec. Known families: qwen2, qwen3, llama, mistral. What transformers or vLLM would compute
    and the learner would not (another activation, quantised weights, RoPE that differs between
    layers) is refused, for the two would be different policies.
    """
    error = context.config_error
    if error is None or any(shape_heads(context)):
        return
    key = "hf" if context.spec.model.shape is None else "shape"
    yield Violation(
        ("model", key),
        f"{error.place}: {error.thing}" if error.place else error.thing,
        suggestion=error.remedy or "mend that field, or name another model",
    )


@rule("model", "warning")
def unknown_model(context: Context) -> Found:
    """The shape of a model on the Hub ought to be known where its spec is linted.

    Heads, widths, vocabulary and lengths come from the config.json of a local directory, or from
    the shapes that ship with runspec; nothing is asked of a network. Of another model nothing can
    be said to divide or to fit, and no time can be told: the rules that need its shape say nothing,
    and that is no sign that all is well. Directories that are elsewhere are not looked at.
    """
    hf = context.spec.model.hf
    if hf is None or context.config is not None or not is_on_hub(hf, context.folder):
        return
    yield Violation(
        ("model", "hf"),
        f"the shape of {hf[:80]} is not known here: what needs it is not checked",
        suggestion=f"a directory beside the spec with its config.json; known without one: "
        f"{', '.join(model_names())}",
    )


@rule("model", "warning")
def model_path(context: Context) -> Found:
    """The path of a model or a tokenizer ought to be a directory.

    What is no repository's name (`org/name`) is a path, such as `./x` or `~/x`; a relative one
    starts beside the spec. Nothing is downloaded: without the directory the run does not start. A
    warning, for a spec may be linted elsewhere. What the directory lacks, `apply` says.
    """
    model = context.spec.model
    named: dict[tuple[str, ...], str | None] = {("model", "hf"): model.hf}
    if model.tokenizer is not None:
        named["model", "tokenizer", "hf"] = model.tokenizer.hf
    for location, name in named.items():
        try:
            if name is not None and "://" not in name:
                require_files(name, context.folder)
        except UserError as error:
            yield Violation(location, error.thing, suggestion=error.remedy)


@model_rule("model")
def lora_rank(context: Context, config: ModelConfig) -> Found:
    """The rank of adapters must be below that of the matrices that they adapt.

        rank < min(in, out)  of every target

    A B of that rank or more can be any matrix, and A and B together hold more numbers than W: full
    fine-tuning at a higher price.
    """
    lora, shapes = context.spec.learner.lora, matrix_shapes(config)
    ranks = [(min(shapes[name]), name) for name in lora.targets if name in shapes] if lora else []
    if lora is None or not ranks:
        return ()
    least, target = min(ranks)
    return relation(
        lora.rank < least,
        "learner.lora.rank",
        f"{lora.rank} is no low rank for {target}, a matrix of rank {least}",
        "8 to 128 are usual for models of billions of parameters",
        {"rank": lora.rank, "least": least},
    )


@model_rule("model")
def tokenizer_vocabulary(context: Context, config: ModelConfig) -> Found:
    """Every token of the tokenizer must be a row of the model's embedding.

        largest token id < vocab_size

    Every role takes the tokenizer from the policy version. An id beyond the embedding is an error
    in vLLM; JAX reads the last row in its place, in silence, and the two are no longer one policy.
    Fewer tokens than rows are usual: vocabularies are padded. Looked at where `model.tokenizer.hf`
    or `model.hf` is a local directory.
    """
    files = context.tokenizer
    largest = files.largest_id if files else None
    if files is None or largest is None or largest < config.vocab_size:
        return
    yield Violation(
        _tokenizer_key(context),
        f"{files.folder}: token ids up to {largest}, but the model has {config.vocab_size}",
        numbers={"largest_id": largest, "vocab_size": config.vocab_size},
        suggestion="the tokenizer that the model was trained with",
    )


@rule("model")
def tokenizer_agrees(context: Context) -> Found:
    """A tokenizer given beside the model must give its tokens the model's own ids.

    `model.tokenizer` replaces the model's tokenizer in every role alike, so roles cannot differ
    from one another. But a token whose id is another than in the model's own files would be read
    by the model as another word. New tokens may be added. Where both are local directories all ids
    are compared; of models whose shape ships with runspec the sizes of the vocabularies, which are
    padded by less than 1 % from one model of a family to the next.
    """
    model, config = context.spec.model, context.config
    if model.tokenizer is None or model.hf is None:
        return
    ours, theirs = _own_files(context), context.tokenizer
    where = ("model", "tokenizer", "hf")
    if ours is not None and theirs is not None:
        shared = ours.ids.keys() & theirs.ids.keys()
        differing = sorted(text for text in shared if ours.ids[text] != theirs.ids[text])
        if differing:
            text = differing[0]
            yield Violation(
                where,
                f"{len(differing)} tokens have other ids than in the model's own tokenizer, "
                f"{text[:40]!r} {theirs.ids[text]} in the place of {ours.ids[text]}",
                suggestion="leave model.tokenizer out",
            )
        return
    named = named_model(model.tokenizer.hf)
    if named is None or config is None:
        return
    sizes = int(named["vocab_size"]), config.vocab_size
    if abs(sizes[0] - sizes[1]) > PADDING * max(sizes):
        yield Violation(
            where,
            f"{model.tokenizer.hf} has {sizes[0]} tokens, {model.hf} {sizes[1]}: they are no "
            "family, and ids of one are other words in the other",
            numbers={"tokenizer.vocab_size": sizes[0], "vocab_size": sizes[1]},
            suggestion="leave model.tokenizer out",
        )


@rule("model")
def end_token(context: Context) -> Found:
    """Tokenizer and model must name the same end token.

        id of tokenizer_config.json's eos_token  in  eos_token_id of config.json,
                                                 and of generation_config.json

    Rollouts end at the tokenizer's `eos_token` and at no other, and `sft` trains it as the end of
    what the assistant says. Where the model was trained to end with another one, outputs run on to
    the limit, and none has an answer. Looked at where the files are in a local directory; files
    that name no end token disagree with nothing.

    A warning where the chat template ends the assistant's turn with another token, as ChatML does
    beside the `<|endoftext|>` of a base model: the model may have learnt that one. Looked at where
    jinja2 is installed.
    """
    files = context.tokenizer
    if files is None or files.end_token is None or not files.ids:
        return
    token, where = files.end_token, _tokenizer_key(context)
    number = files.ids.get(token)
    if number is None:
        yield Violation(
            where,
            f"{files.folder}: eos_token {token!r} is not in the vocabulary",
            suggestion="name a token of tokenizer.json in tokenizer_config.json",
        )
        return
    own = files if context.spec.model.tokenizer is None else _own_files(context)
    for name, ends in own.end_ids.items() if own else ():
        if number not in ends:
            yield Violation(
                where,
                f"eos_token {token!r} is {number}, but {name} ends at "
                f"{', '.join(map(str, sorted(ends)))}",
                suggestion="the files of one and the same model",
            )
    other = _turn_end(files.folder) if context.spec.algorithm.kind != "pretrain" else None
    if other is not None and other[0] != token:
        yield Violation(
            where,
            f"{files.folder}: the chat template ends the assistant's turn with {other[0]!r} "
            f"({other[1]}), but rollouts end at eos_token {token!r} ({number}) alone",
            numbers={"turn_end": other[1], "eos_token": number},
            suggestion=f"if the model ends its turns so: eos_token {other[0]!r} in "
            f"tokenizer_config.json, and eos_token_id {other[1]} in config.json and "
            "generation_config.json",
            severity="warning",
        )


def _turn_end(folder: Path) -> tuple[str, int] | None:
    """Return the token, and its id, with which the chat template ends the assistant's turn."""
    try:
        from runspec.core import tokenizer_files  # a base installation has no jinja2

        files = tokenizer_files.TokenizerFiles.read(folder)
        template = tokenizer_files.ChatTemplate.of(files)
        rest = "" if template is None else template.after_assistant()
    except (ImportError, UserError):
        return None
    added = {token.content: i for i, token in files.tokenizer.get_added_tokens_decoder().items()}
    found = [(rest.index(text), -len(text), text) for text in added if text and text in rest]
    return (min(found)[2], added[min(found)[2]]) if found else None


@rule("model", "warning")
def chat_template(context: Context) -> Found:
    """The tokenizer ought to bring a chat template, and one that asks for no date.

    Prompts are put into the template of the policy version's tokenizer (`chat_template.jinja`, or
    `chat_template` in tokenizer_config.json), in every role alike. Without one the problem is
    encoded as it is: right for a base model, and not what an instructed model was trained on. An
    error in runs of `sft` that read conversations: the template says which tokens are the
    assistant's. Runs of `pretrain` use none. Looked at where the tokenizer is in a local directory.

    A template may ask for the date by `strftime_now`, as Mistral Small's does. A run needs the same
    prompts on every machine and every day, so the date is always 26 July 2024.
    """
    files, spec = context.tokenizer, context.spec
    conversations = spec.algorithm.kind == "sft" and any(
        column_of(source, "sft")[0] == "messages" for source in spec.data.sources
    )
    if files is None or not (spec.supervised is None or conversations):
        return
    if files.has_template:
        if "strftime_now" in (files.template or ""):
            yield Violation(
                _tokenizer_key(context),
                f"{files.folder}: the chat template asks for the date (strftime_now), and a run "
                "needs the same prompt everywhere: the date is always 26 July 2024",
                suggestion="write a chat_template.jinja with the date that you want",
            )
        return
    yield Violation(
        _tokenizer_key(context),
        f"{files.folder}: no chat template; "
        + (
            "nothing says which tokens of a conversation are the assistant's"
            if conversations
            else "problems are put to the model as they are"
        ),
        suggestion="chat_template.jinja of the model's repository",
        severity="error" if conversations else None,
    )


def _tokenizer_key(context: Context) -> tuple[str, ...]:
    return ("model", "hf") if context.spec.model.tokenizer is None else ("model", "tokenizer", "hf")


def _own_files(context: Context) -> TokenizerFiles | None:
    hf = context.spec.model.hf
    return None if hf is None else TokenizerFiles.read(context.folder / hf)
