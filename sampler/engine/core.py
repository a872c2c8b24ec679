"""vLLM's AsyncLLM and the processes that it starts: calls with deadlines, and news of their death.

Everything here runs on one event loop. The engine cores (one for each data-parallel rank) are
vLLM's child processes; a call to one that died would wait for ever, so each is raced against the
end of every core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from runspec.common.errors import UserError
from sampler.engine.sockets import SocketFolder

START_S = 600.0
"""How long vLLM may take to start."""
RPC_S = 600.0
"""How long an engine core may take over one call: the longest reads all weights from disk."""
_GRACE_S, _KILL_S = 5.0, 10.0
"""How long a core with ranks below it may take to leave when asked, and any when killed."""
_CODE_S = 1.0
"""From the end of a core to its exit code."""


class EngineDied(UserError):
    """An engine core ended or hangs: what was under way is lost; `Engine.load` starts a new one."""

    def __init__(self, thing: str) -> None:
        super().__init__(
            thing,
            place="vLLM",
            remedy="see the log above; out of memory is the usual cause (`dmesg` names it)",
        )


class Start:
    """While vLLM starts it holds the event loop; what hangs there ends with the processes that it
    started, which this kills after a while, or when told to. A context manager around the start."""

    def __init__(self, seconds: float = START_S) -> None:
        self._before = set(multiprocessing.active_children())
        self._watchdog = threading.Timer(seconds, self.kill)
        self._watchdog.daemon = True

    def kill(self) -> None:
        for process in set(multiprocessing.active_children()) - self._before:
            process.kill()

    def __enter__(self) -> Start:
        self._watchdog.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._watchdog.cancel()


class Core:
    """A started AsyncLLM.

    Args:
        arguments: of `AsyncEngineArgs`.
        died: called on the loop, once, when a core ends that was not closed.

    Raises:
        EngineDied: it does not start.
        UserError: vLLM does not take the arguments.
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
            self._sockets.remove()
            if isinstance(error, (RuntimeError, TimeoutError)):  # the cause is in the log
                raise EngineDied(f"the engine does not start: {error}") from error
            if isinstance(error, ValueError):
                raise UserError(
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
        """The finished output of a request, however long it takes."""
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

    def close(self) -> None:
        """Ends the cores and waits for them; they have nothing to save."""
        self._forget_sentinels()
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
        resources.ctx.destroy(linger=0)
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
            raise self._dead()
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait(
                {task, self.death}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
        except EngineDeadError:
            raise self._dead() from None
        finally:
            task.cancel()
        if not self.death.done():
            self._kill()  # it has nothing to save
            self._end(EngineDied(f"the engine core did not answer within {seconds:.0f} s: {what}"))
        raise self._dead()

    def _ended(self, process: Any) -> None:
        process.join(_CODE_S)
        code = process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
        self._end(EngineDied(f"the engine core ended ({how})"))

    def _end(self, error: EngineDied) -> None:
        self._forget_sentinels()
        if not self.death.done():
            self.death.set_result(error)
            self._died(error)

    def _dead(self) -> EngineDied:
        return self.death.result() if self.death.done() else EngineDied("the engine core ended")

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
