"""Names, files, secrets, machines and money."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("one-model", "placement")
def one_model(context: Context) -> Iterator[Violation]:
    """A model is named or described, not both."""
    spec = context.spec
    if (spec.model.hf is None) == (spec.model.shape is None):
        said = "neither" if spec.model.hf is None else "both"
        yield Violation(("model",), f"exactly one of hf and shape is needed, {said} was given")
    if spec.model.revision is not None and spec.model.hf is None:
        yield Violation(("model", "revision"), "is the commit of model.hf, which is not given")


@rule("warm-start", "placement")
def warm_start(context: Context) -> Iterator[Violation]:
    """A shape needs a warm start, and a model with weights has none."""
    spec = context.spec
    if (spec.model.shape is None) != (spec.warm_start is None):
        message = (
            "model.shape has no weights: warm_start must make them"
            if spec.warm_start is None
            else "warm_start makes the weights of a model.shape, and none is given"
        )
        yield Violation(("model", "shape") if spec.warm_start is None else ("warm_start",), message)


@rule("reserved-names", "placement")
def reserved_names(context: Context) -> Iterator[Violation]:
    """A pool is not called like a role."""
    spec = context.spec
    reserved = {"root", "publisher", "coordinator", "validator", "learner", "origin", "relay"}
    for pool in spec.samplers:
        if pool.name in reserved:
            yield Violation(
                ("samplers", pool.name), "is the name of a role; call the pool something else"
            )
