"""Rules on the optimizer and its rows, and on rewards: their terms, targets and solve rates."""

from __future__ import annotations

from runspec.core.schema import Reward, RunSpec
from runspec.estimate.assumed import LORA_GAIN, weight_move
from runspec.lint import Context, Found, found_by_loader, relation, rule

LEAST_MOVE, LARGEST_MOVE = 5e-5, 0.5
"""Move of a weight x hidden size between which fine-tuning is known to work."""
FROM_NOTHING = 10.0
"""How much larger both are where a model of random weights trains on documents."""
NARROWEST, WIDEST = 64, 16384
"""Hidden sizes between which a model lies whose shape is not known."""
USERS = {
    "betas": ("kind", ("adamw", "muon")),
    "eps": ("kind", ("adamw", "muon")),
    "momentum": ("kind", ("sgd", "muon")),
    "decay_updates": ("schedule", ("linear", "cosine", "wsd")),
    "final_lr": ("schedule", ("linear", "cosine", "wsd")),
}
"""Fields that only some values of `kind` or `schedule` use."""


@rule("algorithm", "warning")
def learning_rate(context: Context) -> Found:
    """The learning rate must lie in the band in which training is known to work.

        5e-5 <= move x D <= 0.5        D the hidden size; ten times that for `model.shape` under
                                       `pretrain` and `sft`
        adamw   move = lr, as with muon, whose updates have the same size
        sgd     move = lr clip_norm / ((1 - momentum) sqrt(P)),  P trained parameters

    With LoRA lr / 10 takes the place of lr. AdamW moves every weight by about lr an update; with
    sgd P weights share a move whose norm is at most lr clip_norm / (1 - momentum). Where moves
    agree in sign, D of them add up in each activation, so move x D is about the relative change of
    the activations by one update (hence Adam's rate goes as 1 / width: Tensor Programs V, arXiv
    2203.03466). Above a half a single update replaces what the model knows; below 5e-5 hundreds of
    updates do nothing. At 32B (D = 5120) AdamW's band is 1e-8 to 1e-4, at D = 64 it is 8e-7 to
    8e-3; that of sgd at 32B, with clip_norm 1 and momentum 0.95, is 9e-5 to 0.9.

    Inside: INTELLECT-2 3e-7 at D = 5120 (1.5e-3), DeepSeekMath 1e-6 at 4096 (4e-3, arXiv
    2402.03300), DAPO 1e-6 at 5120 (arXiv 2503.14476), the laptop profile 5e-4 at 64 (0.03).
    Random weights hold nothing that an update could replace: Llama 7B 3e-4 at 4096 (1.2, arXiv
    2302.13971), METAGENE-1 6e-4 at 4096 (2.5, arXiv 2501.02045). Adapters want about ten times the
    rate ("LoRA Without Regret", Thinking Machines, 2025). Of a model whose shape is not known D is
    taken as 64 for the upper bound and 16384 for the lower, and sgd is not looked at.
    """
    spec, config = context.spec, context.config
    optimizer, lr, gain = spec.optimizer, spec.optimizer.lr, LORA_GAIN if spec.learner.lora else 1.0
    if config is None and optimizer.kind == "sgd":
        return ()
    width = None if config is None else config.hidden_size
    # The rate that moves a weight by 1.
    unit = gain if config is None else lr / weight_move(spec, config)
    if spec.supervised is not None and spec.model.shape is not None:
        unit *= FROM_NOTHING
    least = unit * LEAST_MOVE / (width or WIDEST)
    largest = unit * LARGEST_MOVE / (width or NARROWEST)
    of = f"a hidden size of {width}" if width else "any usual model"
    return relation(
        least <= lr <= largest,
        "optimizer.lr",
        f"{lr:g} is {'below' if lr < least else 'above'} what trains {of} with {optimizer.kind}"
        + (" and adapters" if spec.learner.lora else ""),
        "published runs of 7B to 32B use AdamW at 3e-7 to 1e-6, adapters 1e-5 to 2e-4"
        if spec.supervised is None
        else "published runs of 7B use AdamW at 1e-5 to tune and 3e-4 from random weights",
        {"lr": lr, "least": least, "largest": largest},
    )


@rule("algorithm")
def optimizer_fields(context: Context) -> Found:
    """The optimizer's fields must be those that its kind and schedule use.

        betas, eps                 kind: adamw or muon
        momentum                   kind: sgd or muon
        decay_updates, final_lr    schedule: linear, cosine or wsd, which need decay_updates

    A field that is not used must keep its default: a value there was meant for another kind.
    """
    optimizer = context.spec.optimizer
    for name, (tag, users) in USERS.items():
        value, chosen = getattr(optimizer, name), getattr(optimizer, tag)
        yield from relation(
            chosen in users or value == type(optimizer).model_fields[name].default,
            f"optimizer.{name}",
            f"{tag}: {chosen} does not use {name}",
            "remove it",
        )
    yield from relation(
        optimizer.schedule == "constant" or optimizer.decay_updates is not None,
        "optimizer.schedule",
        f"{optimizer.schedule} needs decay_updates, the length of its decay",
        "for linear and cosine the updates after the warm-up, for wsd a fifth",
    )


@rule("algorithm", runs="supervised")
def row_positions(context: Context) -> Found:
    """A document of a packed row must not be longer than the model's positions.

        learner.packing.tokens <= model.max_context

    Positions count from the start of each document, and a document may fill its row. Past the
    positions that a model covers its rotary frequencies were never trained.
    """
    packed, positions = context.spec.learner.packing.tokens, context.spec.model.max_context
    return relation(
        packed <= positions,
        "learner.packing.tokens",
        f"{packed} is more than model.max_context = {positions}",
        f"at most {positions}, or a larger max_context",
        {"packing.tokens": packed, "max_context": positions},
    )


@rule("algorithm", "warning")
def warmup_length(context: Context) -> Found:
    """The warm-up must end before the run does.

        warmup_updates < steps x updates_per_step

    Update n = 0, 1, ... has the rate lr x min(1, (n + 1) / warmup_updates). A run that ends with
    the warm-up, or inside it, trains one update at the rate that the spec names, or none.
    """
    spec, warmup = context.spec, context.spec.optimizer.warmup_updates
    updates = spec.steps * spec.algorithm.updates_per_step
    return relation(
        warmup < updates,
        "optimizer.warmup_updates",
        f"{warmup} updates of warm-up, but {spec.steps} steps x {spec.algorithm.updates_per_step} "
        f"make {updates}: the last has {updates / (warmup or 1):.0%} of the learning rate",
        f"{max(updates // 20, 1)} is a twentieth of the run",
        {
            "warmup_updates": warmup,
            "steps": spec.steps,
            "updates_per_step": spec.algorithm.updates_per_step,
        },
    )


@rule("algorithm", "warning")
def decay_length(context: Context) -> Found:
    """The learning rate's decay must fit into the run.

        warmup_updates + decay_updates <= steps x updates_per_step

    `linear` and `cosine` decay from the end of the warm-up on: a run that ends sooner never has
    `final_lr`. `wsd` decays in the last `decay_updates` of the run: where these begin inside the
    warm-up, the decay begins at its end and is cut off.
    """
    spec, optimizer = context.spec, context.spec.optimizer
    updates = spec.steps * spec.algorithm.updates_per_step
    warmup, decay = optimizer.warmup_updates, optimizer.decay_updates or 0
    if optimizer.schedule == "constant" or updates <= warmup:
        return ()
    return relation(
        warmup + decay <= updates,
        "optimizer.decay_updates",
        f"warm-up and decay take {warmup + decay} updates, the run makes {updates}: its last "
        f"update has a learning rate above {optimizer.final_lr:g}",
        f"decay_updates: {updates - warmup}",
        {"warmup_updates": warmup, "decay_updates": decay, "updates": updates},
    )


@rule("algorithm")
def final_lr(context: Context) -> Found:
    """The learning rate must not be larger after its decay than before.

        final_lr <= lr

    The two are easily exchanged; a rate that grows over the run is none of the schedules.
    """
    final, lr = context.spec.optimizer.final_lr, context.spec.optimizer.lr
    return relation(
        final <= lr,
        "optimizer.final_lr",
        f"the decay would end at {final:g}, above lr = {lr:g}",
        f"{lr / 10:g}, a tenth of lr",
        {"final_lr": final, "lr": lr},
    )


@rule("algorithm")
def adam_betas(context: Context) -> Found:
    """AdamW's decays must be below 1.

        m = beta m + (1 - beta) g,   m^ = m / (1 - beta^(n + 1))     (arXiv 1711.05101)

    At beta = 1 the mean never takes in a gradient, and its correction divides by 0: the first
    update is 0 / 0 and every one is skipped as not finite.
    """
    for number, beta in enumerate(context.spec.optimizer.betas, start=1):
        yield from relation(
            beta < 1,
            "optimizer.betas",
            f"beta{number} = {beta:g} divides by 1 - beta{number}^n = 0",
            "[0.9, 0.95]",
            {f"beta{number}": beta},
        )


def length_term(spec: RunSpec) -> Reward | None:
    """Return the term that rewards the length asked for."""
    return next((term for term in spec.reward if term.kind == "target_length"), None)


@found_by_loader(group="reward")
def problems() -> None:
    """Every problem can be read, every task type is graded, and every grader can grade.

    `runspec lint --data` looks at it, and so do `apply` and `doctor`: a process imports the
    plug-ins, reads every row of every source and grades two answers to a problem of each task
    type. It finds plug-ins that do not import, malformed rows, task types without a reward, sources
    of which no prompt fits `data.max_prompt_tokens`, and graders that raise. Each would end the run
    or leave it without rewards. Rows that are left out are counted, and no fault. Of a run that
    trains on documents it reads the first document of each file.
    """


@rule("reward")
def task_advantage(context: Context) -> Found:
    """Advantages normalised by task need a length term that is added.

        A = (T - mean T) / (std T + 1e-6) + (P - mean P),  where R = T + P

    Only the form `exact` is a sum, P = - alpha |target - length|. `max` and `clip` multiply the
    task reward: there is no P that could keep its own scale.
    """
    term = length_term(context.spec)
    if term is None or context.spec.grpo.advantage.normalize != "task":
        return ()
    return relation(
        term.form == "exact",
        "algorithm.advantage.normalize",
        f"task needs a length term that is added to the task reward: form exact, not {term.form}",
        f"normalize: std, or reward: {{{term.name}: {{form: exact}}}}",
    )


@rule("reward")
def target_length(context: Context) -> Found:
    """A target_length term must name its form, its targets and, unless it clips, its alpha.

        exact   R = T - alpha |target - length|                         (INTELLECT-2, 3.1.2)
        max     R = T clip(alpha (target - length) + 0.5, 0, 1)         (L1, arXiv 2503.04697)
        clip    R = T if length <= target else 0

    The target is drawn for each group from `targets`, and the prompt tells it.
    """
    for term in context.spec.reward:
        if term.kind != "target_length":
            continue
        clips = term.form == "clip"
        for field, given, usual in (
            ("form", term.form, "exact"),
            ("alpha", term.alpha or clips, "3e-4"),
            ("targets", term.targets, "[1000, 2000]"),
        ):
            yield from relation(
                bool(given), f"reward.{term.name}", f"kind target_length needs {field}", usual
            )


@rule("reward")
def task_reward(context: Context) -> Found:
    """Some term of the reward must grade the task itself.

    A length term alone rewards any text of the right length. Nothing then tells a right answer
    from a wrong one, and a filter that compares task rewards drops every group.
    """
    return relation(
        any(term.kind != "target_length" for term in context.spec.reward),
        "reward",
        "no term grades the task itself",
        "add one such as {name: math, kind: math}",
    )


@rule("reward")
def length_prompt(context: Context) -> Found:
    """The prompt must tell the length that the reward asks for.

    `data.length_prompt` is appended to the problem with `{target}` filled in. Without it the policy
    cannot know which of the targets its group drew, and the length term is noise to it.
    """
    return relation(
        length_term(context.spec) is None or "{target}" in context.spec.data.length_prompt,
        "data.length_prompt",
        "must say {target}, the length asked for",
        "Think for {target} tokens before giving a response.",
    )


@rule("reward")
def one_term_a_kind(context: Context) -> Found:
    """Each kind of reward must appear once.

    A problem is graded by the term whose kind is its task's; of two terms of a kind one would never
    be asked.
    """
    first: dict[str, str] = {}
    for term in context.spec.reward:
        other = first.setdefault(term.kind, term.name)
        yield from relation(
            other == term.name,
            f"reward.{term.name}.kind",
            f"a second term of kind {term.kind}; {other} is the first",
            f"change {other} instead",
        )


@rule("reward")
def targets_reachable(context: Context) -> Found:
    """Every target length must be shorter than the output limit.

        target < max_new_tokens

    The length counts all output tokens, the end token included. At a target of the limit or beyond
    it a rollout that does as it was told is cut off before its answer, and gets no task reward.
    """
    term = length_term(context.spec)
    for pool in context.spec.samplers:
        if term is None:
            return
        longest, limit = max(term.targets or [0]), pool.max_new_tokens
        yield from relation(
            longest < limit,
            f"reward.{term.name}.targets",
            f"{longest} must be less than max_new_tokens = {limit} of pool {pool.name}",
            "leave room for the answer after the thinking",
            {"target": longest, "max_new_tokens": limit},
        )


@rule("reward", "warning")
def length_swamps_task(context: Context) -> Found:
    """The length penalty must not be able to outweigh the task reward.

        alpha x max |target - max_new_tokens| <= 1        for P = - alpha |target - length|

    Task rewards lie in [0, 1]. Where the worst length costs more than a right answer gives, a wrong
    answer of the right length beats a right one that ran on, and early in training, when most
    outputs run on, the penalty is all that the policy learns from. INTELLECT-2's own alpha (3e-4,
    up to 9 at the limit) exceeds the bound, and its authors report rising task rewards all
    the same.
    """
    term = length_term(context.spec)
    if term is None or term.form != "exact" or not term.alpha or not term.targets:
        return ()
    limit = max(pool.max_new_tokens for pool in context.spec.samplers)
    distance = max(abs(target - limit) for target in term.targets)
    return relation(
        term.alpha * distance <= 1,
        f"reward.{term.name}.alpha",
        f"{term.alpha:g} x {distance} tokens = {term.alpha * distance:.3g}: an output at the limit "
        "can lose more than a right answer gives",
        f"alpha <= {1 / (distance or 1):.2g}, or a lower max_new_tokens",
        {"alpha": term.alpha, "distance": distance, "max_new_tokens": limit},
    )


@rule("reward")
def solve_rate(context: Context) -> Found:
    """The offline filter must have rows to filter, and bounds of which the lower is not above.

        min <= max

    Problems are kept whose recorded solve rate lies in [min, max]; with the bounds the wrong way
    round none does. A generator records none: `python -m sampler solve-rates` measures those of
    its problems and writes them as rows. INTELLECT-2 kept 0.125 to 0.5 of eight tries by a 7B
    model.
    """
    for source in context.spec.data.sources:
        rate, where = source.solve_rate, f"data.sources.{source.name}.solve_rate"
        if rate is None:
            continue
        made = source.kind == "reasoning_gym"
        yield from relation(
            not made,
            where,
            "kind reasoning_gym makes problems, of which no solve rate is recorded",
            "measure them with `python -m sampler solve-rates`, and read its file",
        )
        yield from relation(
            made or rate.min <= rate.max,
            f"{where}.min",
            f"{rate.min:g} is above max = {rate.max:g}: no problem is kept",
            f"{{min: {rate.max:g}, max: {rate.min:g}}}",
            {"min": rate.min, "max": rate.max},
        )
