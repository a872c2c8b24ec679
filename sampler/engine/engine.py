"""Real vLLM behind two calls: load a policy version, sample a batch of requests.

The engine runs in this process (its tensor-parallel ranks, where there are several, in children).
Each load is an in-place reload followed by checks: weights read back and compared with the files,
log-probs of the learner's probe recomputed. A stale or corrupt tensor stops the worker by name.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import secrets
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.config import load_config
from runspec.common.errors import UserError
from runspec.estimate.sampler import CPU_BLOCK_TOKENS, MAX_SEQUENCES, cpu_kv_bytes
from runspec.spec.schema import SamplerPool
from sampler.engine.probe import FILE_NAME as PROBE_FILE
from sampler.engine.probe import LIMITS as PROBE_LIMITS
from sampler.engine.probe import probe_difference, read_probe
from sampler.engine.requests import GenerationAborted, LoadReport, Recorded, Sampled, SampleRequest
from verify.thresholds import precision_of

_RELOAD_REMEDY = "restart the worker; if it happens again, report it with vLLM's version"

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no second start, no IPC
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that CPUs have: one interface everywhere
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings speak of choices that are ours; loads are checked
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Sets what vLLM reads at import, and keeps it quiet; variables that are set already stay."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


class Engine:
    """A vLLM engine that samples from one policy version at a time. Not thread-safe.

    One a process: vLLM's process groups are global, and go with the first engine that is dropped.

    Args:
        pool: dtype, quantization, context length and parallelism come from here.
        options: further arguments of vLLM's `EngineArgs`.

    Raises:
        UserError: the pool is quantised and on CPUs.
    """

    def __init__(self, pool: SamplerPool, *, options: Mapping[str, Any] | None = None) -> None:
        _refuse_quantization_on_cpu(pool)
        prepare_environment()
        # Its import takes seconds, in which the first version may arrive.
        importlib.import_module("vllm.v1.engine.llm_engine")
        self._pool = pool
        self._options = dict(options or {})
        self._engine: Any = None
        self._counter = itertools.count()
        self.version: int | None = None

    def load(self, weights_dir: Path, version: int) -> LoadReport:
        """Makes a policy version the one that is sampled from, and checks that it is.

        Args:
            weights_dir: a published version (Hugging Face files, `probe.json`).
            version: its number, for messages.

        Raises:
            UserError: see `check`.
        """
        self.version = None
        if self._engine is None:
            self._engine = self._start(weights_dir)
        else:
            self._rpc("reload_weights", weights_path=str(weights_dir))
            self.repack()
            if not self._engine.reset_prefix_cache():  # it holds keys and values of old weights
                raise RuntimeError("the prefix cache is in use during a load")
        report = self.check(weights_dir, version)
        self.version = version
        return report

    def repack(self) -> None:
        """Makes the packed copies anew that vLLM's reload leaves stale."""
        self._rpc("repack_tied_head")

    def check(self, weights_dir: Path, version: int) -> LoadReport:
        """Compares what the engine holds with a version's files and probe.

        Returns:
            What the first rank compared, and the differences of all of them.

        Raises:
            UserError: a tensor differs from the files, or the probe's log-probs from the learner's.
        """
        report = _merge(self._rpc("compare_weights", weights_dir=str(weights_dir)))
        if report.different:
            raise UserError(
                f"version {version}: after the load the engine holds other bytes than the files, "
                f"or none, in {len(report.different)} tensors: {', '.join(report.different[:5])}",
                place=str(weights_dir),
                remedy=_RELOAD_REMEDY,
            )
        probe = read_probe(weights_dir)
        logprobs = self.prompt_logprobs([sequence.tokens for sequence in probe])
        difference = probe_difference(probe, logprobs)
        limit = PROBE_LIMITS[precision_of(self._pool)]
        if not difference <= limit:  # NaN is no agreement
            raise UserError(
                f"version {version}: the engine's log-probs differ from the learner's by "
                f"{difference:.2e} on average (limit {limit:.0e}); perhaps stale: "
                f"{_kinds(report.repacked) or 'nothing that could not be read back'}",
                place=str(weights_dir / PROBE_FILE),
                remedy=_RELOAD_REMEDY,
            )
        return report

    def generate(
        self, requests: Sequence[SampleRequest], *, stop: threading.Event | None = None
    ) -> list[Sampled]:
        """Samples every request, batched as vLLM sees fit; the order does not matter to the result.

        Raises:
            GenerationAborted: `stop` was set.
        """
        from vllm import SamplingParams

        from sampler.engine.seeded import sampling_arguments

        params = [
            SamplingParams(
                temperature=0.0,  # the noise is in the logits
                max_tokens=request.max_new_tokens,
                stop_token_ids=[request.end_token],
                ignore_eos=True,  # one rule for the end, ours
                extra_args=sampling_arguments(
                    slot, request.noise_key or _random_key(), request.temperature
                ),
            )
            for slot, request in enumerate(requests)
        ]
        outputs = self._run([r.prompt_tokens for r in requests], params, stop)
        results = [output.outputs[0] for output in outputs]
        lengths = [len(result.token_ids) for result in results]
        recorded = next(r for r in self._rpc("take_recorded", lengths=lengths) if r is not None)
        sampled = _sampled(recorded, lengths, [result.finish_reason for result in results])
        if any(
            ours.output_tokens.tolist() != list(theirs.token_ids)
            for ours, theirs in zip(sampled, results, strict=True)
        ):
            raise RuntimeError("the recorded tokens are not the ones that vLLM returned")
        return sampled

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs of given tokens, by prefill, at temperature 1.

        Returns:
            For each sequence f32 [n - 1]: of token i + 1 given the tokens up to i.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self._run(sequences, [params] * len(sequences), None)
        return [
            np.array(
                [
                    entry[token].logprob
                    for token, entry in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
                ],
                dtype=np.float32,
            )
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Any], stop: threading.Event | None
    ) -> list[Any]:
        """Adds the requests, steps the engine until all are finished, returns them in order."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine = self._engine
        batch = next(self._counter)
        finished: dict[int, Any] = {}
        live = []
        try:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                param.output_kind = RequestOutputKind.FINAL_ONLY
                param.detokenize = False
                live.append(
                    engine.add_request(f"{batch}-{index}", tokens_input(list(prompt)), param)
                )
            while engine.has_unfinished_requests():
                if stop is not None and stop.is_set():
                    raise GenerationAborted
                for output in engine.step():
                    if output.finished:
                        finished[int(output.request_id.split("-")[1])] = output
        except BaseException:
            engine.abort_request(live, internal=True)
            self._rpc("clear_recorded")
            raise
        return [finished[index] for index in range(len(prompts))]

    def _start(self, weights_dir: Path) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        pool = self._pool
        arguments: dict[str, Any] = {
            "model": str(weights_dir),
            "dtype": pool.dtype,
            "quantization": pool.quantization,
            "max_model_len": pool.max_model_len,
            "tensor_parallel_size": pool.parallel.tensor,
            "max_num_seqs": MAX_SEQUENCES,
            "enforce_eager": True,
            "skip_tokenizer_init": True,  # tokens in, tokens out
            "generation_config": "vllm",  # not the model's own taste in temperature and top-p
            "hf_overrides": {"head_dtype": "float32"},  # logits unrounded, as the learner's are
            "logits_processors": ["sampler.engine.seeded:SeededSampler"],
            "worker_extension_cls": "sampler.engine.worker_extension.SamplerExtension",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if pool.hardware.kind == "cpu":
            arguments["block_size"] = CPU_BLOCK_TOKENS
            arguments["kv_cache_memory_bytes"] = cpu_kv_bytes(pool, load_config(weights_dir))
        engine = LLMEngine.from_engine_args(EngineArgs(**(arguments | self._options)))
        engine.collective_rpc("start_capture")
        return engine

    def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method on every rank."""
        return self._engine.collective_rpc(method, kwargs=kwargs)


def _refuse_quantization_on_cpu(pool: SamplerPool) -> None:
    """vLLM's CPU build takes the option and dies in the first load: it has no such kernel."""
    if pool.quantization is not None and pool.hardware.kind == "cpu":
        raise UserError(
            f"vLLM does not quantise to {pool.quantization} on CPUs",
            place=f"samplers.{pool.name}.quantization",
            remedy="leave it out, or sample on a GPU",
        )


def _sampled(recorded: Recorded, lengths: list[int], reasons: list[str]) -> list[Sampled]:
    """Cuts the rows of a batch into its sequences."""
    tokens = np.frombuffer(recorded.tokens, dtype=np.int32)
    logprobs = np.frombuffer(recorded.logprobs, dtype=np.float32)
    hidden = np.frombuffer(recorded.hidden, dtype=np.uint16).reshape(len(tokens), -1)
    ends = np.cumsum(lengths)
    rows = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return [
        Sampled(tokens[row], logprobs[row], reason, hidden[row])
        for row, reason in zip(rows, reasons, strict=True)
    ]


def _kinds(names: Sequence[str]) -> str:
    """Names of tensors with those of different layers as one: `*.q_proj.weight`."""
    return ", ".join(dict.fromkeys("*." + ".".join(name.split(".")[-2:]) for name in names))


def _merge(reports: Sequence[LoadReport]) -> LoadReport:
    different = sorted({name for report in reports for name in report.different})
    return LoadReport(reports[0].compared, reports[0].repacked, different)


def _random_key() -> tuple[int, int]:
    """Words that nobody can predict, for pools that are not seeded."""
    return secrets.randbits(32) - 2**31, secrets.randbits(32) - 2**31
