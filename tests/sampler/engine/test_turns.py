"""Rollouts of several turns in vLLM: one sequence, one record, noise that runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from tests.sampler.engine.models import (
    END_TOKEN,
    MAX_MODEL_LEN,
    MAX_NEW_TOKENS,
    VOCABULARY,
    Reference,
    batch,
    sample,
)
from tests.sampler.engine.test_sampling import assert_proven
from tests.sampler.engine.test_sampling import noise as noise_of
from verify.formats.turns import gaps, joined
from verify.plugins import GraderFault
from verify.toploc import build_proofs_of
from verify.toploc.statistics import verify_proofs

pytestmark = pytest.mark.slow


@dataclass
class Talk:
    """An environment that answers with tokens made from the turn; it ends after `most` turns."""

    most: int = 3
    per_turn: int = 9
    fault: GraderFault | None = None

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        return None if len(turns) >= self.most else answer(turns[-1])


def answer(turn: Sequence[int]) -> list[int]:
    return [2, *(2 + (sum(turn) + i) % (VOCABULARY - 2) for i in range(1 + len(turn) % 3)), 3]


def talks(groups: int = 4, size: int = 4, seed: int = 5, **fields: int):
    return [
        replace(request, max_length=MAX_MODEL_LEN, episode=Talk(**fields))
        for request in batch(groups, size, seed=seed)
    ]


def whole(result):
    """What follows the prompt, and which of it the model sampled."""
    ends = np.cumsum(result.turns)
    turns = [
        result.output_tokens[e - n : e].tolist() for e, n in zip(ends, result.turns, strict=True)
    ]
    between = [answer(turn) for turn in turns[:-1]]
    return joined(result.output_tokens, result.turns, *gaps(between))


@pytest.fixture(scope="module")
def reference(untied):
    return Reference(untied)


@pytest.mark.parametrize("kind", ["plain", "cramped", "cached"])
def test_turns_are_one_sequence_with_one_record(engine_of, reference, kind):
    """Also where sequences are preempted, and where earlier turns are cached."""
    # given episodes of three turns, and an engine
    engine, requests = engine_of("plain" if kind == "plain" else "cramped"), talks()
    if kind == "cached":
        sample(engine, requests)
    # when they are sampled
    sampled = sample(engine, requests)
    # then each token is the one that transformers and the running noise say of the whole sequence
    assert_one_record(reference, requests, sampled)
    assert {len(result.turns) for result in sampled} == {3}


def assert_one_record(reference, requests, sampled):
    chunks = []
    for request, result in zip(requests, sampled, strict=True):
        found = whole(result)
        own = np.ones(len(found.tokens), bool) if found.own is None else found.own
        hidden, logits = reference.forward(list(request.prompt_tokens), found.tokens.tolist())
        scaled, noise = logits[own], noise_of(request, len(result.output_tokens))
        best = (scaled + noise).max(-1)
        chosen = (scaled + noise)[np.arange(len(scaled)), result.output_tokens]
        assert (best - chosen).max() < 1e-3
        logprobs, _ = reference.logprobs(list(request.prompt_tokens), found.tokens.tolist())
        np.testing.assert_allclose(result.logprobs, logprobs[own], atol=1e-4)
        bits = np.ascontiguousarray(hidden[own]).astype(ml_dtypes.bfloat16).view(np.uint16)
        chunks += verify_proofs(bits, build_proofs_of([result.selection])[0])
    assert_proven(chunks)


def test_the_same_prompt_in_a_second_turn_meets_other_noise(engine):
    """A turn that begins the noise anew would repeat itself where the text does."""
    # given one turn, and an episode whose observation is the prompt once more
    (alone,) = batch(1, 1)
    alone = replace(alone, prompt_tokens=alone.prompt_tokens[:8], max_new_tokens=6)
    again = replace(alone, max_new_tokens=12, max_length=MAX_MODEL_LEN, episode=Again(alone))
    # when both are sampled
    first, both = sample(engine, [alone]), sample(engine, [again])
    # then the first turn is the same, and the second is not its repetition
    turn = first[0].output_tokens.tolist()
    assert both[0].output_tokens.tolist()[: len(turn)] == turn
    assert both[0].output_tokens.tolist()[len(turn) :] != turn


class Again:
    per_turn, fault = 6, None

    def __init__(self, request) -> None:
        self.prompt = list(request.prompt_tokens)

    def follow(self, turns: Sequence[Sequence[int]]) -> list[int] | None:
        return self.prompt if len(turns) < 2 else None


def test_a_rollout_ends_where_its_tokens_or_its_context_are_used_up(engine):
    # given episodes that would go on for long
    sampled = sample(engine, talks(most=100))
    for request, result in zip(talks(), sampled, strict=True):
        # then the model's tokens, or all of them, reach their limit, or a last turn has no room
        found = whole(result)
        left = MAX_MODEL_LEN - len(request.prompt_tokens) - len(found.tokens)
        after = len(answer(result.output_tokens[-result.turns[-1] :].tolist()))
        assert len(result.output_tokens) <= MAX_NEW_TOKENS and left >= 0
        assert len(result.output_tokens) == MAX_NEW_TOKENS or left <= after
        # and no turn is longer than the environment allows, or goes on after its end
        assert max(result.turns) <= 9 and sum(result.turns) == len(result.output_tokens)
        ends = np.flatnonzero(result.output_tokens == END_TOKEN) + 1
        assert set(ends.tolist()) <= set(np.cumsum(result.turns).tolist())


def test_a_rollout_of_one_turn_is_the_same_as_without_an_environment(engine):
    plain = sample(engine, batch(2, 2))
    played = sample(engine, talks(2, 2, most=1, per_turn=MAX_NEW_TOKENS))
    for one, two in zip(plain, played, strict=True):
        assert one.output_tokens.tolist() == two.output_tokens.tolist()
        assert one.finish_reason == two.finish_reason
        assert list(two.turns) == [len(one.output_tokens)]
