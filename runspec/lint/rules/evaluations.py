"""Rules on evaluations: what they name, and what is left to train on."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


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


@rule("evaluation-room", "samplers")
def evaluation_room(context: Context) -> Iterator[Violation]:
    """Prompt and answer of an evaluation must fit into the context of the evaluator's engine.

        data.max_prompt_tokens + evaluations[].max_new_tokens <= samplers[].max_model_len

    The engine makes room for `max_model_len` tokens of a sequence. A longer answer than the pool's
    own may ask for more.
    """
    spec = context.spec
    known = {pool.name: pool for pool in spec.samplers}
    pool = known.get(spec.evaluator.pool or spec.samplers[0].name)
    for each in spec.evaluations:
        new, prompt = each.max_new_tokens, spec.data.max_prompt_tokens
        if pool is not None and new is not None and prompt + new > pool.max_model_len:
            yield Violation(
                ("evaluations", each.name, "max_new_tokens"),
                f"{prompt} tokens of a prompt and {new} of an answer, {pool.max_model_len} fit",
                numbers={"tokens": prompt + new, "max_model_len": pool.max_model_len},
                suggestion=f"at most {pool.max_model_len - prompt}, or raise max_model_len of "
                f"{pool.name}",
            )
