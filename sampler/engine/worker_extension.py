"""Code that vLLM runs in its processes: sampling, executors, and methods mixed into its workers.

Sampling is Gumbel-max through vLLM's public interface for logits processors. The arithmetic is in
`sampling`: the token that wins is a public function of the logits and the request's key.
Requests run at vLLM's temperature 0, without its own top-k and top-p, so that its greedy argmax
picks the token, and carry slot, key, T, top-p and top-k in `extra_args`. Log-probs are taken here
because vLLM's own are at T = 1, or after the noise, as its mode says.

Nothing here is inside a CUDA graph. vLLM (0.32, `v1/worker/gpu_model_runner.py`) captures the
model's `forward` alone: it wraps the model in `CUDAGraphWrapper`, whose other attributes are the
plain model's. `execute_model` then gathers the rows that are sampled, `compute_logits` (where
`see_hidden` is called) and the logits processors run on the same stream, kernel by kernel. So that
the device never waits for the host, no tensor of the step is read on the host, all copies are
asynchronous, and the arithmetic is one compiled kernel. No tensor of a step is used after it
(`TokenRecorder` copies).

A single rank runs in the process of the engine core. On CPUs vLLM would give it a process of its
own because of OpenMP settings, which our process inherits. That would take twice the memory and
twice the time to start.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.utils import system_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from sampler.engine.loaded_weights import compare_weights, patch_weights
from sampler.engine.processes import SPAWNED, record_exit_reason
from sampler.engine.requests import LoadReport, Recorded
from sampler.engine.sampling import GumbelSampler, Rules, TokenRecorder, on_device

_EVERYTHING = int(np.iinfo(np.int32).max)


def sampling_arguments(
    slot: int,
    noise_key: tuple[int, int],
    temperature: float,
    *,
    top_p: float = 1.0,
    top_k: int = -1,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the `SamplingParams.extra_args` of a request that this processor samples.

    Args:
        slot: the recorder's slot for the request; no other running request has it.
        noise_key: result of `verify.noise.noise_key`.
        temperature: T > 0.
        top_p, top_k: as in `verify.truncation.Truncation`.
        offset: tokens that the model sampled in earlier turns of the slot's sequence. Noise and
            record go on after them.
    """
    return {
        "slot": slot,
        "noise_key": list(noise_key),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k if top_k > 0 else _EVERYTHING,
        "offset": offset,
    }


@dataclass(frozen=True)
class _Request:
    slot: int
    noise_key: list[int]
    temperature: float
    top_p: float
    top_k: int
    """`_EVERYTHING` keeps every token."""
    offset: int
    output_tokens: list[int]
    """vLLM's own list: it grows as tokens are sampled."""


@dataclass(frozen=True)
class _Rows:
    """The requests of the batch as arrays, in the order of their rows; B rows."""

    batch: int
    """Number of rows of the logits. Rows of other requests change without `update_state`."""
    index: torch.Tensor | None
    """i64 [B]: rows of the logits that belong to these requests; None if all do."""
    slots: np.ndarray
    """i64 [B]."""
    rules: Rules
    offsets: np.ndarray
    """i64 [B]."""
    outputs: list[list[int]]


class SeededSampler(LogitsProcessor):
    """Adds the noise, and records the log-prob and hidden state of the token that wins."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, _Request] = {}
        self._rows: _Rows | None = None
        self._hidden: torch.Tensor | None = None
        self._sampler = GumbelSampler(device)
        # Every tensor-parallel rank samples the same tokens; one of them records them.
        self.records = vllm_config.parallel_config.rank == 0
        self.recorder: TokenRecorder | None = None
        """Set by `SamplerExtension.start_capture`, on the rank that records."""

    def is_argmax_invariant(self) -> bool:
        return False

    def see_hidden(self, hidden: torch.Tensor) -> None:
        """Store the final hidden states [R, D] from which the next logits [R, V] are computed."""
        self._hidden = hidden

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._requests, batch_update, _request):
            self._rows = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [R, V] f32 into noisy ones whose argmax is the sampled token."""
        if not self._requests:
            return logits
        rows = self._rows
        if rows is None or rows.batch != len(logits):
            rows = self._rows = self._arrange(len(logits))
        positions = rows.offsets + [len(output) for output in rows.outputs]
        ours = logits if rows.index is None else logits[rows.index]
        at = on_device(positions.astype(np.int32), self._device)[:, None]
        tokens, logprobs = self._sampler.run(ours, rows.rules, at)
        if rows.index is not None:
            logits[rows.index] = ours
        if self.recorder is not None:
            hidden = self._hidden
            if hidden is None or len(hidden) != len(logits):
                raise RuntimeError("hidden states and logits of this step do not match")
            if rows.index is not None:
                hidden = hidden[rows.index]
            self.recorder.record(rows.slots, positions, tokens, logprobs, hidden)
        return logits

    def _arrange(self, batch: int) -> _Rows:
        indices = sorted(self._requests)
        requests = [self._requests[i] for i in indices]
        words = [(r.slot, *r.noise_key, r.top_k, r.offset) for r in requests]
        slots, key_0, key_1, top_k, offsets = np.array(words, np.int64).T
        temperature, top_p = np.array([(r.temperature, r.top_p) for r in requests], np.float32).T

        def column(values: np.ndarray, dtype: Any) -> torch.Tensor:
            return on_device(values.astype(dtype), self._device)[:, None]

        return _Rows(
            batch=batch,
            index=None if len(indices) == batch else on_device(np.array(indices), self._device),
            slots=slots,
            rules=Rules(
                key_0=column(key_0, np.int32),
                key_1=column(key_1, np.int32),
                temperature=column(temperature, np.float32) if (temperature != 1.0).any() else None,
                top_p=column(top_p, np.float32) if (top_p < 1.0).any() else None,
                top_k=column(top_k, np.int32) if (top_k < _EVERYTHING).any() else None,
            ),
            offsets=offsets,
            outputs=[r.output_tokens for r in requests],
        )


def _request(
    params: SamplingParams, prompt_tokens: list[int] | None, output_tokens: list[int]
) -> _Request | None:
    extra = params.extra_args
    if not extra or "noise_key" not in extra:
        return None
    return _Request(**extra, output_tokens=output_tokens)


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
        processor, model = self._processor(), self.model_runner.get_model()
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
        if (recorder := self._processor().recorder) is not None:
            recorder.forget(slots)

    def set_version(self, version: int) -> None:
        """Set the policy version of the tokens that are sampled from now on."""
        if (recorder := self._processor().recorder) is not None:
            recorder.version = version

    def repack_tied_head(self) -> None:
        """Rebuild the head's packed copy if it shares the embedding's tensor.

        vLLM's reload copies the embedding into place and never processes the head, which the
        checkpoint does not hold; on CPUs the head multiplies by a packed copy made at load.
        """
        model = self.model_runner.get_model()
        if model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    def patch_weights(self, base_dir: str, weights_dir: str) -> LoadReport | None:
        """Go from the loaded version to another, and compare; see `loaded_weights`."""

        def reload(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.model_runner.reload_weights(weights_iterator=tensors)

        return patch_weights(
            self.model_runner.get_model(), Path(base_dir), Path(weights_dir), reload=reload
        )

    def compare_weights(self, weights_dir: str) -> LoadReport:
        """Read the weights back and compare them with the files; see `loaded_weights`."""
        return compare_weights(self.model_runner.get_model(), Path(weights_dir))

    def _processor(self) -> SeededSampler:
        processors = self.model_runner.input_batch.logitsprocs.all
        found = [each for each in processors if isinstance(each, SeededSampler)]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} seeded samplers in the engine instead of one")
        return found[0]
