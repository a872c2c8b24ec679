"""Numbers of a policy's distributions for tokens that were sampled without seeded noise.

Without a seed any single token may be honest, but not every sequence of tokens. At a position, p is
the distribution over the tokens kept, o is the chosen token, and e is the end token. The checks of
chosen tokens and of ends need these numbers of each position:

    log p_o,  log max_v p_v - log p_o
    log sum_v p_v^a                        for a in POWERS
    log sum_v p_v [p_v >= c max_u p_u]     for c in HEADS
    log p_e, the least and the most that rounding at the edge of top-k and top-p allows

One pass over the logits gives all of them; the same code runs on numpy, torch and jax.numpy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from verify.truncation import TAIL, Repeat, Truncation, repeated, thresholds_at

POWERS = (0.5, 0.75, 0.875, 1.125, 1.25, 1.5)
"""Exponents a; p^a is the policy at temperature T / a."""
HEADS = (1.0, 0.1, 0.01)
"""Shares c of the largest probability; sampling cuts less probable tokens. 1 is greedy."""
_ROUNDING = 1e-5
"""Nats: a compiler may compute the largest logit twice, with other last bits."""
_TINY = 1e-38
"""Replaces an underflow to 0, whose logarithm would warn."""


class Choices(NamedTuple):
    """Numbers of the n output tokens of a rollout, in nats, f32."""

    logprobs: Any
    """[n]: log p_o; the token itself always counts as kept."""
    below_top: Any
    """[n]: log max_v p_v - log p_o."""
    log_powers: Any
    """[n, len(POWERS)]."""
    log_heads: Any
    """[n, len(HEADS)]."""
    end_least: Any
    """[n]: log p_e if every sampler keeps e, else -inf."""
    end_most: Any
    """[n]: log p_e, with e kept, if some sampler may keep e, else -inf."""
    outside: Any
    """[n]: how far o lies below the tokens that a sampler may keep, as a seeded gap; else 0."""
    sure: Any
    """[n]: 1 if every sampler keeps o, else 0."""


def describe(
    xp: Any,
    scaled: Any,
    own: Any,
    end: Any,
    rule: Truncation | None = None,
    *,
    repeat: Repeat = repeated,
) -> Choices:
    """Compute the numbers of n positions from their logits.

    Args:
        xp: numpy, jax.numpy or torch.
        scaled: f32 [n, V], logits / T, finite.
        own: bool [n, V], true only at each position's token.
        end: bool [1, V], true only at the end token.
        rule: cuts of the pool, with the margin for rounding; None if nothing is cut.
        repeat: a loop that the library compiles.
    """
    if rule is None or not rule.cuts:
        kept = wide = least = scaled == scaled
        sure, outside = (own & kept).any(-1), xp.zeros_like(scaled[..., 0])
    else:
        at, tail = thresholds_at(xp, scaled, rule, [rule.margin, TAIL * rule.margin], repeat=repeat)
        kept, wide, least = scaled >= at.kept, scaled >= tail.allowed, scaled >= at.sure
        sure, outside = (own & least).any(-1), _outside(xp, scaled, own, at, tail, rule.margin)
    top = xp.amax(scaled, -1)
    shifted = scaled - top[..., None]
    weights = xp.exp(xp.where(kept | own, shifted, -math.inf))
    log_total = xp.log(weights.sum(-1))
    below_top = -xp.where(own, shifted, 0.0).sum(-1)
    if rule is None or not rule.cuts:
        end_least = end_most = xp.where(end, shifted, 0.0).sum(-1) - log_total
    else:  # the end token's share is least in the widest set, and largest in the narrowest
        end_least = _end(xp, shifted, end, least, wide)
        end_most = _end(xp, shifted, end, wide, least)
    return Choices(
        logprobs=-below_top - log_total,
        below_top=below_top,
        log_powers=_log_powers(xp, weights, log_total),
        log_heads=_log_heads(xp, shifted, weights, log_total),
        end_least=end_least,
        end_most=end_most,
        outside=outside,
        sure=xp.where(sure, xp.ones_like(top), xp.zeros_like(top)),
    )


def _log_powers(xp: Any, weights: Any, log_total: Any) -> Any:
    """Return [n, len(POWERS)]. Square roots cost less than further exponentials."""
    half = xp.sqrt(weights)
    quarter = xp.sqrt(half)
    eighth = xp.sqrt(quarter)
    powers = {
        0.5: half,
        0.75: half * quarter,
        0.875: half * quarter * eighth,
        1.125: weights * eighth,
        1.25: weights * quarter,
        1.5: weights * half,
    }
    return xp.stack([xp.log(powers[a].sum(-1)) - a * log_total for a in POWERS], -1)


def _log_heads(xp: Any, shifted: Any, weights: Any, log_total: Any) -> Any:
    """Return [n, len(HEADS)]."""
    limits = [math.log(c) - _ROUNDING for c in HEADS]
    heads = [xp.where(shifted >= limit, weights, 0.0).sum(-1) for limit in limits]
    return xp.stack([xp.log(head) - log_total for head in heads], -1)


def _end(xp: Any, shifted: Any, end: Any, among: Any, others: Any) -> Any:
    """Return [n]: log-prob of the end token within `others`; -inf if it is not in `among`."""
    total = xp.exp(xp.where(others | end, shifted, -math.inf)).sum(-1)
    share = xp.where(end, shifted, 0.0).sum(-1) - xp.log(xp.clip(total, _TINY, None))
    return xp.where((end & among).any(-1), xp.clip(share, None, 0.0), -math.inf)


def _outside(xp: Any, scaled: Any, own: Any, at: Any, tail: Any, margin: float) -> Any:
    """Return [n]: 0 for kept tokens, at most 2 margins for what the tail of rounding explains."""
    mine = xp.where(own, scaled, 0.0).sum(-1)
    below = at.allowed[..., 0] - mine
    distance = xp.where(below > 0.0, below + margin, 0.0)
    explained = mine >= tail.allowed[..., 0]
    return xp.where(explained, xp.clip(distance, None, 2 * margin), distance)
