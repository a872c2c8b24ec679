"""vLLM's executors, which run in the process of an engine core.

A single rank runs there too: on CPUs vLLM would give it a process of its own, for the sake of
OpenMP settings that ours inherits; that is twice the memory and the start.
"""

from __future__ import annotations

import signal

from vllm.utils import system_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sampler.engine.guard import SPAWNED
from sampler.engine.sockets import keep_cause

RANKS = SPAWNED
"""How ranks start."""


class _InCore:
    def _init_executor(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front hears it
        keep_cause()
        super()._init_executor()  # type: ignore[misc]


class OneRank(_InCore, UniProcExecutor):
    """The model in the process of the engine core."""


class ManyRanks(_InCore, MultiprocExecutor):
    """Tensor-parallel ranks in processes of their own, which end with the core's."""

    def _init_executor(self) -> None:
        system_utils.multiprocessing = RANKS
        super()._init_executor()
