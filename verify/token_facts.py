"""What a prefill engine says of output tokens, from their logits: one definition for every engine.

The same code runs on numpy, jax.numpy and torch. Engines make the logits, a chunk of positions at a
time, and the noise of seeded tokens; what follows from those is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verify.choices import Choices, describe
from verify.plugins import PrefillInput, PrefillOutput
from verify.truncation import Repeat, Truncation, judged, repeated


class TokenFacts(NamedTuple):
    """Of N output tokens; arrays of whichever library."""

    logprobs: Any
    """f32 [N]."""
    gaps: Any
    """f32 [N]; None where none is seeded."""
    choices: Choices | None
    """None where all are seeded."""
    hidden: Any = None
    """u16 [N, D]: bits of bf16; None until they are added."""


@dataclass(frozen=True)
class Wanted:
    """What is computed besides log-probs and hidden states."""

    gaps: bool
    choices: bool
    truncation: Truncation | None
    """None where nothing is cut."""

    @classmethod
    def of(cls, inputs: Sequence[PrefillInput], truncation: Truncation | None) -> Wanted:
        """What rollouts that are prefilled together ask for."""
        return cls(
            gaps=any(each.noise_key is not None for each in inputs),
            choices=any(each.end_token is not None for each in inputs),
            truncation=truncation if truncation is not None and truncation.cuts else None,
        )


def token_facts(
    xp: Any,
    scaled: Any,
    noise: Any,
    own: Any,
    end: Any,
    wanted: Wanted,
    *,
    repeat: Repeat = repeated,
) -> TokenFacts:
    """Of each token log_softmax(logits / T), and max_v(logits_v / T + noise_v) minus its own.

    Where top-k or top-p cut the distribution, both as `verify.truncation.judged` has them. Of
    tokens that were not seeded `verify.choices.describe` says the rest.

    Args:
        xp: numpy, jax.numpy or torch.
        scaled: f32 [n, V], logits / T.
        noise: f32 [n, V] of `verify.noise.gumbel`; None where `wanted.gaps` is False.
        own: bool [n, V], true at each position's token alone.
        end: bool [1, V], true at the end token alone.
        wanted: what is computed.
        repeat: a loop that the library compiles.
    """
    choices, gap, rule = None, None, wanted.truncation
    if wanted.choices:
        choices = describe(xp, scaled, own, end, rule, repeat=repeat)
    if rule is not None and (noise is not None or choices is None):
        given = xp.zeros_like(scaled) if noise is None else noise
        logprob, gap = judged(xp, scaled, given, own, rule, repeat=repeat)
    elif choices is not None:
        logprob = choices.logprobs
    else:
        shifted = scaled - xp.amax(scaled, -1)[..., None]
        logprob = xp.where(own, shifted, 0.0).sum(-1) - xp.log(xp.exp(shifted).sum(-1))
    if noise is not None and rule is None:
        noisy = scaled + noise
        gap = xp.amax(noisy, -1) - xp.where(own, noisy, 0.0).sum(-1)
    return TokenFacts(logprob, gap if wanted.gaps else None, choices)


def outputs_of(facts: TokenFacts, inputs: Sequence[PrefillInput]) -> list[PrefillOutput]:
    """Divides numpy arrays among the rollouts whose output tokens they are, in order.

    Args:
        facts: of at least all their tokens; what follows is left out.
        inputs: the rollouts.
    """
    outputs, begin = [], 0
    for each in inputs:
        own = slice(begin, begin + len(each.output_tokens))
        begin = own.stop
        seeded, choices = each.noise_key is not None, facts.choices
        if each.end_token is None or choices is None:
            mine = None
        else:
            mine = Choices(*(column[own] for column in choices))
        outputs.append(
            PrefillOutput(
                facts.logprobs[own],
                facts.hidden[own],
                facts.gaps[own] if seeded else None,
                mine,
            )
        )
    return outputs
