"""vLLM's executors, in an engine core that never outlives its front.

The class is the one piece of ours that vLLM takes into the engine core's process before anything
else happens there. A single rank runs in the core itself: vLLM would give it a process of its own
on CPUs, for the sake of OpenMP settings that ours inherits; that is twice the memory and the start.
"""

from __future__ import annotations

from sampler.engine.guard import die_with_parent, guard_from_the_start, ignore_interrupts
from sampler.engine.sockets import keep_cause

guard_from_the_start()  # a core imports this first, as its class is among its arguments

from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402


class _Guarded:
    def _init_executor(self) -> None:
        ignore_interrupts()
        die_with_parent()
        keep_cause()
        super()._init_executor()  # type: ignore[misc]


class OneRank(_Guarded, UniProcExecutor):
    """The model in the process of the engine core."""


class ManyRanks(_Guarded, MultiprocExecutor):
    """Tensor-parallel ranks in processes of their own, which end with the core's."""
