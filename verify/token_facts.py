"""Computes the numbers of output tokens from their logits, for every prefill engine.

The same code runs on numpy, jax.numpy and torch. Engines compute the logits, a chunk of positions
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verify.noise import exponential, gumbel, token_words
from verify.plugins import PrefillInput, PrefillOutput
from verify.truncation import Choices, Repeat, Truncation, describe, judged, repeated


class TokenFacts(NamedTuple):
    """Numbers of N output tokens; arrays of any library."""

    logprobs: Any
    """f32 [N]."""
    gaps: Any
    """f32 [N]; None if no token is seeded."""
    choices: Choices | None
    """None if all tokens are seeded."""
    hidden: Any = None
    """u16 [N, D]: bits of bf16; None until they are added."""


@dataclass(frozen=True)
class Wanted:
    """Numbers to compute in addition to log-probs and hidden states."""

    gaps: bool
    choices: bool
    truncation: Truncation | None
    """None if nothing is cut."""

    @classmethod
    def of(cls, inputs: Sequence[PrefillInput], truncation: Truncation | None) -> Wanted:
        """Return the numbers that rollouts which are prefilled together need."""
        return cls(
            gaps=any(each.noise_key is not None for each in inputs),
            choices=any(each.end_token is not None for each in inputs),
            truncation=truncation if truncation is not None and truncation.cuts else None,
        )


class Vocabulary(NamedTuple):
    """Arrays that depend only on the number of tokens V: i32 [1, V] each."""

    ids: Any
    words: Any
    """Result of `verify.noise.token_words`."""

    @classmethod
    def of(cls, ids: Any) -> Vocabulary:
        """Return the arrays of token ids 0 to V - 1, i32 [1, V]."""
        return cls(ids, token_words(ids))


class Drawn(NamedTuple):
    """Output tokens, and the noise that they were drawn with: i32 [n, 1] each."""

    token: Any
    position: Any
    """Position of the token in its output."""
    key_0: Any
    key_1: Any
    """Words of `verify.noise.noise_key`; any values if not seeded."""


_UNDERFLOW = 1e-30
"""Least weight / noise that has all its bits, 69 nats below the largest."""


def facts_of(
    xp: Any,
    scaled: Any,
    drawn: Drawn,
    vocabulary: Vocabulary,
    end_token: Any,
    wanted: Wanted,
    *,
    repeat: Repeat = repeated,
) -> TokenFacts:
    """Compute `token_facts` with the noise of the drawn tokens, with the fewest operations.

    Args:
        xp: numpy, jax.numpy or torch.
        scaled: f32 [n, V], logits / T.
        drawn: the n tokens.
        vocabulary: arrays of the V tokens.
        end_token: id of the end token.
        wanted: numbers to compute.
        repeat: a loop that the library compiles.
    """
    if wanted.gaps and not wanted.choices and wanted.truncation is None:
        return _seeded_facts(xp, scaled, drawn, vocabulary)
    noise = None
    if wanted.gaps:
        noise = gumbel(xp, drawn.key_0, drawn.key_1, drawn.position, vocabulary.ids)
    own, end = vocabulary.ids == drawn.token, vocabulary.ids == end_token
    return token_facts(xp, scaled, noise, own, end, wanted, repeat=repeat)


def _seeded_facts(xp: Any, scaled: Any, drawn: Drawn, vocabulary: Vocabulary) -> TokenFacts:
    """Compute the numbers of seeded tokens if nothing is cut: one logarithm a logit, no mask.

    With z = logits / T, Gumbel noise g = -log e and e exponential, z_v + g_v is the logarithm of
    exp(z_v) / e_v. So only the maximum needs that logarithm. Both sides of a gap are read from one
    array, so the gap is 0 if the token is the maximum.
    """
    rows, token = xp.arange(len(scaled)), drawn.token[:, 0]
    top = xp.amax(scaled, -1)
    weights = xp.exp(scaled - top[:, None])
    noise = (drawn.key_0, drawn.key_1, drawn.position)
    speeds = weights / exponential(xp, *noise, vocabulary.words)
    below, speed = scaled[rows, token] - top, speeds[rows, token]
    # Far below the top exp underflows; then the token's own value is computed by the definition.
    exact = below + gumbel(xp, *noise, drawn.token)[:, 0]
    mine = xp.where(speed > _UNDERFLOW, xp.log(xp.clip(speed, _UNDERFLOW, None)), exact)
    return TokenFacts(below - xp.log(weights.sum(-1)), xp.log(xp.amax(speeds, -1)) - mine, None)


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
    """Compute log_softmax(logits / T) and max_v(logits_v / T + noise_v) minus the token's own
    value.

    If top-k or top-p cut the distribution, both are those of `verify.truncation.judged`. For tokens
    that are not seeded, `verify.truncation.describe` computes the choices.

    Args:
        xp: numpy, jax.numpy or torch.
        scaled: f32 [n, V], logits / T.
        noise: f32 [n, V], noise of `verify.noise.gumbel`; None if `wanted.gaps` is False.
        own: bool [n, V], true only at each position's token.
        end: bool [1, V], true only at the end token.
        wanted: numbers to compute.
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
    """Divide the numbers of output tokens, numpy arrays, among their rollouts, in order.

    Args:
        facts: numbers of at least all tokens of the rollouts; the rest is left out.
        inputs: the rollouts.
    """
    outputs, begin = [], 0
    for each in inputs:
        own = slice(begin, begin + len(each.output_tokens))
        begin = own.stop
        gaps = None if each.noise_key is None else facts.gaps[own]
        choices = None
        if each.end_token is not None and facts.choices is not None:
            choices = Choices(*(column[own] for column in facts.choices))
        outputs.append(PrefillOutput(facts.logprobs[own], facts.hidden[own], gaps, choices))
    return outputs
