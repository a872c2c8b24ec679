"""Code that vLLM runs in its processes: executors, and methods mixed into its workers.

A single rank runs in the process of the engine core. On CPUs vLLM would give it a process of its
own because of OpenMP settings, which our process inherits. That would take twice the memory and
twice the time to start.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.utils import system_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sampler.engine.loaded_weights import compare_weights, patch_weights
from sampler.engine.processes import SPAWNED, record_exit_reason
from sampler.engine.recorder import TokenRecorder
from sampler.engine.requests import LoadReport, Recorded
from sampler.engine.seeded import SeededSampler

RANKS = SPAWNED
"""How tensor-parallel ranks start."""


class _InCore:
    def _init_executor(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the worker
        record_exit_reason()
        super()._init_executor()  # type: ignore[misc]


class OneRank(_InCore, UniProcExecutor):
    """The model in the process of the engine core."""


class ManyRanks(_InCore, MultiprocExecutor):
    """Tensor-parallel ranks in processes of their own, which end with the engine core."""

    def _init_executor(self) -> None:
        system_utils.multiprocessing = RANKS
        super()._init_executor()


class SamplerExtension:
    """The `worker_extension_cls`: called through `collective_rpc`; `self` is the vLLM worker."""

    model_runner: Any
    device: torch.device
    recorder_kind: type[TokenRecorder] = TokenRecorder

    def start_capture(self, slots: int, max_new_tokens: int) -> None:
        """Allocate the records, and give the sampler the states behind each step's logits.

        Args:
            slots: sequences at once; a request's `slot` is below it.
            max_new_tokens: output tokens of a sequence, at most.
        """
        if self.device.type == "cpu" and self.model_runner.model_config.enforce_eager:
            # vLLM compiles small helpers even in eager mode; a CPU may have no compiler at hand.
            torch.compiler.set_stance("force_eager")
        processor, model = self._processor(), self._model()
        if not processor.records:
            return
        hidden_size = self.model_runner.model_config.get_hidden_size()
        processor.recorder = self.recorder_kind(slots, max_new_tokens, hidden_size, self.device)

        def see(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            processor.see_hidden(args[1])  # forward(lm_head, hidden_states)

        model.logits_processor.register_forward_pre_hook(see)

    def take_recorded(self, slots: Sequence[int], lengths: Sequence[int]) -> Recorded | None:
        """See `TokenRecorder.take`; None on ranks without a recorder."""
        recorder = self._processor().recorder
        return None if recorder is None else recorder.take(slots, lengths)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the records of sequences that were aborted; their slots are free."""
        recorder = self._processor().recorder
        if recorder is not None:
            recorder.forget(slots)

    def set_version(self, version: int) -> None:
        """Set the policy version of the tokens that are sampled from now on."""
        recorder = self._processor().recorder
        if recorder is not None:
            recorder.version = version

    def repack_tied_head(self) -> None:
        """Rebuild the head's packed copy if it shares the embedding's tensor.

        vLLM's reload copies the embedding into place and never processes the head, which the
        checkpoint does not hold; on CPUs the head multiplies by a packed copy made at load.
        """
        model = self._model()
        if model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def patch_weights(self, base_dir: str, weights_dir: str) -> bool:
        """Overwrite what changed from the loaded version to another; see `loaded_weights`."""

        def reload(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.model_runner.reload_weights(weights_iterator=tensors)

        return patch_weights(self._model(), Path(base_dir), Path(weights_dir), reload=reload)

    def compare_weights(self, weights_dir: str) -> LoadReport:
        """Read the weights back and compare them with the files; see `loaded_weights`."""
        return compare_weights(self._model(), Path(weights_dir))

    def _model(self) -> Any:
        return self.model_runner.get_model()

    def _processor(self) -> SeededSampler:
        found = [
            processor
            for processor in self.model_runner.input_batch.logitsprocs.all
            if isinstance(processor, SeededSampler)
        ]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} seeded samplers in the engine instead of one")
        return found[0]
