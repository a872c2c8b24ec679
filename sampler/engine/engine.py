"""Engine around vLLM: loads policy versions, samples submitted requests, returns the results.

vLLM runs in processes of its own (`engine_process`), and sequences start and end while others run
(`engine_client`), both on one event loop. The calls here block or return futures. Each load is
followed by checks: weights are read back and compared with the files, and the log-probs of the
learner's probe are recomputed. A stale or corrupt tensor stops the worker with an error that names
it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runspec.core.errors import UserError
from runspec.core.models.parameters import MAX_SEQUENCES
from runspec.core.schema import SamplerPool
from sampler.engine import arguments
from sampler.engine.engine_client import EngineClient, Submission
from sampler.engine.engine_process import (
    EngineDied,
    EngineProcesses,
    Loop,
    StartFailed,
    same_death_is_final,
    starting,
)
from sampler.engine.processes import FORKED, SPAWNED, serve
from sampler.engine.requests import (
    PROBE_FILE,
    GenerationAborted,
    LoadReport,
    NoVersion,
    Sampled,
    SampleRequest,
    merge,
    read_probe,
    require_same_bytes,
    require_same_logprobs,
)
from verify.thresholds import precision_of

__all__ = ["Engine", "EngineDied", "same_death_is_final"]

CLOSE_S = 60.0
"""Seconds that `close` may take."""


class Engine:
    """A vLLM engine that samples from the policy version loaded last. Thread-safe.

    Args:
        pool: dtype, quantization, context length, hardware and parallelism come from here, and
            whether a version may change under sequences in flight.
        options: further arguments of vLLM's `EngineArgs`.
        probe: whether a version must have a `probe.json`.

    Raises:
        UserError: vLLM does not support a setting of the pool on its hardware.
    """

    def __init__(
        self, pool: SamplerPool, *, options: Mapping[str, Any] | None = None, probe: bool = True
    ) -> None:
        if pool.hardware.kind == "cpu" and pool.quantization is not None:
            # vLLM's CPU build accepts the option and ends in the first load: it has no such kernel.
            raise UserError(
                f"vLLM does not quantise to {pool.quantization} on CPUs",
                place=f"samplers.{pool.name}.quantization",
                remedy="leave it out, or sample on a GPU",
            )
        arguments.prepare_environment()
        start = SPAWNED
        if pool.hardware.kind == "cpu":
            serve()
            start = FORKED
        self._pool, self._options, self._probe = pool, dict(options or {}), probe
        self._loop = Loop(f"engine of {pool.name}")
        self._client: EngineClient | None = None
        self._starting: threading.Event | None = None
        self._closing = False
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._loads = 0
        self._held: Path | None = None  # the files of what is loaded and checked
        self._paused_at: float | None = None
        self._paused_s: float | None = None
        self._death: EngineDied | None = None  # of the engine before the next load
        self.version: int | None = None
        """The version that is loaded and checked; None if there is none or the engine died."""
        self.running = 0
        """Sequences submitted and not finished."""
        # vLLM's import takes seconds, and the first version may arrive meanwhile.
        self._loop.run(_import(start))

    @property
    def capacity(self) -> int:
        """Number of sequences that vLLM decodes at once. More in flight only wait."""
        return MAX_SEQUENCES * self._pool.parallel.data

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine cores, one for each data-parallel rank; empty without vLLM."""
        return [] if self._client is None else self._client.core.pids

    def load(self, weights_dir: Path, version: int) -> LoadReport:
        """Switch sampling to a policy version and check it.

        Starts vLLM if it does not run. If the pool has `in_flight_updates`, sequences under way
        continue under the new version after a pause. None of them is answered before the checks
        pass. If the checks fail, each of them raises the same error.

        Args:
            weights_dir: a published version (Hugging Face files, `probe.json`).
            version: its number.

        Raises:
            UserError: see `check`; nothing can be submitted until another load succeeds.
            EngineDied: vLLM ended, or does not start.
            RuntimeError: sequences are under way, and the pool allows one version for a rollout.
        """
        with self._loading:
            with self._counting:
                if self.running and not self._pool.in_flight_updates:
                    raise RuntimeError(f"{self.running} sequences are under way during a load")
                self.version = self._death = None
            begun, self._paused_s = time.monotonic(), None
            held, self._held = self._held, None
            try:
                patched = self._loop.run(self._replace(held, weights_dir, version))
                report = self.check(weights_dir, version, patched)
                self._loop.run(self._open(weights_dir, version))
            except Exception as error:
                self._loop.run(self._give_up(error))
                raise
            seconds = time.monotonic() - begun
            paused = seconds if self._paused_s is None else self._paused_s
            return replace(report, load_s=seconds, pause_s=paused, patched=patched is not None)

    def submit(self, requests: Sequence[SampleRequest]) -> Future[list[Sampled]]:
        """Sample every request, together with everything else under way.

        The result does not depend on which sequences share a batch.

        Returns:
            Future of the sequences, in the order of the requests: GenerationAborted after `abort`,
            EngineDied if vLLM ends, a UserError if a load in flight fails its checks.

        Raises:
            UserError: a request is longer than the pool allows.
            NoVersion: no version is loaded, for example because the engine died a moment ago.
        """
        pool = self._pool
        for request in requests:
            prompt = len(request.prompt_tokens)
            room = min(pool.max_new_tokens, pool.max_model_len - prompt)
            if not 0 < request.max_new_tokens <= room or not prompt:
                raise UserError(
                    f"{request.max_new_tokens} new tokens after a prompt of {prompt}: the pool has "
                    f"room for {pool.max_new_tokens}, and {pool.max_model_len} in all",
                    place=f"samplers.{pool.name}.max_model_len",
                    remedy="raise it, or ask for less",
                )
        submission = Submission(list(requests))
        submission.future.set_running_or_notify_cancel()
        if not requests:
            submission.future.set_result([])
            return submission.future
        with self._counting:
            if self.version is None:
                raise NoVersion(self._death)
            self.running += len(requests)
            self._loop.soon(lambda: self._add(submission))
        return submission.future

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probs of given tokens, by prefill, at temperature 1.

        Returns:
            For each sequence f32 [n - 1]: of token i + 1 given the tokens up to i.
        """
        return self._loop.run(self._prompt_logprobs(sequences))[0]

    def check(
        self, weights_dir: Path, version: int, report: LoadReport | None = None
    ) -> LoadReport:
        """Compare what the engine holds with a version's files and probe, on every rank.

        Args:
            weights_dir, version: as in `load`.
            report: of ranks that have compared the files already; None: they do it now.

        Returns:
            The report of the first rank with the differences of all ranks.

        Raises:
            UserError: a tensor differs from the files, or the probe's log-probs from the learner's.
        """
        return self._loop.run(self._check(weights_dir, version, report))

    def abort(self) -> None:
        """Abort everything submitted so far: its futures raise GenerationAborted."""
        self._loop.run(self._abort())

    def close(self) -> None:
        """End vLLM's processes for good. Sequences under way raise GenerationAborted.

        Raises:
            TimeoutError: it cannot be ended within a minute.
        """
        if self._loop.closed:
            return
        self._closing = True
        if (told := self._starting) is not None:
            told.set()
        self._loop.run(self._stop(GenerationAborted()), CLOSE_S)
        if not self._loading.acquire(timeout=CLOSE_S):  # the above ends a load in another thread
            raise TimeoutError("the engine still loads")
        try:
            self._loop.run(self._stop(GenerationAborted()), CLOSE_S)
            self._loop.close(CLOSE_S)
        finally:
            self._loading.release()

    # The methods below run on the loop.

    async def _start(self, weights_dir: Path, version: int) -> None:
        chosen = arguments.engine_arguments(self._pool, weights_dir, self._options)
        try:
            with starting() as self._starting:
                if self._closing:  # `close` was called before it could see this start
                    raise EngineDied("the engine was closed")
                if self._pool.hardware.kind == "cpu":
                    arguments.register_model_class(weights_dir)
                core = EngineProcesses(chosen, self._fail)
        except StartFailed as error:
            raise arguments.kv_cache_error(error.exit_reason, self._pool) or error from error
        finally:
            self._starting = None
        self._client = EngineClient(core, ended=self._count_ended, failed=self._fail)
        try:
            slots, length = MAX_SEQUENCES, self._pool.max_new_tokens
            await core.rpc("start_capture", slots=slots, max_new_tokens=length)
            await core.rpc("set_version", version=version)
        except Exception as error:
            self._fail(error)
            raise

    async def _replace(
        self, held: Path | None, weights_dir: Path, version: int
    ) -> LoadReport | None:
        """Load weights into vLLM, pausing sequences under way; return the report of a patch.

        A patch overwrites what differs between the loaded version and the other, in place, and
        compares. If a rank cannot, everything is loaded, and None returned.
        """
        self._loads += 1
        if (client := self._client) is None:
            await self._start(weights_dir, version)
            return None
        core, in_flight = client.core, self._pool.in_flight_updates
        client.shut()
        if in_flight:
            await core.pause()
            self._paused_at = time.monotonic()
        try:
            patched = None
            if held is not None and held.is_dir():
                folders = {"base_dir": str(held), "weights_dir": str(weights_dir)}
                replies = await core.rpc("patch_weights", **folders)
                patched = merge(replies) if all(replies) else None
            if patched is None:
                await core.rpc("reload_weights", weights_path=str(weights_dir))
                await core.rpc("repack_tied_head")  # vLLM's reload leaves its packed copy stale
        except EngineDied:
            raise
        except Exception as error:  # a worker's error arrives as text only
            raise UserError(
                f"version {version}: vLLM cannot load it: {error}",
                place=str(weights_dir),
                remedy="compare its files with the manifest's digests, or fetch it again",
            ) from error
        # All tokens and cached blocks are of the new version from now on.
        await core.rpc("set_version", version=version)
        client.salt = str(self._loads)
        if not in_flight:
            await core.reset_prefix_cache()  # the salt suffices; this frees the memory at once
        return patched

    async def _check(
        self, weights_dir: Path, version: int, report: LoadReport | None
    ) -> LoadReport:
        if report is None:
            core = self._require_client().core
            report = merge(await core.rpc("compare_weights", weights_dir=str(weights_dir)))
        require_same_bytes(report, weights_dir, version)
        await self._resume()  # the probe has to run; what else runs is not answered yet
        if self._probe or (weights_dir / PROBE_FILE).exists():
            probe = read_probe(weights_dir)
            logprobs = await self._prompt_logprobs([s.tokens for s in probe])
            require_same_logprobs(
                probe,
                logprobs,
                report,
                precision=precision_of(self._pool),
                weights_dir=weights_dir,
                version=version,
            )
        return report

    async def _open(self, weights_dir: Path, version: int) -> None:
        await self._resume()
        self._require_client().open()  # raises if the engine died after the checks
        self.version, self._held = version, weights_dir

    async def _give_up(self, error: Exception) -> None:
        """Fail every sequence under way after a failed load."""
        if self._client is None or self._client.core.death.done():
            self._fail(error)
        else:
            await self._client.drop(error)
            await self._resume()

    async def _resume(self) -> None:
        if self._paused_at is not None:
            await self._require_client().core.resume()
            self._paused_s, self._paused_at = time.monotonic() - self._paused_at, None

    async def _abort(self) -> None:
        if self._client is not None:
            await self._client.drop(GenerationAborted())

    async def _prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Return the log-probs of each data-parallel rank."""
        client = self._require_client()
        ranks = range(client.core.ranks)
        return [await client.prompt_logprobs(sequences, rank=rank) for rank in ranks]

    def _add(self, submission: Submission) -> None:
        if self._client is None:  # it died after `submit`
            submission.future.set_exception(EngineDied("the engine core ended"))
            self._count_ended(len(submission.requests))
        else:
            self._client.add(submission)

    def _count_ended(self, sequences: int) -> None:
        with self._counting:
            self.running -= sequences

    def _fail(self, error: Exception) -> None:
        """Fail everything under way with an error and end vLLM's processes."""
        self.version = self._held = self._paused_at = None
        self._death = error if isinstance(error, EngineDied) else None
        client, self._client = self._client, None
        if client is not None:
            client.fail(error)
            client.close()
            client.core.close()

    async def _stop(self, error: Exception) -> None:
        self._fail(error)

    def _require_client(self) -> EngineClient:
        if self._client is None:
            raise EngineDied("no engine runs")
        return self._client


async def _import(start: Any) -> None:
    """Import vLLM; without garbage collection, which would take a fifth of the import's time."""
    gc.disable()
    try:
        import vllm.v1.engine.async_llm
    finally:
        gc.enable()
    vllm.utils.system_utils.multiprocessing = start
