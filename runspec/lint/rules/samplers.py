"""Lengths, engines, and what samplers and learner must agree on."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("context-fits", "samplers")
def context_fits(context: Context) -> Iterator[Violation]:
    """Prompt and output must fit the engine, the model and a packed row."""
    spec = context.spec
    prompt, positions = spec.data.max_prompt_tokens, spec.model.max_context
    packed = spec.learner.packing.tokens
    for pool in spec.samplers:
        longest = prompt + pool.max_new_tokens
        said = f"max_prompt_tokens {prompt} + max_new_tokens {pool.max_new_tokens} = {longest}"
        if longest > pool.max_model_len:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is less than {said}",
            )
        if pool.max_model_len > positions:
            yield Violation(
                ("samplers", pool.name, "max_model_len"),
                f"{pool.max_model_len} is more than model.max_context = {positions}",
            )
        if packed < longest:
            yield Violation(
                ("learner", "packing", "tokens"),
                f"{packed} cannot hold a sequence of pool {pool.name}: {said}",
            )
