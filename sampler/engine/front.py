"""Sequences on their way through vLLM: slots, records, results. Runs on the engine's event loop.

Invariants:
1. A sequence in vLLM has a slot; without a free one it waits, in the order of submission.
2. A slot is free again only when vLLM's workers know no row of it any more: its record was fetched,
   or, after an abort, forgotten.
3. While the gate is shut (a version is being changed) no sequence enters and no result leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from runspec.core.models.memory import MAX_SEQUENCES
from sampler.engine.core import Core
from sampler.engine.requests import Sampled, SampleRequest


class Slot(NamedTuple):
    """Where vLLM's workers keep the record of a sequence, until it was fetched."""

    rank: int
    """Data-parallel."""
    number: int
    """0 <= number < slots of a rank."""


class Slots:
    """Free slots of every data-parallel rank, which has workers of its own.

    Args:
        ranks: data-parallel ranks.
        each: slots of one.
    """

    def __init__(self, ranks: int, each: int) -> None:
        self._free = [list(range(each))[::-1] for _ in range(ranks)]

    def take(self) -> Slot | None:
        """A slot of the rank that has most free ones; None where none is free."""
        rank = max(range(len(self._free)), key=lambda r: len(self._free[r]))
        return Slot(rank, self._free[rank].pop()) if self._free[rank] else None

    def give(self, slot: Slot) -> None:
        """Makes a slot free again."""
        self._free[slot.rank].append(slot.number)


@dataclass(eq=False)
class Submission:
    """Requests that are answered together."""

    requests: Sequence[SampleRequest]
    future: Future[list[Sampled]] = field(default_factory=Future)
    sampled: dict[int, Sampled] = field(default_factory=dict)


@dataclass(eq=False)
class _Sequence:
    submission: Submission
    index: int
    slot: Slot
    name: str
    output: Any = None
    """vLLM's, once finished."""


class Front:
    """Admits sequences, fetches their records in batches, resolves their submissions.

    Args:
        core: vLLM.
        ended: told how many sequences have been answered, or dropped.
        failed: told what went wrong in the engine; nothing more will be answered.
    """

    def __init__(
        self, core: Core, *, ended: Callable[[int], None], failed: Callable[[Exception], None]
    ) -> None:
        self._core, self._ended, self._failed = core, ended, failed
        self._slots = Slots(core.ranks, MAX_SEQUENCES)
        self._waiting: deque[tuple[Submission, int]] = deque()
        self._live: dict[str, _Sequence] = {}
        self._finished: list[_Sequence] = []
        self._open = asyncio.Event()
        self._news = asyncio.Event()
        self._records = asyncio.Lock()  # one talk with the recorders at a time
        self._names = itertools.count()
        self._salt = "0"
        self._tasks: set[asyncio.Task[None]] = set()
        self._collector = asyncio.ensure_future(self._collect())

    def open(self) -> None:
        """Opens the gate."""
        self._open.set()
        self._admit()

    def shut(self) -> None:
        """Shuts the gate."""
        self._open.clear()

    def set_salt(self, salt: str) -> None:
        """From now on no block of keys and values made under another salt is used."""
        self._salt = salt

    def add(self, submission: Submission) -> None:
        """Queues a submission behind those that came before."""
        self._waiting.extend((submission, i) for i in range(len(submission.requests)))
        self._admit()

    async def prompt_logprobs(
        self, sequences: Sequence[Sequence[int]], *, rank: int = 0
    ) -> list[np.ndarray]:
        """See `Engine.prompt_logprobs`; of one data-parallel rank. Passes the gate."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        async def one(tokens: Sequence[int]) -> np.ndarray:
            params = _final(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
            prompt = tokens_input(list(tokens), cache_salt=self._salt)
            collector = await self._core.add(self._name(), prompt, params, rank)
            entries = (await self._core.output(collector)).prompt_logprobs
            given = zip(tokens[1:], entries[1:], strict=True)
            return np.array([entry[token].logprob for token, entry in given], dtype=np.float32)

        return list(await asyncio.gather(*(one(tokens) for tokens in sequences)))

    async def drop(self, error: Exception) -> None:
        """Fails every submission with an error and takes its sequences out of vLLM."""
        self.fail(error)
        async with self._records:
            # Not those of submissions that came while the last record was fetched.
            victims = [s for s in self._live.values() if s.submission.future.done()]
            self._finished = [s for s in self._finished if s not in victims]
            for victim in victims:
                del self._live[victim.name]
            if victims:
                await self._core.abort([victim.name for victim in victims])
            for rank in {victim.slot.rank for victim in victims}:
                slots = [v.slot.number for v in victims if v.slot.rank == rank]
                await self._core.rpc_of(rank, "forget", slots=slots)
            for victim in victims:
                self._slots.give(victim.slot)
        self._admit()

    def fail(self, error: Exception) -> None:
        """Fails every submission; vLLM is told nothing."""
        submissions = {s for s, _ in self._waiting} | {s.submission for s in self._live.values()}
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        for submission in submissions:
            if not submission.future.done():  # an abort may be under way
                self._fail(submission, error)

    def close(self) -> None:
        """Ends the tasks of this front."""
        for task in (*self._tasks, self._collector):
            task.cancel()

    def _admit(self) -> None:
        while self._open.is_set() and self._waiting:
            if (slot := self._slots.take()) is None:
                return
            submission, index = self._waiting.popleft()
            sequence = _Sequence(submission, index, slot, self._name())
            self._live[sequence.name] = sequence
            task = asyncio.ensure_future(self._sample(sequence))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, sequence: _Sequence) -> None:
        from vllm.inputs import tokens_input

        request = sequence.submission.requests[sequence.index]
        try:
            prompt = tokens_input(list(request.prompt_tokens), cache_salt=self._salt)
            params = _sampling_params(request, sequence.slot.number)
            collector = await self._core.add(sequence.name, prompt, params, sequence.slot.rank)
            sequence.output = await self._core.output(collector)
        except Exception as error:  # noqa: BLE001 - whatever it is, the futures raise it
            self._failed(error)
            return
        self._finished.append(sequence)
        self._news.set()

    async def _collect(self) -> None:
        """Fetches the records of all that finished while the last ones were fetched."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._open.wait()
            try:
                async with self._records:
                    batch, self._finished = self._finished, []
                    for rank in range(self._core.ranks):
                        if of_rank := [s for s in batch if s.slot.rank == rank]:
                            await self._take(rank, of_rank)
            except Exception as error:  # noqa: BLE001 - whatever it is, the futures raise it
                self._failed(error)
                return
            self._admit()

    async def _take(self, rank: int, batch: list[_Sequence]) -> None:
        from sampler.engine.recorded import Recorded, split_recorded

        results = [sequence.output.outputs[0] for sequence in batch]
        lengths = [len(result.token_ids) for result in results]
        answers = await self._core.rpc_of(
            rank, "take_recorded", slots=[s.slot.number for s in batch], lengths=lengths
        )
        recorded = next(answer for answer in answers if answer is not None)
        rows = split_recorded(Recorded(**recorded), lengths)
        for sequence, result, row in zip(batch, results, rows, strict=True):
            if row.tokens.tolist() != list(result.token_ids):
                raise RuntimeError("the recorded tokens are not the ones that vLLM returned")
            if result.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a sequence: {result.finish_reason}")
            del self._live[sequence.name]
            self._slots.give(sequence.slot)
            sampled = Sampled(
                row.tokens, row.logprobs, result.finish_reason, row.versions, row.selection
            )
            self._answer(sequence.submission, sequence.index, sampled)

    def _answer(self, submission: Submission, index: int, sampled: Sampled) -> None:
        if submission.future.done():  # failed while the record was fetched
            return
        submission.sampled[index] = sampled
        self._ended(1)
        if len(submission.sampled) == len(submission.requests):
            ordered = [submission.sampled[i] for i in range(len(submission.requests))]
            submission.future.set_result(ordered)

    def _fail(self, submission: Submission, error: Exception) -> None:
        self._ended(len(submission.requests) - len(submission.sampled))
        submission.future.set_exception(error)

    def _name(self) -> str:
        return str(next(self._names))


def _sampling_params(request: SampleRequest, slot: int) -> Any:
    from vllm import SamplingParams

    from sampler.engine.seeded import sampling_arguments

    return _final(
        SamplingParams(
            temperature=0.0,  # the noise is in the logits
            max_tokens=request.max_new_tokens,
            stop_token_ids=[request.end_token],
            ignore_eos=True,  # one rule for the end, ours
            extra_args=sampling_arguments(
                slot,
                request.noise_key or _random_key(),
                request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
            ),
        )
    )


def _final(params: Any) -> Any:
    """One output, when the sequence has ended, of token ids alone."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.detokenize = False
    params.skip_clone = True
    return params


def _random_key() -> tuple[int, int]:
    """Words that nobody can predict, for pools that are not seeded."""
    return secrets.randbits(32) - 2**31, secrets.randbits(32) - 2**31
