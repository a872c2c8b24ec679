"""Client of vLLM: queues sequences, gives them slots, collects their records and results.

Everything here runs on the engine's event loop.

Invariants:
1. A sequence in vLLM has a slot; without a free one it waits, in the order of submission. It keeps
   the slot over all its turns, each of which is a request that begins with the turns before.
2. A slot is free again only when vLLM's workers hold no row of it: its record was fetched or, after
   an abort, forgotten.
3. While admission is closed (a version is being changed) no sequence enters and no result leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from runspec.core.models.parameters import MAX_SEQUENCES
from sampler.engine.engine_process import EngineProcesses
from sampler.engine.requests import Recorded, Sampled, SampleRequest, split_recorded


class Slot(NamedTuple):
    """Place of a sequence's record in vLLM's workers, until the record is fetched."""

    rank: int
    """Data-parallel rank."""
    number: int
    """0 <= number < slots of a rank."""


class Slots:
    """Free slots of every data-parallel rank; each rank has its own workers.

    Args:
        ranks: data-parallel ranks.
        each: slots of one rank.
    """

    def __init__(self, ranks: int, each: int) -> None:
        self._free = [list(range(each))[::-1] for _ in range(ranks)]

    def take(self) -> Slot | None:
        """Take a slot of the rank with the most free ones; None if none is free."""
        rank = max(range(len(self._free)), key=lambda r: len(self._free[r]))
        return Slot(rank, self._free[rank].pop()) if self._free[rank] else None

    def give(self, slot: Slot) -> None:
        """Free a slot."""
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
    in_core: str
    """Name of the newest turn's request in vLLM."""
    turns: list[list[int]] = field(default_factory=list)
    """Tokens of the turns that are finished."""
    reason: str = ""
    """Why the last turn ended, once the sequence is finished."""


class EngineClient:
    """Admits sequences, fetches their records in batches, resolves their submissions.

    Args:
        core: vLLM's processes, which the caller closes.
        ended: called with the number of sequences that were answered or dropped.
        failed: called with the engine's error, after which nothing is answered.
    """

    def __init__(
        self,
        core: EngineProcesses,
        *,
        ended: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.core, self._ended, self._failed = core, ended, failed
        self._slots = Slots(core.ranks, MAX_SEQUENCES)
        self._waiting: deque[tuple[Submission, int]] = deque()
        self._live: dict[str, _Sequence] = {}
        self._finished: list[_Sequence] = []
        self._open = asyncio.Event()
        self._news = asyncio.Event()
        self._records = asyncio.Lock()  # one call to the recorders at a time
        self._names = itertools.count()
        self.salt = "0"
        """Cached keys and values are reused only if they were computed under this salt."""
        self._tasks: set[asyncio.Task[None]] = set()
        # As many as sequences: an environment may wait, and the others' turns go on.
        self._players = ThreadPoolExecutor(core.ranks * MAX_SEQUENCES, "episode")
        self._collector = asyncio.ensure_future(self._collect())

    def open(self) -> None:
        """Open admission."""
        self._open.set()
        self._admit()

    def shut(self) -> None:
        """Close admission: no sequence enters, no result leaves."""
        self._open.clear()

    def add(self, submission: Submission) -> None:
        """Queue a submission behind the earlier ones."""
        self._waiting.extend((submission, i) for i in range(len(submission.requests)))
        self._admit()

    async def prompt_logprobs(
        self, sequences: Sequence[Sequence[int]], *, rank: int = 0
    ) -> list[np.ndarray]:
        """See `Engine.prompt_logprobs`; asks one rank, even while admission is closed."""
        from vllm import SamplingParams

        async def one(tokens: Sequence[int]) -> np.ndarray:
            params = _final(SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
            name = str(next(self._names))
            output = await self.core.generate(name, tokens, self.salt, params, rank)
            given = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
            return np.array([entry[token].logprob for token, entry in given], dtype=np.float32)

        return list(await asyncio.gather(*(one(tokens) for tokens in sequences)))

    async def drop(self, error: Exception) -> None:
        """Fail every submission with an error and abort its sequences in vLLM."""
        self.fail(error)
        async with self._records:
            # Submissions that arrived while the last record was fetched stay.
            victims = [s for s in self._live.values() if s.submission.future.done()]
            self._finished = [s for s in self._finished if s not in victims]
            for victim in victims:
                del self._live[victim.name]
            if victims:
                await self.core.abort([victim.in_core for victim in victims])
            for rank in {victim.slot.rank for victim in victims}:
                slots = [v.slot.number for v in victims if v.slot.rank == rank]
                await self.core.rpc_of(rank, "forget", slots=slots)
            for victim in victims:
                self._slots.give(victim.slot)
        self._admit()

    def fail(self, error: Exception) -> None:
        """Fail every submission without a call to vLLM."""
        submissions = {s for s, _ in self._waiting} | {s.submission for s in self._live.values()}
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        for submission in submissions:
            if not submission.future.done():  # an abort may be under way
                self._ended(len(submission.requests) - len(submission.sampled))
                submission.future.set_exception(error)

    def close(self) -> None:
        """Cancel the tasks of this client."""
        self._players.shutdown(wait=False, cancel_futures=True)
        for task in (*self._tasks, self._collector):
            task.cancel()

    def _admit(self) -> None:
        while self._open.is_set() and self._waiting:
            if (slot := self._slots.take()) is None:
                return
            submission, index = self._waiting.popleft()
            name = str(next(self._names))
            sequence = _Sequence(submission, index, slot, name, name)
            self._live[sequence.name] = sequence
            task = asyncio.ensure_future(self._sample(sequence))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sample(self, sequence: _Sequence) -> None:
        """Sample all turns of a sequence. Its slot stays its own, so that the record is one."""
        request, slot = sequence.submission.requests[sequence.index], sequence.slot
        text, own, turns = list(request.prompt_tokens), 0, sequence.turns
        try:
            while (room := request.room(len(text) - len(request.prompt_tokens), own)) > 0:
                params = _sampling_params(request, slot.number, room, offset=own)
                answer = await self.core.generate(
                    sequence.in_core, text, self.salt, params, slot.rank
                )
                turns.append(list(answer.outputs[0].token_ids))
                sequence.reason = answer.outputs[0].finish_reason
                if request.episode is None or sequence.reason not in ("stop", "length"):
                    break
                follow = request.episode.follow
                between = await asyncio.get_running_loop().run_in_executor(
                    self._players, follow, list(turns)
                )
                if between is None:
                    break
                text = [*text, *turns[-1], *between]
                own += len(turns[-1])
                await self._open.wait()  # a version may be changing
                sequence.in_core = str(next(self._names))
        except Exception as error:  # noqa: BLE001 - the futures raise it
            self._failed(error)
            return
        self._finished.append(sequence)
        self._news.set()

    async def _collect(self) -> None:
        """Fetch the records of all sequences that finished during the last fetch."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._open.wait()
            try:
                async with self._records:
                    batch, self._finished = self._finished, []
                    for rank in range(self.core.ranks):
                        if of_rank := [s for s in batch if s.slot.rank == rank]:
                            await self._take(rank, of_rank)
            except Exception as error:  # noqa: BLE001 - the futures raise it
                self._failed(error)
                return
            self._admit()

    async def _take(self, rank: int, batch: list[_Sequence]) -> None:
        lengths = [sum(map(len, sequence.turns)) for sequence in batch]
        answers = await self.core.rpc_of(
            rank, "take_recorded", slots=[s.slot.number for s in batch], lengths=lengths
        )
        recorded = next(answer for answer in answers if answer is not None)
        rows = split_recorded(Recorded(**recorded), lengths, [s.reason for s in batch])
        for sequence, sampled in zip(batch, rows, strict=True):
            if sampled.output_tokens.tolist() != [*itertools.chain(*sequence.turns)]:
                raise RuntimeError("the recorded tokens are not the ones that vLLM returned")
            if sampled.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a sequence: {sampled.finish_reason}")
            del self._live[sequence.name]
            self._slots.give(sequence.slot)
            submission = sequence.submission
            if submission.future.done():  # failed while the record was fetched
                continue
            turns = [len(turn) for turn in sequence.turns]
            submission.sampled[sequence.index] = replace(sampled, turns=turns)
            self._ended(1)
            if len(submission.sampled) == len(submission.requests):
                ordered = [submission.sampled[i] for i in range(len(submission.requests))]
                submission.future.set_result(ordered)


def _sampling_params(request: SampleRequest, slot: int, room: int, *, offset: int) -> Any:
    from vllm import SamplingParams

    from sampler.engine.worker_extension import sampling_arguments

    # For pools that are not seeded.
    unpredictable = secrets.randbits(32) - 2**31, secrets.randbits(32) - 2**31
    return _final(
        SamplingParams(
            temperature=0.0,  # the noise is in the logits
            max_tokens=room,
            stop_token_ids=[request.end_token],
            ignore_eos=True,  # only our end token counts
            extra_args=sampling_arguments(
                slot,
                request.noise_key or unpredictable,
                request.temperature,
                offset=offset,
                top_p=request.top_p,
                top_k=request.top_k,
            ),
        )
    )


def _final(params: Any) -> Any:
    """Ask for one output of token ids, when the sequence has ended."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.detokenize = False
    params.skip_clone = True
    return params
