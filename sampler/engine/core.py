"""vLLM's AsyncLLM and the processes that it starts: calls with deadlines, and news of their death.

Everything here runs on one event loop. The engine cores (one for each data-parallel rank) are
vLLM's child processes; a call to one that died would wait for ever, so each is raced against the
end of every core.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from sampler.engine import loop
from sampler.engine.sockets import SocketFolder, read_cause

_log = logging.getLogger(__name__)
START_S = 600.0
"""How long vLLM may take to start."""
RPC_S = 600.0
"""How long an engine core may take over one call: the longest reads all weights from disk."""
_GRACE_S, _KILL_S = 5.0, 10.0
"""How long a core with ranks below it may take to leave when asked, and any when killed."""
_CODE_S = 1.0
"""From the end of a core to its exit code."""
_POLL_S = 0.01
_KILL_EVERY_S = 0.1
"""Between two looks for what a start that is to end has started yet."""


class EngineDied(UserError):
    """An engine core ended or hangs: what was under way is lost; `Engine.load` starts a new one."""

    def __init__(
        self,
        thing: str,
        remedy: str = "see the log above; out of memory is the usual cause (`dmesg` names it)",
    ) -> None:
        super().__init__(thing, place="vLLM", remedy=remedy)


class StartFailed(EngineDied):
    """An engine core ended before it was ready; `cause` is what it said, where it did."""

    def __init__(self, cause: str, error: Exception) -> None:
        super().__init__(f"the engine does not start: {cause or error}")
        self.cause = cause


def exit_code(process: BaseProcess) -> int | None:
    """Of a child that has ended. vLLM's watch asks too, and while one thread is told by the kernel
    the other is told that there is no such child: so it is asked for again, for a second."""
    end = time.monotonic() + _CODE_S
    while (code := process.exitcode) is None and time.monotonic() < end:
        time.sleep(_POLL_S)
    return code


class Start:
    """While vLLM starts it holds the event loop; what hangs there ends with the processes that it
    started, which this kills after a while, or when told to. A context manager around the start."""

    def __init__(self, seconds: float = START_S) -> None:
        self._before = set(multiprocessing.active_children())
        self._told, self._over = threading.Event(), threading.Event()
        self._watchdog = threading.Thread(target=self._watch, args=(seconds,), daemon=True)

    def kill(self) -> None:
        """What has been started, and what is started yet."""
        self._told.set()

    def _watch(self, seconds: float) -> None:
        self._told.wait(seconds)
        while not self._over.is_set():
            for process in set(multiprocessing.active_children()) - self._before:
                process.kill()
            self._over.wait(_KILL_EVERY_S)  # a process is a child a moment after it is started

    def __enter__(self) -> Start:
        self._watchdog.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._told.set()
        self._watchdog.join()


class Core:
    """A started AsyncLLM.

    Args:
        arguments: of `AsyncEngineArgs`.
        died: called on the loop, once, when a core ends that was not closed.

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
            cause = read_cause(self._sockets.path)
            self._sockets.remove()
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise StartFailed(cause, error) from error
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
        """Data-parallel."""
        self._watch = loop.Watch(self._ask)
        self._sentinels = [process.sentinel for process in self._processes]
        for sentinel, process in zip(self._sentinels, self._processes, strict=True):
            self._loop.add_reader(sentinel, self._ended, process)

    @property
    def pids(self) -> list[int]:
        """Of the engine cores, one for each data-parallel rank."""
        return [process.pid for process in self._processes]

    async def add(self, name: str, prompt: Any, params: Any, rank: int) -> Any:
        """Hands vLLM a request.

        Returns:
            Its collector; `get` waits for the one output.
        """
        return await self._race(
            self._llm.add_request(name, prompt, params, data_parallel_rank=rank), "a request"
        )

    async def output(self, collector: Any) -> Any:
        """The finished output of a request, however long it takes a core that lives."""
        with self._watch:
            return await self._race(collector.get(), "an output", seconds=None)

    async def abort(self, names: Sequence[str]) -> None:
        await self._race(self._llm.abort(list(names)), "the abort of requests")

    async def pause(self) -> None:
        """Stops between two steps; sequences keep their place, their tokens and their cache."""
        pausing = self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._race(pausing, "a pause")

    async def resume(self) -> None:
        await self._race(self._llm.resume_generation(), "the end of a pause")

    async def reset_prefix_cache(self) -> None:
        """Frees the blocks of keys and values that finished sequences left."""
        await self._race(self._llm.reset_prefix_cache(), "the prefix cache")

    async def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method on every worker of every rank; one answer from each."""
        answers = await asyncio.gather(
            *(self.rpc_of(r, method, **kwargs) for r in range(self.ranks))
        )
        return [answer for of_rank in answers for answer in of_rank]

    async def rpc_of(self, rank: int, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method on the workers of one data-parallel rank."""
        # vLLM's own `collective_rpc` drops the answers of every rank but the first.
        call = self._client._call_utility_async(
            "collective_rpc", method, None, (), kwargs, engine=self._client.core_engines[rank]
        )
        return list(await self._race(call, f"`{method}`"))

    async def _ask(self) -> None:
        """Asks each core for a sign of life, which it gives between two steps."""
        for engine, pid in zip(self._client.core_engines, self.pids, strict=True):
            call = self._client._call_utility_async("is_scheduler_paused", engine=engine)
            with suppress(EngineDied):  # whoever waits for an output hears it
                what = f"a sign of life of process {pid}, while outputs are awaited"
                await self._race(call, what, seconds=loop.SILENCE_S)

    def close(self) -> None:
        """Ends the cores and waits for them; they have nothing to save."""
        self._forget_sentinels()
        if not self.death.done():  # a call that is under way hears no more of it
            self.death.set_result(EngineDied("the engine was closed"))
        if (handler := self._llm.output_handler) is not None:
            handler.cancel()
        if self._has_ranks:  # these share memory, which a core gives back when it is asked
            for process in self._processes:
                process.terminate()
            self._join(_GRACE_S)
        self._kill()
        self._llm.shutdown(timeout=_KILL_S)
        # Where vLLM's own watch noticed the end first, it has put this off to the loop, which is
        # busy here; and a context with open sockets never closes.
        resources = self._client.resources
        for socket in (resources.input_socket, resources.output_socket, *_data_parallel(resources)):
            if socket is not None and not socket.closed:
                socket.close(linger=0)
        # A socket that nobody here knows of would keep it waiting for ever, and the engine with it.
        ending = threading.Thread(target=resources.ctx.destroy, args=(0,), daemon=True)
        ending.start()
        ending.join(_KILL_S)
        if ending.is_alive():
            _log.warning("a ZeroMQ context of the engine core does not end; it is left behind")
        self._sockets.remove()

    def _kill(self) -> None:
        """Ends the cores at once; ranks in processes of their own end with theirs."""
        for process in self._processes:
            process.kill()
        self._join(_KILL_S)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

    async def _race(
        self, call: Coroutine[Any, Any, Any], what: str, seconds: float | None = RPC_S
    ) -> Any:
        """Awaits a call, as long as the cores live and the time is not up.

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
            # vLLM noticed first; the exit code follows, where the process has ended at all.
            await asyncio.wait({self.death}, timeout=_CODE_S)
            self._give_up(EngineDied("vLLM has given the engine core up"))
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
        """Ends cores that no call reaches any more, unless they have ended."""
        if not self.death.done():
            self._kill()  # they have nothing to save
            self._end(error)

    def _ended(self, process: Any) -> None:
        code = exit_code(process)
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self._end(EngineDied(f"the engine core ended ({how})"))

    def _end(self, error: EngineDied) -> None:
        self._forget_sentinels()
        if not self.death.done():
            self.death.set_result(error)
            self._died(error)

    def _forget_sentinels(self) -> None:
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
        self._sentinels = []


def _data_parallel(resources: Any) -> tuple[Any, ...]:
    """Sockets that vLLM opens to several engine cores."""
    return (
        resources.first_req_send_socket,
        resources.first_req_rcv_socket,
        resources.stats_update_socket,
    )
