"""Recomputes a rollout for the validator: rewards, log-probs, choices, activations.

`facts_of` computes the numbers of output tokens from their logits, for every prefill engine. The
same code runs on numpy, jax.numpy and torch. Engines compute the logits, a chunk of positions at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from runspec.core.errors import UserError
from runspec.core.schema import SamplerPool
from verify import plugins
from verify.formats.lease import Assignment, Lease
from verify.formats.submission import Rollout
from verify.formats.turns import gaps, joined, split_turns, turn_room
from verify.noise import exponential, gumbel, noise_key, token_words
from verify.toploc import MalformedProof
from verify.toploc.statistics import ChunkStatistics, verify_proofs_batch
from verify.truncation import Choices, Repeat, Truncation, describe, judged, repeated

PORTION_TOKENS = 1 << 16
"""Tokens whose hidden states are in memory at once (671 MB at a hidden size of 5120)."""
_BF16_EXPONENT = np.uint16(0x7F80)
"""Mask of the exponent; all bits are ones in an infinity or a NaN."""


class PrefillNotFinite(UserError):
    """Raised if the prefill gave a NaN or an infinity.

    The weights or the device are at fault, or the model cannot process the tokens.
    """


@dataclass(frozen=True)
class Recomputed:
    """One rollout under the policy version that the lease names."""

    logprobs: np.ndarray
    """f32 [n]: log_softmax(logits / T) at the output tokens, after top-k / top-p."""
    seeded_gap: np.ndarray | None
    """f32 [n]: how far the token lay below the recomputed maximum; None where not seeded."""
    proof: list[ChunkStatistics] | MalformedProof
    """Statistics of each chunk, or why the proofs are malformed."""
    choices: Choices | None = None
    """Numbers of each output token; None if seeded."""


@dataclass(frozen=True)
class PrefillRequest:
    """One rollout to recompute, with the proofs of its submission."""

    input: plugins.PrefillInput
    proofs: list[bytes]


def prefill_request(
    rollout: Rollout,
    lease: Lease,
    *,
    seeded: bool,
    end_token: int | None,
    between: Sequence[Sequence[int]] | None = None,
) -> PrefillRequest:
    """Return the request of a rollout: for gaps if it is seeded, else for distributions.

    Args:
        rollout: a row of a submission.
        lease: its lease.
        seeded: whether its pool samples seeded.
        end_token: without one it does not ask for distributions.
        between: the tokens between its turns; None if the task has one turn.
    """
    key = noise_key(lease.seed, rollout.group, rollout.sample) if seeded else None
    end = None if seeded else end_token
    whole = joined(rollout.output_tokens, rollout.turns, *gaps(between))
    return PrefillRequest(
        plugins.PrefillInput(rollout.prompt_tokens, whole.tokens, key, end, whole.own),
        rollout.proofs,
    )


@dataclass(frozen=True)
class Replayed:
    """What a validator's replay of a rollout of several turns came to."""

    between: list[list[int]]
    """Tokens after each turn but the last."""
    limits: list[int]
    """Tokens that each turn could have, at most."""
    goes_on: bool
    """Whether the environment would have had another turn, and there was room for it."""
    turns: int
    """Turns that were played; fewer than the rollout's if the environment failed or the episode
    ended before."""
    episode: plugins.Episode
    """Played to its end."""

    def part_of(self, rollout: Rollout) -> Rollout:
        """Return the turns that were played before the environment failed, all if it did not.

        A rollout whose environment fails is never trained. Its tokens are judged all the same: else
        a worker could choose a message that makes the environment fail, and so withhold the group.
        Proofs are over chunks of the whole, and are left out.
        """
        if self.episode.fault is None or rollout.turns is None:
            return rollout
        played = rollout.turns[: self.turns]
        until = int(played.sum())
        return replace(
            rollout,
            output_tokens=rollout.output_tokens[:until],
            logprobs=rollout.logprobs[:until],
            turns=played,
            proofs=[],
        )


def replay(rollout: Rollout, episode: plugins.Episode, pool: SamplerPool) -> Replayed:
    """Play a rollout's turns as its worker has to have played them, up to where they end.

    Args:
        rollout: whose turns add up to its output, none of them empty.
        episode: a new one of its problem and group.
        pool: its limits.
    """
    turns = [turn.tolist() for turn in split_turns(rollout.output_tokens, rollout.turns)]
    longest = pool.max_model_len - len(rollout.prompt_tokens)
    if episode.fault is not None:  # at its start
        return Replayed([], [], False, 0, episode)
    between: list[list[int]] = []
    limits = [turn_room(episode.per_turn, pool.max_new_tokens, longest)]
    sequence = own = number = 0
    following: list[int] | None = None
    for number, turn in enumerate(turns, start=1):
        following = episode.follow(turns[:number])
        if following is None:
            break
        own += len(turn)
        sequence += len(turn) + len(following)
        left = pool.max_new_tokens - own, longest - sequence
        if not (room := turn_room(episode.per_turn, *left)):
            following = None
            break
        if number < len(turns):
            between.append(following)
            limits.append(room)
    return Replayed(between, limits, following is not None, number, episode)


def recompute(
    engine: plugins.PrefillEngine,
    version: int,
    requests: Sequence[PrefillRequest],
    *,
    temperature: float,
    truncation: Truncation | None = None,
) -> list[Recomputed]:
    """Recompute rollouts in portions, to limit the memory of hidden states.

    Raises:
        PrefillNotFinite: a number is not finite; no worker may be rejected for that.
    """
    results: list[Recomputed] = []
    for portion in _portions(requests):
        outputs = engine.prefill(
            version,
            [request.input for request in portion],
            temperature=temperature,
            truncation=truncation,
        )
        for output in outputs:
            _require_finite(output, version)
        hidden = [
            output.hidden if request.proofs else output.hidden[:0]
            for output, request in zip(outputs, portion, strict=True)
        ]
        proofs = verify_proofs_batch(hidden, [request.proofs for request in portion])
        results += [
            Recomputed(output.logprobs, output.seeded_gap, proof, output.choices)
            for output, proof in zip(outputs, proofs, strict=True)
        ]
    return results


def _require_finite(output: plugins.PrefillOutput, version: int) -> None:
    gap, choices = output.seeded_gap, output.choices
    finite = {
        "log-prob": np.isfinite(output.logprobs),
        "seeded gap": np.isfinite(gap) if gap is not None else np.True_,
        "hidden state": (output.hidden & _BF16_EXPONENT) != _BF16_EXPONENT,
    }
    if choices is not None:
        cut = {"end_least", "end_most"}  # -inf if the end token is cut
        finite |= {
            f"distribution ({name})": values < np.inf if name in cut else np.isfinite(values)
            for name, values in choices._asdict().items()
        }
    for what, good in finite.items():
        if not good.all():
            raise PrefillNotFinite(
                f"the validator's own prefill of version {version} gave a {what} that is not "
                "finite; nothing is judged by it",
                place="verify.engine",
                remedy="check the validator's device, and whether the training has diverged",
            )


def grade(
    rollouts: Sequence[Rollout],
    given: Sequence[Assignment],
    task_set: plugins.TaskSet,
    episodes: Sequence[plugins.Episode | None],
) -> tuple[list[plugins.Graded | None], dict[int, str]]:
    """Grade every rollout; those of several turns by their episodes, played to the end.

    Returns:
        The grades (None in groups whose grader failed), and the grader's errors by group.
    """
    items = [
        plugins.GradeItem(
            given[r.group].problem, given[r.group].target, r.output_tokens.tolist(), episode
        )
        for r, episode in zip(rollouts, episodes, strict=True)
    ]
    results = task_set.grade_all(items)
    faults: dict[int, str] = {}
    for rollout, result in zip(rollouts, results, strict=True):
        if isinstance(result, plugins.GraderFault):
            faults.setdefault(rollout.group, str(result))
    kept = [
        None if isinstance(result, plugins.GraderFault) or rollout.group in faults else result
        for rollout, result in zip(rollouts, results, strict=True)
    ]
    return kept, faults


def _portions(requests: Sequence[PrefillRequest]) -> Iterator[list[PrefillRequest]]:
    portion: list[PrefillRequest] = []
    tokens = 0
    for request in requests:
        size = len(request.input.prompt_tokens) + len(request.input.output_tokens)
        if portion and tokens + size > PORTION_TOKENS:
            yield portion
            portion, tokens = [], 0
        portion.append(request)
        tokens += size
    if portion:
        yield portion


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
    def of(cls, inputs: Sequence[plugins.PrefillInput], truncation: Truncation | None) -> Wanted:
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


def outputs_of(
    facts: TokenFacts, inputs: Sequence[plugins.PrefillInput]
) -> list[plugins.PrefillOutput]:
    """Divide the numbers of sampled tokens, numpy arrays, among their rollouts, in order.

    Args:
        facts: numbers of at least all sampled tokens of the rollouts; the rest is left out.
        inputs: the rollouts.
    """
    outputs, begin = [], 0
    for each in inputs:
        own = slice(begin, begin + len(each.sampled))
        begin = own.stop
        gaps = None if each.noise_key is None else facts.gaps[own]
        choices = None
        if each.end_token is not None and facts.choices is not None:
            choices = Choices(*(column[own] for column in facts.choices))
        outputs.append(plugins.PrefillOutput(facts.logprobs[own], facts.hidden[own], gaps, choices))
    return outputs
