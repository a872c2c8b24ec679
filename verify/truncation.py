"""Top-k and top-p: which tokens sampling keeps, the same for sampler and validator.

Top-k is applied first, then top-p (Holtzman et al. 2020) to the tokens that it keeps, as in vLLM:

    kept by top-k: v with #{u : z_u > z_v} < k
    kept by top-p: those of them with sum of p_u over {u kept : z_u > z_v} < top_p

with z = logits / T and p = softmax(z) over the tokens kept by top-k. Both have the form z_v >=
threshold, and at least the largest token is kept. Equal tokens are kept or cut together; vLLM cuts
them by the order of its sort. The same code runs on numpy, torch and jax.numpy.

There is no sort: 32 halvings find a threshold among the 2**32 floats, each with a pass over the
logits.

A validator's logits differ a little from the sampler's. So a token at the threshold may be on its
other side, and the threshold of top-p may move to a distant neighbour. If no z_v differs by more
than margin / 2, every order statistic of z moves by at most margin / 2, and the odds of a sum of p
change by a factor of at most exp(margin). So all tokens that the sampler kept lie above
`Thresholds.allowed`, and the sampler kept all tokens above `Thresholds.sure`:

    allowed = threshold(top_p at odds x exp(margin)) - margin
    sure: v with #{u : z_u >= z_v - margin} <= k, v itself among them, and
          sum of p_u over {u != v : z_u >= z_v - margin} < top_p at odds x exp(-margin)

Only these tokens can lie above v in the sampler's z. If a token is sure, all tokens above it are
sure. So the last kept token is sure if the next one is further away than the margin. If it were not
sure, a sampler could leave it out at will.

Rounding has tails: of a hundred thousand tokens a few differ by more, and a token on the wrong side
of a threshold may lie at any distance from the choice. Such tokens count as exceptions, and not as
forged.

Without a seed any single token may be honest, but not every sequence of tokens. At a position, p is
the distribution over the tokens kept, o is the chosen token, and e is the end token. The checks of
chosen tokens and of ends need these numbers of each position (`Choices`):

    log p_o,  log max_v p_v - log p_o
    log sum_v p_v^a                        for a in POWERS
    log sum_v p_v [p_v >= c max_u p_u]     for c in HEADS
    log p_e, the least and the most that rounding at the edge of top-k and top-p allows

One pass over the logits gives all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Repeat = Callable[[int, Callable[[Any], Any], Any], Any]
"""repeat(count, step, state): applies a step `count` times."""
_HALVINGS = 32
_SIGN = 0x7FFFFFFF
TAIL = 5.0
"""Number of margins within which a single token may be an exception."""


@dataclass(frozen=True)
class Truncation:
    """The cuts of `samplers[].sampling`: top-k and top-p."""

    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""
    top_k: int = -1
    """Tokens; -1 or 0 keeps all."""
    margin: float = 0.0
    """How far two z may differ between sampler and validator relative to each other, nats."""

    @property
    def cuts(self) -> bool:
        """Whether there is anything to do."""
        return self.top_p < 1.0 or self.top_k > 0


class Thresholds(NamedTuple):
    """Thresholds of each row, f32 [..., 1], on z = logits / T."""

    kept: Any
    """Tokens at least as large are kept."""
    allowed: Any
    """No sampler whose z differs by at most the margin kept a smaller token."""
    sure: Any
    """Every such sampler kept all tokens at least as large. There may be none: if two tokens are
    almost equal, either may be the one that is kept."""


def repeated(count: int, step: Callable[[Any], Any], state: Any) -> Any:
    """Apply a step `count` times; with jax use `lax.fori_loop` instead."""
    for _ in range(count):
        state = step(state)
    return state


def kept_from(
    xp: Any, scaled: Any, *, top_p: Any = None, top_k: Any = None, repeat: Repeat = repeated
) -> Any:
    """Return the smallest logit that is kept.

    Args:
        xp: numpy, jax.numpy or torch.
        scaled: f32 [..., V], logits / T, finite.
        top_p: in (0, 1], a number or [..., 1]; None for 1.
        top_k: at least 1, a number or i32 [..., 1]; V and more keep all; None for all.
        repeat: a loop that the library compiles.

    Returns:
        f32 [..., 1], one of the row's own values.
    """
    keys = _ordered(xp, scaled)
    cut = _cut_by_top_k(xp, keys, top_k, repeat)
    if top_p is not None:
        cut = _cut_by_top_p(xp, scaled, keys, cut, top_p, repeat)
    return _smallest_kept(xp, scaled, keys, cut)


def thresholds(xp: Any, scaled: Any, rule: Truncation, *, repeat: Repeat = repeated) -> Thresholds:
    """Return the thresholds of kept, allowed and surely kept tokens.

    Args:
        xp, scaled, repeat: as for `kept_from`.
        rule: cuts something.
    """
    return thresholds_at(xp, scaled, rule, [rule.margin], repeat=repeat)[0]


def judged(
    xp: Any, scaled: Any, noise: Any, own: Any, rule: Truncation, *, repeat: Repeat = repeated
) -> tuple[Any, Any]:
    """Return the log-probs and gaps of tokens that a truncated distribution gave.

    Args:
        xp, scaled, repeat: as for `kept_from`.
        noise: f32 [..., V], of `verify.noise.gumbel`.
        own: bool [..., V], true only at each row's token.
        rule: cuts something.

    Returns:
        f32 [...]: log-prob among the tokens kept; the token itself always counts as kept.
        f32 [...]: the seeded gap: how far the token lies below the largest z + noise of the surely
        kept tokens. For a token that no sampler kept it is at least margin + (allowed - z). For a
        token that `TAIL` margins explain it is at most 2 margins: an exception.
    """
    at, wide = thresholds_at(xp, scaled, rule, [rule.margin, TAIL * rule.margin], repeat=repeat)
    mine = xp.where(own, scaled, 0.0).sum(-1)
    kept = xp.where((scaled >= at.kept) | own, scaled, -math.inf)
    top = xp.amax(kept, -1)
    logprob = mine - top - xp.log(xp.exp(kept - top[..., None]).sum(-1))

    def gap_within(at: Thresholds, margin: float) -> Any:
        rivals = xp.where((scaled >= at.sure) | own, scaled + noise, -math.inf)
        gap = xp.amax(rivals, -1) - xp.where(own, rivals, 0.0).sum(-1)
        outside = at.allowed[..., 0] - mine
        return xp.where(outside > 0.0, xp.maximum(gap, outside + margin), gap)

    gap = gap_within(at, rule.margin)
    exception = xp.clip(gap_within(wide, TAIL * rule.margin), 2 * rule.margin, None)
    return logprob, xp.minimum(gap, exception)


def thresholds_at(
    xp: Any,
    scaled: Any,
    rule: Truncation,
    margins: Sequence[float],
    *,
    repeat: Repeat = repeated,
) -> list[Thresholds]:
    """Return `thresholds` for several margins; what does not depend on them is computed once."""
    keys = _ordered(xp, scaled)
    cut = _cut_by_top_k(xp, keys, rule.top_k if rule.top_k > 0 else None, repeat)

    def at(odds: float) -> Any:
        top_p = _shifted(rule.top_p, odds)
        least = _cut_by_top_p(xp, scaled, keys, cut, top_p, repeat)
        return _smallest_kept(xp, scaled, keys, least)

    kept = at(0.0) if rule.top_p < 1.0 else _smallest_kept(xp, scaled, keys, cut)
    beyond = None  # the largest that top-k does not keep
    if 0 < rule.top_k < scaled.shape[-1] and any(margins):
        following = _cut_by_top_k(xp, keys, rule.top_k + 1, repeat)
        beyond = _smallest_kept(xp, scaled, keys, following)

    def sure(margin: float) -> Any:
        least = _smallest_kept(xp, scaled, keys, cut)
        if beyond is not None:
            least = xp.maximum(least, beyond + margin)
        if rule.top_p < 1.0:
            low = _shifted(rule.top_p, -margin)
            least = xp.maximum(least, _sure_of_top_p(xp, scaled, keys, cut, low, margin, repeat))
        return least

    found = []
    for margin in margins:
        moves = rule.top_p < 1.0 and margin > 0.0
        low = at(margin) if moves else kept
        found.append(Thresholds(kept, low - margin, sure(margin) if margin > 0.0 else kept))
    return found


def _cut_by_top_k(xp: Any, keys: Any, top_k: Any, repeat: Repeat) -> Any:
    """Return i32 [..., 1]: the least key that top-k keeps."""
    least = xp.amin(keys, -1)[..., None]
    if top_k is None:
        return least

    def few(key: Any) -> Any:
        return (keys > key).sum(-1)[..., None] < top_k

    return _smallest(xp, few, least, xp.amax(keys, -1)[..., None], repeat)


def _cut_by_top_p(xp: Any, scaled: Any, keys: Any, cut: Any, top_p: Any, repeat: Repeat) -> Any:
    """Return i32 [..., 1]: the least key, from `cut` on, that top-p keeps."""
    weights = xp.exp(scaled - xp.amax(scaled, -1)[..., None])
    weights = xp.where(keys >= cut, weights, xp.zeros_like(weights))
    needed = weights.sum(-1)[..., None] * top_p

    def light(key: Any) -> Any:
        above = xp.where(keys > key, weights, xp.zeros_like(weights))
        return above.sum(-1)[..., None] < needed

    found = _smallest(xp, light, cut, xp.amax(keys, -1)[..., None], repeat)
    # If all is kept, rounding of the sum must cut nothing.
    return xp.where(xp.asarray(top_p) + xp.zeros_like(needed) < 1.0, found, cut)


def _sure_of_top_p(
    xp: Any, scaled: Any, keys: Any, cut: Any, top_p: float, margin: float, repeat: Repeat
) -> Any:
    """Return f32 [..., 1]: the least sure logit of top-p, or infinity if no logit is sure.

    A logit is sure if all tokens that may lie above it weigh less than top_p of those from `cut`
    on.
    """
    top = xp.amax(scaled, -1)[..., None]
    weights = xp.where(keys >= cut, xp.exp(scaled - top), xp.zeros_like(scaled))
    needed = weights.sum(-1)[..., None] * top_p

    def light(key: Any) -> Any:
        own = _number(xp, key)
        above = xp.where(scaled >= own - margin, weights, xp.zeros_like(weights))
        return above.sum(-1)[..., None] - xp.exp(own - top) < needed

    found = _smallest(xp, light, cut, xp.amax(keys, -1)[..., None], repeat)
    return xp.where(light(found), _number(xp, found), math.inf)


def _smallest_kept(xp: Any, scaled: Any, keys: Any, cut: Any) -> Any:
    """Return f32 [..., 1]: the least logit from a key on; a halving may end between two values."""
    return xp.amin(xp.where(keys >= cut, scaled, xp.amax(scaled, -1)[..., None]), -1)[..., None]


def _shifted(probability: float, log_odds: float) -> float:
    """Return the probability whose log-odds are larger by `log_odds`."""
    odds = probability / (1.0 - probability) * math.exp(log_odds)
    return odds / (1.0 + odds)


def _smallest(xp: Any, holds: Callable[[Any], Any], low: Any, high: Any, repeat: Repeat) -> Any:
    """Return the smallest key in [low, high] for which `holds`; from there on it must hold."""

    def halve(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # rounded down, without overflow
        good = holds(middle)
        return xp.where(good, low, middle + 1), xp.where(good, middle, high)

    return repeat(_HALVINGS, halve, (low, high))[1]


def _ordered(xp: Any, values: Any) -> Any:
    """Return f32 as i32 in the same order."""
    bits = (values + 0.0).view(xp.int32)  # -0.0 becomes 0.0: they are equal
    return bits ^ ((bits >> 31) & _SIGN)


def _number(xp: Any, keys: Any) -> Any:
    """Return the f32 of keys of `_ordered`."""
    return (keys ^ ((keys >> 31) & _SIGN)).view(xp.float32)


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
        sure = (own & least).any(-1)
        # 0 for kept tokens, at most 2 margins for what the tail of rounding explains.
        mine = xp.where(own, scaled, 0.0).sum(-1)
        below = at.allowed[..., 0] - mine
        outside = xp.where(below > 0.0, below + rule.margin, 0.0)
        explained = mine >= tail.allowed[..., 0]
        outside = xp.where(explained, xp.clip(outside, None, 2 * rule.margin), outside)
    top = xp.amax(scaled, -1)
    shifted = scaled - top[..., None]
    weights = xp.exp(xp.where(kept | own, shifted, -math.inf))
    log_total = xp.log(weights.sum(-1))
    below_top = -xp.where(own, shifted, 0.0).sum(-1)
    limits = [math.log(c) - _ROUNDING for c in HEADS]
    heads = [xp.where(shifted >= limit, weights, 0.0).sum(-1) for limit in limits]
    if rule is None or not rule.cuts:
        end_least = end_most = xp.where(end, shifted, 0.0).sum(-1) - log_total
    else:  # the end token's share is least in the widest set, and largest in the narrowest
        end_least = _end(xp, shifted, end, least, wide)
        end_most = _end(xp, shifted, end, wide, least)
    return Choices(
        logprobs=-below_top - log_total,
        below_top=below_top,
        log_powers=_log_powers(xp, weights, log_total),
        log_heads=xp.stack([xp.log(head) - log_total for head in heads], -1),
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


def _end(xp: Any, shifted: Any, end: Any, among: Any, others: Any) -> Any:
    """Return [n]: log-prob of the end token within `others`; -inf if it is not in `among`."""
    total = xp.exp(xp.where(others | end, shifted, -math.inf)).sum(-1)
    share = xp.where(end, shifted, 0.0).sum(-1) - xp.log(xp.clip(total, _TINY, None))
    return xp.where((end & among).any(-1), xp.clip(share, None, 0.0), -math.inf)
