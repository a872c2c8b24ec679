"""vLLM's AsyncLLM and its processes: calls with deadlines, a watchdog, and the death of a core.

All but `Loop` runs on one event loop. The engine cores (one for each data-parallel rank) are vLLM's
child processes. A call to a dead core would never return, so each call also waits for the end of
every core. An output has no deadline, because a sequence may take long. While outputs are awaited,
the watchdog calls each core at intervals. A core that does not answer (its kernel never ends, its
process is stopped) is killed.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from sampler.engine.processes import SocketFolder, read_exit_reason

T = TypeVar("T")
_log = logging.getLogger(__name__)
START_S = 600.0
"""Seconds that vLLM may take to start."""
RPC_S = 600.0
"""Seconds that one call to an engine core may take: the longest reads all weights from disk."""
ASK_S = 10.0
"""Seconds between two checks of the watchdog. Each costs a message to the core and a reply."""
SILENCE_S = 600.0
"""Seconds in which a core must answer the watchdog. It answers between two steps and after the
current call, so a step or a call that takes longer counts as a hang."""
_GRACE_S, _KILL_S = 5.0, 10.0
"""Seconds for a core with ranks of its own to end when asked, and for any core when killed."""
_CODE_S = 1.0
"""Seconds from the end of a core to its exit code."""
_POLL_S = 0.01
_KILL_EVERY_S = 0.1
"""Seconds between two searches for processes of a start that has to end."""
_MAY_PASS = ("memory", "cuda error", "nccl", "errno")
"""Words of exit reasons that depend on the machine's state: another start may succeed."""


class EngineDied(UserError):
    """An engine core ended or hangs. Its sequences are lost; `Engine.load` starts a new one.

    Args:
        thing: what happened.
        remedy: if there is no exit reason.
        exit_reason: the exception that the core recorded, or empty.
    """

    def __init__(
        self,
        thing: str,
        remedy: str = "see the log above; out of memory is the usual cause (`dmesg` names it)",
        exit_reason: str = "",
    ) -> None:
        if exit_reason:
            thing, remedy = f"{thing}: {exit_reason}", "change what it names; see the log above"
        super().__init__(thing, place="vLLM", remedy=remedy)
        self.exit_reason = exit_reason


class StartFailed(EngineDied):
    """An engine core ended before it was ready."""

    def __init__(self, exit_reason: str, error: Exception) -> None:
        thing = "the engine does not start"
        super().__init__(thing if exit_reason else f"{thing}: {error}", exit_reason=exit_reason)


@contextmanager
def same_death_is_final(before: EngineDied | None) -> Iterator[None]:
    """Turn a death inside that has the exit reason of the death before into RunStopped.

    A fault of the model or the settings comes back at each start, so restarts of the role do not
    help. Faults that may pass are left alone: too little memory, a device, a disk or a network.
    """
    try:
        yield
    except EngineDied as error:
        reason = error.exit_reason
        passes = any(word in reason.lower() for word in _MAY_PASS)
        if before is None or not reason or reason != before.exit_reason or passes:
            raise
        raise RunStopped(
            f"twice in a row: {error.thing}", place=error.place, remedy=error.remedy
        ) from error


def exit_code(process: BaseProcess) -> int | None:
    """Return the exit code of a child that has ended; waits up to a second for it.

    vLLM's monitor thread waits for the child too. While one thread collects the exit code, the
    other one gets the error that there is no such child.
    """
    end = time.monotonic() + _CODE_S
    while (code := process.exitcode) is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    return code


@contextmanager
def starting(seconds: float = START_S) -> Iterator[threading.Event]:
    """Wrap vLLM's start: kill what it starts after some seconds, or once the event is set.

    vLLM blocks the event loop while it starts. If it hangs, killing the processes that it started
    makes it return.
    """
    before = set(multiprocessing.active_children())
    told, over = threading.Event(), threading.Event()

    def watch() -> None:
        told.wait(seconds)
        while not over.is_set():
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            over.wait(_KILL_EVERY_S)  # a process becomes a child a moment after its start

    watchdog = threading.Thread(target=watch, daemon=True)
    watchdog.start()
    try:
        yield told
    finally:
        over.set()
        told.set()
        watchdog.join()


class Loop:
    """An event loop on a thread of its own, for callers on other threads that block."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine, which has its own deadlines, and wait for its result.

        Raises:
            TimeoutError: it does not end in time, for example because another one blocks the loop.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def soon(self, action: Callable[[], object]) -> None:
        """Call a function on the loop, after what was submitted before."""
        self._loop.call_soon_threadsafe(action)

    def close(self, timeout_s: float) -> None:
        """Cancel all tasks, wait for them and end the loop.

        Raises:
            TimeoutError: that takes too long.
        """

        async def settle() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(settle(), timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EngineProcesses:
    """A started AsyncLLM.

    Args:
        arguments: of `AsyncEngineArgs`.
        died: called on the loop, once, if a core ends before `close`.

    Raises:
        StartFailed: it does not start.
        RunStopped: vLLM does not take the arguments.
    """

    def __init__(self, arguments: Mapping[str, Any], died: Callable[[EngineDied], None]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.get_running_loop()
        self._died, self._has_ranks = died, arguments["tensor_parallel_size"] > 1
        self.death: asyncio.Future[EngineDied] = self._loop.create_future()
        """Resolved when a core has ended."""
        self._sockets = SocketFolder()
        try:
            with self._sockets.in_use():
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except BaseException as error:
            exit_reason = read_exit_reason(self._sockets.path)
            self._sockets.remove()
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise StartFailed(exit_reason, error) from error
            if isinstance(error, ValueError):
                raise RunStopped(
                    f"vLLM refuses the model or the pool's settings: {error}",
                    place=str(arguments["model"]),
                    remedy="change what it names",
                ) from error
            raise
        client = self._llm.engine_core
        self._client = client
        self._processes = list(client.resources.engine_manager.processes)
        self.ranks = len(self._processes)
        """Number of data-parallel ranks."""
        self._waiting = 0  # for outputs
        self._watchdog: asyncio.Task[None] | None = None
        self._sentinels = [process.sentinel for process in self._processes]
        for sentinel, process in zip(self._sentinels, self._processes, strict=True):
            self._loop.add_reader(sentinel, self._ended, process)

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine cores, one for each data-parallel rank."""
        return [process.pid for process in self._processes]

    async def generate(
        self, name: str, tokens: Sequence[int], salt: str, params: Any, rank: int
    ) -> Any:
        """Give vLLM a request and return its finished output; waits as long as the cores live.

        Args:
            name: of the request.
            tokens: the prompt.
            salt: cached keys and values are reused only if they were computed under it.
            params: vLLM's SamplingParams.
            rank: data-parallel rank.
        """
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(tokens), cache_salt=salt)
        collector = await self._call(
            self._llm.add_request(name, prompt, params, data_parallel_rank=rank), "a request"
        )
        self._waiting += 1
        if self._watchdog is None:
            self._watchdog = asyncio.ensure_future(self._watch())
        try:
            return await self._call(collector.get(), "an output", seconds=None)
        finally:
            self._waiting -= 1
            if not self._waiting and self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None

    async def abort(self, names: Sequence[str]) -> None:
        await self._call(self._llm.abort(list(names)), "the abort of requests")

    async def pause(self) -> None:
        """Pause between two steps; sequences keep their slots, their tokens and their cache."""
        pausing = self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._call(pausing, "a pause")

    async def resume(self) -> None:
        await self._call(self._llm.resume_generation(), "the end of a pause")

    async def reset_prefix_cache(self) -> None:
        """Free the blocks of keys and values that finished sequences left."""
        await self._call(self._llm.reset_prefix_cache(), "the prefix cache")

    async def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method on every worker of every rank; return one answer from each."""
        answers = await asyncio.gather(
            *(self.rpc_of(r, method, **kwargs) for r in range(self.ranks))
        )
        return [answer for of_rank in answers for answer in of_rank]

    async def rpc_of(self, rank: int, method: str, **kwargs: Any) -> list[Any]:
        """Call a method on the workers of one data-parallel rank; return one answer from each."""
        # vLLM's own `collective_rpc` drops the answers of every rank but the first.
        call = self._client._call_utility_async(  # noqa: SLF001 - public ones name no rank
            "collective_rpc", method, None, (), kwargs, engine=self._client.core_engines[rank]
        )
        return list(await self._call(call, f"`{method}`"))

    async def _watch(self) -> None:
        """Call each core at intervals, until it is cancelled."""
        while True:
            await asyncio.sleep(ASK_S)
            await self._ask()

    async def _ask(self) -> None:
        """Call each core, which answers between two steps."""
        for engine, pid in zip(self._client.core_engines, self.pids, strict=True):
            ask = self._client._call_utility_async  # noqa: SLF001 - public ones name no rank
            call = ask("is_scheduler_paused", engine=engine)
            with suppress(EngineDied):  # raised by the calls that wait for an output
                what = f"a sign of life of process {pid}, while outputs are awaited"
                await self._call(call, what, seconds=SILENCE_S)

    def close(self) -> None:
        """End the cores and wait for them. They have nothing to save."""
        self._forget_sentinels()
        if not self.death.done():  # calls under way fail
            self.death.set_result(EngineDied("the engine was closed"))
        if (handler := self._llm.output_handler) is not None:
            handler.cancel()
        if self._has_ranks:  # they share memory, which a core releases if it is asked to end
            for process in self._processes:
                process.terminate()
            self._join(_GRACE_S)
        self._kill()
        self._llm.shutdown(timeout=_KILL_S)
        # If vLLM's own monitor noticed the end first, it scheduled this on the loop, which is
        # busy here. A context with open sockets never closes.
        resources = self._client.resources
        for socket in (
            resources.input_socket,
            resources.output_socket,
            # Opened to several engine cores:
            resources.first_req_send_socket,
            resources.first_req_rcv_socket,
            resources.stats_update_socket,
        ):
            if socket is not None and not socket.closed:
                socket.close(linger=0)
        # An open socket that is not listed here would block this for ever.
        ending = threading.Thread(target=resources.ctx.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(_KILL_S)
        if ending.is_alive():
            _log.warning("a ZeroMQ context of the engine core does not end; it is left behind")
        self._sockets.remove()

    def _kill(self) -> None:
        """Kill the cores. Ranks in processes of their own end with their core."""
        for process in self._processes:
            process.kill()
        self._join(_KILL_S)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    async def _call(
        self, call: Coroutine[Any, Any, Any], what: str, seconds: float | None = RPC_S
    ) -> Any:
        """Await a call as long as the cores live and the time is not up.

        Raises:
            EngineDied: one has ended, or does not answer.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.death.done():
            call.close()
            raise self.death.result()
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait(
                {task, self.death}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
        except EngineDeadError:
            # vLLM noticed first. The exit code follows if the process has ended.
            await asyncio.wait({self.death}, timeout=_CODE_S)
            reason = read_exit_reason(self._sockets.path)
            self._give_up(EngineDied("vLLM has given the engine core up", exit_reason=reason))
        finally:
            task.cancel()
        if seconds is not None:
            self._give_up(
                EngineDied(
                    f"the engine core did not answer within {seconds:g} s: {what}",
                    "see the log above, and `dmesg` for what its device says",
                )
            )
        raise self.death.result()

    def _give_up(self, error: EngineDied) -> None:
        """Kill cores that no call reaches any more, unless they have ended."""
        if not self.death.done():
            self._kill()  # they have nothing to save
            self._end(error)

    def _ended(self, process: Any) -> None:
        code = exit_code(process)
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        # A core that was killed may have recorded a fault that it outlived.
        reason = "" if code is None or code < 0 else read_exit_reason(self._sockets.path)
        self._end(EngineDied(f"the engine core ended ({how})", exit_reason=reason))

    def _end(self, error: EngineDied) -> None:
        self._forget_sentinels()
        if not self.death.done():
            self.death.set_result(error)
            self._died(error)

    def _forget_sentinels(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._sentinels = []
