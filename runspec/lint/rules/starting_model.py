"""Version 0: weights that exist, or a shape whose weights the warm start makes."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("one-model", "model")
def one_model(context: Context) -> Iterator[Violation]:
    """Exactly one of `model.hf` and `model.shape` must be given.

    The first names weights that exist, the second the shape of weights that the warm start makes.
    With both it would be open which is version 0; with neither there is none. `model.revision` is
    the commit of `model.hf`, and means nothing without it.
    """
    model = context.spec.model
    given = [name for name in ("hf", "shape") if getattr(model, name) is not None]
    if len(given) != 1:
        yield Violation(
            ("model",),
            f"exactly one of hf and shape is needed, {'both were' if given else 'neither was'} "
            "given",
            suggestion="null takes one away" if given else "name a Hugging Face repository in hf",
        )
    if model.revision is not None and model.hf is None:
        yield Violation(
            ("model", "revision"),
            "is the commit of model.hf, which is not given",
            suggestion="set it to null",
        )


@rule("warm-start", "model")
def warm_start(context: Context) -> Iterator[Violation]:
    """A `model.shape` must have a warm start, and a model with weights must have none.

    A shape is not weights: the supervised steps of `warm_start` make them before version 0 exists.
    Reinforcement learning alone cannot, for random weights are never right and the reward says
    nothing. A model of `model.hf` is version 0 as it is.
    """
    spec = context.spec
    if spec.model.shape is not None and spec.warm_start is None:
        yield Violation(
            ("model", "shape"),
            "has no weights: warm_start must make them",
            suggestion="warm_start: {} takes the defaults",
        )
    if spec.model.shape is None and spec.warm_start is not None:
        yield Violation(
            ("warm_start",),
            "makes the weights of a model.shape, and none is given",
            suggestion="set it to null",
        )
