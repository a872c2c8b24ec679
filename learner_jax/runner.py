"""The learner's loop: wait for a batch manifest, train it, write the next version. One run, flat.

A restart goes on from the newest full state and trains the signed manifests since then again: the
same rollouts in the same order give the same bits, so each rollout that a manifest names is trained
exactly once in the history that survives.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bridge.config import ModelConfig, load_config
from learner_jax.batch import BatchReader
from learner_jax.checkpoint import load_state, save_state, state_steps
from learner_jax.flops import Meter, peak_flops
from learner_jax.layout import (
    clear_unfinished,
    initial_model,
    numbered,
    params_folder,
    state_folder,
)
from learner_jax.leaves import load_params
from learner_jax.metrics import Clock, JsonLines
from learner_jax.probe import build_probe
from learner_jax.report import SampleWriter, metrics_line
from learner_jax.sharding import make_mesh
from learner_jax.step import Programs, TrainState, build_programs
from learner_jax.training import compile_ahead, train_step
from learner_jax.versions import VersionWriter
from runspec.common.canonical import canonical_json
from runspec.common.errors import UserError
from runspec.common.hashing import digest_bytes, digest_file
from runspec.common.keys import SigningKey
from runspec.spec.resolved import load_resolved
from runspec.spec.schema import RunSpec
from verify.formats import batch as batch_format
from verify.formats.layout import step_folder


def train(run_dir: Path, log: logging.Logger, stop: threading.Event) -> None:
    """Trains every step that is left; returns when the last is done or `stop` is set.

    Raises:
        UserError: no batch in time, an unreadable checkpoint, a damaged file: each named.
        RunStopped: the gradient is not finite, or a replay differs from what was published.
    """
    spec = load_resolved(run_dir)
    states = state_folder(run_dir, spec)
    for folder in (states, params_folder(run_dir)):
        clear_unfinished(folder, log)

    # The model, the mesh, and where to go on.
    model_dir = initial_model(run_dir)
    config = load_config(model_dir)
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    start = _start(model_dir, config, mesh, programs, spec, states)
    state, step = start.state, start.step
    log.info("version %d on %d devices, %d steps to go", step, mesh.size, spec.steps - step)

    # What is written and read.
    versions = VersionWriter(run_dir, spec, config, build_probe(spec, config, mesh), log)
    metrics, samples = (JsonLines(run_dir / f"{name}.jsonl") for name in ("metrics", "samples"))
    decode = SampleWriter(model_dir)
    peak = peak_flops(mesh.devices.flat[0].device_kind)
    meter = Meter(config, spec.learner.lora, mesh.size, peak)
    reader = BatchReader(run_dir, spec, _root_public_key(run_dir, spec))

    published = programs.publish(state.params)
    versions.write(step, published)
    if step < spec.steps:
        compile_ahead(mesh, programs, state, published)
    clock = Clock()
    saved = start.step
    while step < spec.steps:
        manifest = reader.wait(step, stop, log)
        clock.waited("coordinator")
        if manifest is None:
            break
        batch = reader.read(manifest)
        result = train_step(
            spec,
            mesh,
            programs,
            state,
            published=published,
            reference=start.reference,
            batch=batch,
        )
        state = result.state
        for skipped in result.skipped:
            log.warning("step %d: %s", step, skipped)
        published = programs.publish(state.params)
        versions.write(step + 1, published)
        clock.trained()
        train_s, waits = clock.take()
        line = metrics_line(batch, result, meter, train_s=train_s, waits=waits)
        metrics.append(step, [line])
        samples.append(step, decode.lines(batch))
        log.info(
            "step %d: task reward %s, loss %.4f, gradient %.3f, lag %.2f, trained %.2f s, "
            "waited %.2f s",
            *(step, line["task_reward"], line["loss"], line["grad_norm"], line["lag_mean"]),
            *(train_s, sum(waits.values())),
        )
        step += 1
        if step % spec.checkpoints.every == 0 and step < spec.steps:
            saved = _save(run_dir, spec, states, step, state, start.digest)
        clock.trained()  # writing is work too: nobody was waited for
    # Also when told to end early: what is saved now need not be trained again.
    if saved < step:
        _save(run_dir, spec, states, step, state, start.digest)
    log.info("%s at version %d", "finished" if step == spec.steps else "stopped", step)


@dataclass(frozen=True)
class _Start:
    step: int
    state: TrainState
    reference: Any | None
    """Version 0's bits; None where no KL is asked for."""
    digest: str
    """Names the starting model."""


def _start(
    model_dir: Path,
    config: ModelConfig,
    mesh: Mesh,
    programs: Programs,
    spec: RunSpec,
    states: Path,
) -> _Start:
    """The newest full state, or version 0."""
    digest = _model_digest(model_dir)
    steps = state_steps(states)
    initial = None
    if not steps or spec.algorithm.kl.coef:
        initial = load_params(model_dir, config, mesh)
    reference = programs.publish(initial) if spec.algorithm.kl.coef else None
    if not steps:
        return _Start(0, programs.init_state(initial), reference, digest)
    state = load_state(states, steps[-1], programs.abstract_state, reference=digest)
    return _Start(steps[-1], state, reference, digest)


def _model_digest(model_dir: Path) -> str:
    """One digest of a model directory's weights, read once, however large."""
    files = {path.name: digest_file(path) for path in sorted(model_dir.glob("*.safetensors"))}
    if not files:
        raise UserError(
            "no safetensors files",
            place=str(model_dir),
            remedy="run `python -m learner_jax warm-start`, or point model.hf at weights",
        )
    return digest_bytes(canonical_json(files))


def _save(
    run_dir: Path, spec: RunSpec, states: Path, step: int, state: TrainState, digest: str
) -> int:
    """Saves a full state, then drops the rollouts that every kept state has passed."""
    save_state(states, step, state, reference=digest, keep=spec.checkpoints.keep)
    # A step trains rollouts leased up to `async_level` steps before it.
    passed = state_steps(states)[0] - spec.algorithm.async_level
    for old in numbered(run_dir / "rollouts", "step_"):
        if old < passed:
            for path in step_folder(run_dir, old).iterdir():
                if path.suffix in (".parquet", ".json") and path.name != batch_format.FILE_NAME:
                    path.unlink(missing_ok=True)
    return step


def _root_public_key(run_dir: Path, spec: RunSpec) -> str:
    pinned = spec.identity.root_public_key
    if pinned is not None:
        return pinned
    return SigningKey.load(run_dir / "keys" / "root.key").public_hex
