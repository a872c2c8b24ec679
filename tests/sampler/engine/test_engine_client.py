"""Sequences on their way through vLLM, when things go wrong at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler.engine.engine_client import EngineClient, Slots, Submission
from sampler.engine.engine_process import EngineDied
from sampler.engine.requests import GenerationAborted, Recorded
from tests.sampler.engine.requests import batch
from verify.toploc.selection import TOP_K

pytestmark = pytest.mark.slow  # vLLM's import
TOKEN = 7


class Core:
    """Answers each call when it is told to; a sequence comes out with one token."""

    ranks = 1

    def __init__(self) -> None:
        self.names: list[str] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, list[int]]] = []
        self.outputs, self.aborts, self.answers = (asyncio.Event() for _ in range(3))
        self.first_output = asyncio.Event()

    async def add(self, name: str, prompt: Any, params: Any, rank: int) -> str:
        self.names.append(name)
        return name

    async def output(self, collector: str) -> Any:
        await (self.first_output if collector == self.names[0] else self.outputs).wait()
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[TOKEN], finish_reason="stop")])

    async def abort(self, names: list[str]) -> None:
        await self.aborts.wait()
        self.aborted += names

    async def rpc_of(self, rank: int, method: str, *, slots: list[int], **_: Any) -> list[Any]:
        self.calls.append((method, slots))
        await self.answers.wait()
        return [asdict(_recorded(len(slots)))] if method == "take_recorded" else [None]


def _recorded(sequences: int) -> Recorded:
    def numbers(count: int, kind: type, value: int = 0) -> bytes:
        return np.full(count, value, kind).tobytes()

    return Recorded(
        tokens=numbers(sequences, np.int32, TOKEN),
        logprobs=numbers(sequences, np.float32),
        versions=numbers(sequences, np.int32),
        indices=numbers(sequences * TOP_K, np.int32),
        bits=numbers(sequences * TOP_K, np.uint16),
        hidden_size=16,
    )


class Works:
    """A client over a core that is driven by hand; `running` is the engine's count."""

    def __init__(self) -> None:
        self.core, self.running, self.failures = Core(), 0, list[Exception]()
        self.client = EngineClient(
            self.core,  # type: ignore[arg-type]
            ended=self._ended,
            failed=self.failures.append,
        )
        self.client.open()

    def submit(self, sequences: int) -> Submission:
        submission = Submission(batch(1, sequences))
        submission.future.set_running_or_notify_cancel()
        self.running += sequences
        self.client.add(submission)
        return submission

    def _ended(self, sequences: int) -> None:
        self.running -= sequences


@pytest.fixture
async def works() -> Any:
    works = Works()
    yield works
    works.client.close()


async def until(condition: Any) -> None:
    """Lets the loop turn until something holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def drop_while_a_record_is_fetched(
    works: Works, sequences: int
) -> tuple[Submission, asyncio.Future[None]]:
    """A submission that was aborted while the record of its first sequence was still being
    fetched, and the abort, which vLLM has not answered."""
    submission = works.submit(sequences)
    await until(lambda: len(works.core.names) == sequences)
    works.core.first_output.set()
    await until(lambda: works.core.calls)
    dropping = asyncio.ensure_future(works.client.drop(GenerationAborted()))
    await until(submission.future.done)
    return submission, dropping


async def test_an_engine_that_dies_during_an_abort_fails_nothing_twice(works: Works) -> None:
    # given sequences that are to be aborted, while the record of one is still being fetched
    first, dropping = await drop_while_a_record_is_fetched(works, 3)
    # when the engine dies before vLLM has answered
    second = works.submit(2)
    works.client.fail(EngineDied("killed"))
    dropping.cancel()
    # then each future has one error, and each sequence is counted once
    assert isinstance(first.future.exception(0), GenerationAborted)
    assert isinstance(second.future.exception(0), EngineDied)
    assert works.running == 0


async def test_what_is_submitted_during_an_abort_is_not_aborted(works: Works) -> None:
    # given sequences that are to be aborted, while the record of one is still being fetched
    _, dropping = await drop_while_a_record_is_fetched(works, 3)
    # when others are submitted before vLLM has answered
    second = works.submit(2)
    await until(lambda: len(works.core.names) == 5)
    works.core.aborts.set()
    works.core.answers.set()
    await dropping
    # then these are answered
    works.core.outputs.set()
    await until(second.future.done)
    assert len(second.future.result(0)) == 2
    assert works.core.aborted == works.core.names[1:3]
    assert works.running == 0 and not works.failures


async def test_slots_are_free_once_after_an_abort_while_a_record_is_fetched(works: Works) -> None:
    # given a sequence that is to be aborted, while its record is still being fetched
    first, dropping = await drop_while_a_record_is_fetched(works, 1)
    # when vLLM answers
    works.core.aborts.set()
    works.core.answers.set()
    await dropping
    # then the submission stays failed, and the slot serves the next one
    assert isinstance(first.future.exception(0), GenerationAborted)
    works.core.outputs.set()
    second = works.submit(1)
    await until(second.future.done)
    assert len(second.future.result(0)) == 1
    assert works.running == 0 and not works.failures


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.booleans(), max_size=40))
def test_a_slot_is_held_by_one_sequence(ranks, each, takes):
    slots, held = Slots(ranks, each), []
    for take in takes:
        if take:
            slot = slots.take()
            assert (slot is None) == (len(held) == ranks * each)
            if slot is not None:
                assert slot not in held
                assert 0 <= slot.number < each
                held.append(slot)
        elif held:
            slots.give(held.pop(0))
