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
