"""Submissions come and go while others run, and none of that shows in what is sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runspec.core.errors import UserError
from runspec.core.models.memory import MAX_SEQUENCES
from sampler.engine.engine import Engine
from sampler.engine.requests import GenerationAborted, Sampled
from tests.sampler.engine.models import MAX_MODEL_LEN, MAX_NEW_TOKENS
from tests.sampler.engine.requests import WAIT_S, batch
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def tokens(sampled: list[Sampled]) -> list[list[int]]:
    return [result.output_tokens.tolist() for result in sampled]


def test_a_submission_joins_one_that_runs_and_both_come_out_as_alone(engine: Engine) -> None:
    # given what two submissions give alone
    long, short = batch(8, 8), [replace(r, max_new_tokens=2) for r in batch(2, 2)]
    alone = [tokens(engine.submit(r).result(WAIT_S)) for r in (long, short)]
    # when the second one comes while the first one runs
    first = engine.submit(long)
    eventually(lambda: engine.running < len(long), "a first sequence ends", deadline_s=WAIT_S)
    second = engine.submit(short)
    shared = [tokens(future.result(WAIT_S)) for future in (first, second)]
    # then neither shows
    assert shared == alone
    assert engine.running == 0


def test_a_short_submission_does_not_wait_for_a_long_one(engine: Engine) -> None:
    # given many long sequences, all admitted
    long = engine.submit(batch(14, 16))
    # when a short one comes, then it is answered first
    short = engine.submit([replace(batch(1, 1)[0], max_new_tokens=1)])
    short.result(WAIT_S)
    assert not long.done()
    assert engine.running > 0
    long.result(WAIT_S)


def test_more_sequences_than_slots_wait_in_order_and_all_come_out(engine: Engine) -> None:
    # given more than the engine decodes at a time
    requests = batch(20, 16)
    assert len(requests) > MAX_SEQUENCES == engine.capacity
    # when they are submitted, then each is answered as in a small batch
    sampled = engine.submit(requests).result(WAIT_S)
    assert tokens(sampled[-8:]) == tokens(engine.submit(requests[-8:]).result(WAIT_S))
    assert tokens(sampled[:8]) == tokens(engine.submit(requests[:8]).result(WAIT_S))


def test_abort_fails_what_was_submitted_and_frees_its_slots(engine: Engine) -> None:
    expected = tokens(engine.submit(batch()).result(WAIT_S))
    for _ in range(3):
        # given every slot taken, and more waiting
        futures = [engine.submit(batch(20, 8)), engine.submit(batch(20, 8))]
        # when all is aborted, then each future says so
        engine.abort()
        for future in futures:
            with pytest.raises(GenerationAborted):
                future.result(WAIT_S)
        assert engine.running == 0
    # and what is sampled in the same slots is as it was
    assert tokens(engine.submit(batch()).result(WAIT_S)) == expected


@pytest.mark.parametrize(
    ("prompt", "new"), [(MAX_MODEL_LEN, 1), (1, MAX_NEW_TOKENS + 1), (0, 1), (1, 0)]
)
def test_a_request_that_can_never_fit_is_refused(engine: Engine, prompt: int, new: int) -> None:
    request = replace(batch(1, 1)[0], prompt_tokens=[5] * prompt, max_new_tokens=new)

    with pytest.raises(UserError, match="the pool has room for") as error:
        engine.submit([request])

    assert error.value.place == "samplers.cpu.max_model_len"
    assert engine.running == 0
