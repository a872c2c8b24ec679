"""Submissions come and go while others run; what goes wrong meanwhile; what is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.errors import UserError
from runspec.core.models.parameters import MAX_SEQUENCES
from sampler.engine.arguments import engine_arguments, find_pool, prepare_environment
from sampler.engine.engine import Engine
from sampler.engine.engine_client import EngineClient, Slots, Submission
from sampler.engine.engine_process import EngineDied
from sampler.engine.requests import GenerationAborted, Recorded
from tests.harness import standing_still
from tests.sampler.engine.models import (
    MAX_MODEL_LEN,
    MAX_NEW_TOKENS,
    WAIT_S,
    assert_samples,
    batch,
    cpu_pool,
    perturbed_version,
    running_engine,
    sample,
    tokens_of,
)
from tests.verify.small_model import small_spec
from tests.waiting import eventually
from verify.toploc import TOP_K

pytestmark = pytest.mark.slow


def test_a_submission_joins_one_that_runs_and_both_come_out_as_alone(engine):
    # given what two submissions give alone
    long, short = batch(8, 8), [replace(r, max_new_tokens=2) for r in batch(2, 2)]
    alone = [tokens_of(engine, requests) for requests in (long, short)]
    # when the second one comes while the first one runs
    first = engine.submit(long)
    eventually(lambda: engine.running < len(long), "a first sequence ends")
    second = engine.submit(short)
    shared = [[r.output_tokens.tolist() for r in f.result(WAIT_S)] for f in (first, second)]
    # then neither shows
    assert shared == alone
    assert engine.running == 0


def test_more_sequences_than_slots_wait_in_order_and_all_come_out(engine):
    # given more than the engine decodes at a time
    requests = batch(20, 16)
    assert len(requests) > MAX_SEQUENCES == engine.capacity
    # when they are submitted, and a short one behind them that is answered first
    future = engine.submit(requests)
    # then each is answered as in a small batch
    sampled = [result.output_tokens.tolist() for result in future.result(WAIT_S)]
    assert sampled[-8:] == tokens_of(engine, requests[-8:])
    assert sampled[:8] == tokens_of(engine, requests[:8])
    assert sample(engine, []) == []


def test_abort_fails_what_was_submitted_and_frees_its_slots(engine):
    expected = tokens_of(engine, batch())
    for _ in range(2):
        # given every slot taken, and more waiting
        with ThreadPoolExecutor(1) as threads, standing_still(*engine.pids):
            futures = [engine.submit(batch(20, 8)), engine.submit(batch(20, 8))]
            # when all is aborted, then each future says so
            aborting = threads.submit(engine.abort)
            for future in futures:
                with pytest.raises(GenerationAborted):
                    future.result(WAIT_S)
        aborting.result()
        assert engine.running == 0
    # and what is sampled in the same slots is as it was
    assert tokens_of(engine, batch()) == expected


SIZES = [(MAX_MODEL_LEN, 1), (1, MAX_NEW_TOKENS + 1), (0, 1), (1, 0)]


@pytest.mark.parametrize(("prompt", "new"), SIZES)
def test_a_request_that_can_never_fit_is_refused(engine, prompt, new):
    request = replace(batch(1, 1)[0], prompt_tokens=[5] * prompt, max_new_tokens=new)

    with pytest.raises(UserError, match="the pool has room for") as error:
        engine.submit([request])

    assert error.value.place == "samplers.cpu.max_model_len"
    assert engine.running == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own")
def test_two_copies_of_the_model_are_loaded_checked_sampled_and_aborted(untied, tmp_path):
    with running_engine(untied, cpu_pool(parallel={"data": 2})) as copies:
        # given a newer version, when it is loaded, then both sample from it
        newer = perturbed_version(untied, tmp_path / "v1", "gate_proj.weight")
        copies.load(newer, 1)
        assert copies.capacity == 2 * MAX_SEQUENCES
        for result in assert_samples(copies, newer, batch(2, 4)):  # placed in turn
            assert set(result.versions) == {1}
        # and an abort reaches both
        expected = tokens_of(copies, batch())
        copies.submit(batch(20, 16))
        copies.abort()
        assert tokens_of(copies, batch()) == expected
        # and both are checked
        stale = perturbed_version(newer, tmp_path / "v2", "q_proj.bias", scale=1e-5, probe=False)
        with pytest.raises(UserError, match=r"version 2.*layers.0.self_attn.q_proj.bias"):
            copies.check(stale, 2)


# -- What vLLM is told, and what no worker can do --------------------------------------------------

GPU = {"kind": "h100-80g", "count": 4}
TPU = {"kind": "tpu-v5e", "topology": "2x2"}


@pytest.mark.parametrize(
    ("fields", "executor", "cache", "eager"),
    [
        ({}, "OneRank", True, True),
        ({"enforce_eager": False}, "OneRank", True, False),
        ({"hardware": {"kind": "h100-80g"}}, "OneRank", False, False),
        ({"hardware": {"kind": "h100-80g"}, "enforce_eager": True}, "OneRank", False, True),
        ({"hardware": {"kind": "any"}}, "OneRank", False, False),
        ({"hardware": GPU, "parallel": {"tensor": 2, "data": 2}}, "ManyRanks", False, False),
        ({"hardware": GPU, "dtype": "bfloat16", "quantization": "fp8"}, "OneRank", False, False),
    ],
    ids=str,
)
def test_each_hardware_has_its_executor_and_graphs_and_cpus_a_cache_of_a_size(
    untied, fields, executor, cache, eager
):
    pool = cpu_pool(**fields)
    arguments = engine_arguments(pool, untied, {})

    assert arguments["tensor_parallel_size"] == pool.parallel.tensor
    assert arguments["data_parallel_size"] == pool.parallel.data
    assert (arguments["dtype"], arguments["quantization"]) == (pool.dtype, pool.quantization)
    assert arguments["distributed_executor_backend"].__name__ == executor
    assert ("kv_cache_memory_bytes" in arguments, "block_size" in arguments) == (cache, cache)
    prepare_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs(**arguments).enforce_eager is eager


@pytest.mark.parametrize(
    ("act", "says", "place"),
    [
        (
            lambda version: engine_arguments(cpu_pool(), version, {"kv_cache_memory_bytes": 1024}),
            "keys and values of one sequence",
            "samplers.cpu.max_model_len",
        ),
        (
            lambda version: engine_arguments(cpu_pool(hardware=TPU), version, {}),
            "tpu-v5e: vLLM 0.32 takes no custom logits processor on TPUs",
            "samplers.cpu.hardware.kind",
        ),
        (
            lambda _: Engine(small_spec(dtype="bfloat16", quantization="fp8").samplers[0]),
            "does not quantise to fp8 on CPUs",
            "samplers.home.quantization",
        ),
        (lambda _: find_pool(small_spec(), "away"), "no sampler pool 'away'(.|\n)*home", None),
        (
            lambda version: running_engine(version, quantization="nonsense").__enter__(),
            r"vLLM refuses.*(.|\n)*nonsense",
            "VERSION",
        ),
        (
            lambda version: running_engine(version, num_gpu_blocks_override=2).__enter__(),
            rf"max seq len \({MAX_MODEL_LEN}\)",
            "samplers.cpu.max_model_len",
        ),
    ],
    ids=[
        "a cache too small",
        "a TPU",
        "fp8 on CPUs",
        "no such pool",
        "a setting",
        "vLLM's cache too small",
    ],
)
def test_what_no_worker_can_do_is_refused_by_name(untied, act, says, place):
    with pytest.raises(UserError, match=says) as error:
        act(untied)

    assert place is None or error.value.place == place.replace("VERSION", str(untied))


# -- The client, when things go wrong at the same time ---------------------------------------------

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

    async def generate(self, name: str, *_: Any) -> Any:
        self.names.append(name)
        await (self.first_output if name == self.names[0] else self.outputs).wait()
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
async def works():
    works = Works()
    yield works
    works.client.close()


async def until(condition: Callable[[], object]) -> None:
    """Lets the loop turn until something holds."""
    async with asyncio.timeout(WAIT_S):
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


async def test_an_engine_that_dies_during_an_abort_fails_nothing_twice(works):
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


async def test_what_is_submitted_during_an_abort_is_not_aborted(works):
    # given sequences that are to be aborted, while the record of one is still being fetched
    first, dropping = await drop_while_a_record_is_fetched(works, 3)
    # when others are submitted before vLLM has answered
    second = works.submit(2)
    await until(lambda: len(works.core.names) == 5)
    works.core.aborts.set()
    works.core.answers.set()
    await dropping
    # then these are answered, and the slots are free once
    works.core.outputs.set()
    await until(second.future.done)
    assert len(second.future.result(0)) == 2
    assert works.core.aborted == works.core.names[1:3]
    assert isinstance(first.future.exception(0), GenerationAborted)
    third = works.submit(1)
    await until(third.future.done)
    assert len(third.future.result(0)) == 1
    assert works.running == 0 and not works.failures


@settings(derandomize=True)
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
