"""The warm start: supervised steps on generated traces, stopped while the model still fails.

The result, a Hugging Face directory, is version 0 of the run. It is kept in a cache under a digest
of everything that it follows from, and the run's `initial` is a link to it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from bridge.safetensors_io import SINGLE_NAME
from learner_jax.execution import Execution, full_float32
from learner_jax.leaves import save_weights
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.optimizer import abstract_state, apply_gradients, build_optimizer, init_state
from learner_jax.packing import Packed, Sample, TokenBatch, pack
from learner_jax.sampling import log_accuracy, sampled_right
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import abstract_like, policy_logprobs, shardings
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import locked, new_directory, read_bounded, remove_leftovers
from runspec.core.hashing import digest_bytes, digest_file
from runspec.core.models import spec_model
from runspec.core.models.config import ModelConfig
from runspec.core.models.decoder import hf_config
from runspec.core.process import RunStopped, not_retried
from runspec.core.run_files import initial_model
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import Optimizer, RunSpec, WarmStart
from verify.plugins import Split, Trace, WarmStartData, load_warm_start_data

FORMAT = 4
"""Part of the digest: a change of this file that changes what is kept raises it."""
HELD_OUT_TRACES = 256
CURVE_FILE = "warm_start.json"
_MAX_RECORD_BYTES = 1 << 20
_STILL_RISING = 0.02
OTHERS_S = 3600.0
"""How long the warm start of another run in the same cache may take."""


@dataclass(frozen=True)
class CurvePoint:
    """A look at the held-out traces."""

    update: int
    loss: float
    """Loss of the last training batch: mean -log p, weighted."""
    answer_probability: float
    """Mean over the traces of the product of the answer tokens' probabilities, teacher-forced."""
    seconds: float


def make_initial_model(run_dir: Path, cache: Path, log: logging.Logger) -> Path:
    """Makes version 0 of a run, or finds it in the cache, and links `initial` to it.

    Raises:
        UserError: another run holds the cache.
        RunStopped: `max_updates` passed without the mark, or what lies in the cache is damaged.
    """
    spec = load_resolved(run_dir)
    data = load_warm_start_data(spec)
    cache.mkdir(parents=True, exist_ok=True)
    with _alone_in(cache, log):
        model = _find_or_make(spec, data, cache, log)
    _link(initial_model(run_dir), model)
    return model


def _alone_in(cache: Path, log: logging.Logger) -> AbstractContextManager[None]:
    """Hold the cache's lock: two runs of one start make it once, and what another run has begun
    here is not a leftover."""
    held = UserError(
        f"another run's warm start has held the cache for {OTHERS_S:.0f} s",
        place=str(cache),
        remedy="end that run, or wait for it",
    )
    waiting = partial(log.info, "waiting for another run's warm start in %s", cache)
    return locked(os.open(cache, os.O_RDONLY), OTHERS_S, held, waiting)


def _find_or_make(spec: RunSpec, data: WarmStartData, cache: Path, log: logging.Logger) -> Path:
    remove_leftovers(cache)
    tokenizer = cache / f".tmp-{uuid.uuid4().hex}-tokenizer"
    tokenizer.mkdir()
    try:
        data.write_tokenizer(tokenizer)
        model = cache / warm_start_digest(spec, tokenizer)
        if model.is_dir():
            record = _checked_record(model)
            log.info("warm start: %s is there already, skipped", model)
        else:
            with new_directory(model) as directory:
                shutil.copytree(tokenizer, directory, dirs_exist_ok=True)
                record = _make(spec, data, directory, log)
    finally:
        shutil.rmtree(tokenizer, ignore_errors=True)
    log_accuracy(record["sampled_right"], record["curve"][-1]["answer_probability"], log)
    return model


def _checked_record(model: Path) -> dict[str, Any]:
    """The record of a cached start, whose weights have the digest that it names.

    Raises:
        RunStopped: its weights are damaged, or their digest is missing.
    """
    try:
        data = read_bounded(model / CURVE_FILE, _MAX_RECORD_BYTES)
        record = parse_object(data, max_bytes=_MAX_RECORD_BYTES)
        kept = record.get(SINGLE_NAME)
        found = digest_file(model / SINGLE_NAME)
    except (OSError, MalformedJson) as error:
        damage = str(error)
    else:
        if kept == found:
            return record
        damage = f"the digest of {SINGLE_NAME} is {found[:16]}, not {str(kept)[:16]}"
    raise RunStopped(
        f"the cached warm start is damaged: {damage}",
        place=str(model),
        remedy="delete this directory and apply again: it is made anew",
    )


def warm_start_digest(spec: RunSpec, tokenizer: Path) -> str:
    """Names a start by all that it follows from; `tokenizer` holds the tokenizer's files."""
    origins = {
        "format": FORMAT,
        "seed": spec.seed,
        "model": spec.model.model_dump(mode="json"),
        "warm_start": spec.warm_start.model_dump(mode="json") if spec.warm_start else None,
        "data": spec.data.model_dump(mode="json"),
        "targets": [reward.targets for reward in spec.reward],
        "max_new_tokens": [pool.max_new_tokens for pool in spec.samplers],
        "packing": spec.learner.packing.model_dump(mode="json"),
        "tokenizer": {p.name: digest_file(p) for p in sorted(tokenizer.iterdir())},
    }
    return digest_bytes(canonical_json(origins))


def model_config(spec: RunSpec) -> ModelConfig:
    """The config of `model.shape`."""
    if spec.model.shape is None:
        raise UserError(
            "no shape to make weights for",
            place="model.shape",
            remedy="a model that has weights (`model.hf`) needs no warm start",
        )
    config = spec_model.model_config(spec)
    assert config is not None, "the spec has the shape"
    return config


def _make(
    spec: RunSpec, data: WarmStartData, directory: Path, log: logging.Logger
) -> dict[str, Any]:
    """Trains, writes the model beside the tokenizer's files, and returns its record."""
    with not_retried():
        config = model_config(spec)
    tokens = {"eos_token_id": data.eos_token_id, "pad_token_id": data.pad_token_id}
    fields = hf_config(config, dtype="float32", **tokens)
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
    params, curve = supervise(spec, config, data, log)
    save_weights(params, config, directory)
    record = {
        "curve": [vars(point) for point in curve],
        "sampled_right": {
            split: sampled_right(spec, config, params, data, split) for split in get_args(Split)
        },
        SINGLE_NAME: digest_file(directory / SINGLE_NAME),
    }
    (directory / CURVE_FILE).write_text(json.dumps(record, indent=1))
    return record


def _link(link: Path, target: Path) -> None:
    temporary = link.with_name(f".tmp-{uuid.uuid4().hex}-{link.name}")
    temporary.symlink_to(target.resolve())
    temporary.replace(link)


def supervise(
    spec: RunSpec, config: ModelConfig, data: WarmStartData, log: logging.Logger
) -> tuple[Any, list[CurvePoint]]:
    """Trains until the held-out probability of the answer reaches its mark.

    Returns:
        The parameters, float32 on the mesh, and the curve.

    Raises:
        RunStopped: `max_updates` passed without the mark.
    """
    start_spec = spec.warm_start
    assert start_spec is not None, "the linter sees to it: a shape has a warm start"
    full_float32(jnp.float32)
    mesh = make_mesh(spec.learner.mesh)
    steps = _Steps(config, start_spec, mesh)
    key = jax.random.key(spec.seed)
    params = shard_params(init_params(config, key), abstract_params(config), mesh)
    opt_state = steps.init(params)
    held_out = data.traces(np.random.default_rng([spec.seed, 1]), HELD_OUT_TRACES, "held_out")
    training = np.random.default_rng([spec.seed, 2])
    curve: list[CurvePoint] = []
    began = time.monotonic()
    log.info("warm start: compiling, then at most %d updates", start_spec.max_updates)
    for update in range(1, start_spec.max_updates + 1):
        traces = data.traces(training, start_spec.sequences, "train")
        loss, gradients = steps.zeros(params)
        for batch, weights in _microbatches(spec, traces, start_spec.answer_weight, mesh):
            loss, gradients = steps.accumulate(params, (loss, gradients), batch, weights)
        params, opt_state = steps.apply(params, opt_state, gradients)
        if update % start_spec.evaluate_every and update != start_spec.max_updates:
            continue
        probability = answer_probability(steps.score, params, spec, held_out, mesh)
        seconds = time.monotonic() - began
        curve.append(CurvePoint(update, float(loss), probability, round(seconds, 2)))
        log.info(
            "warm start: update %d, loss %.3f, P(answer) %.3f of %.3f, %.0f s",
            *(update, loss, probability, start_spec.stop_answer_probability, seconds),
        )
        if probability >= start_spec.stop_answer_probability:
            return params, curve
    half, reached = (curve[i].answer_probability for i in ((len(curve) - 1) // 2, -1))
    lower = "lower stop_answer_probability below what was reached"
    raise RunStopped(
        f"after {start_spec.max_updates} updates the held-out probability of the answer is "
        f"{reached:.3f}, the mark {start_spec.stop_answer_probability}; halfway it was {half:.3f}",
        place="warm_start.max_updates",
        remedy=f"raise max_updates, or {lower}"
        if reached > half + _STILL_RISING
        else f"{lower}, add problems or choose easier ones, or make model.shape larger",
    )


def answer_probability(
    score: Callable[[Any, TokenBatch], Array],
    params: Any,
    spec: RunSpec,
    traces: Sequence[Trace],
    mesh: Mesh,
) -> float:
    """Mean over the traces of P(answer | prompt, thinking), the product over its tokens."""
    packed = _pack(spec, traces)
    batches = (shard_batch(packed.token_batch(i), mesh) for i in range(packed.microbatches))
    logprobs = packed.gather(np.stack([np.asarray(score(params, batch)) for batch in batches]))
    answers = [
        np.exp(values[trace.answer_start :].sum())
        for trace, values in zip(traces, logprobs, strict=True)
    ]
    return float(np.mean(answers))


class _Steps:
    """Jitted programs of weighted cross-entropy, - sum_t w_t log p(o_t), in float32."""

    def __init__(self, config: ModelConfig, start: WarmStart, mesh: Mesh) -> None:
        settings = Optimizer(
            lr=start.lr,
            betas=(0.9, start.beta2),
            clip_norm=start.clip_norm,
            warmup_updates=start.warmup_updates,
        )
        optimizer = build_optimizer(settings, start.max_updates)

        def score(params: Any, batch: TokenBatch) -> Array:
            execution = Execution(jnp.float32, mesh=mesh)
            return policy_logprobs(bind(config, params), batch, execution, temperature=1.0)[0]

        def zeros(params: Any) -> tuple[Array, Any]:
            return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)

        def accumulate(
            params: Any, total: tuple[Array, Any], batch: TokenBatch, weights: Array
        ) -> tuple[Array, Any]:
            def loss(params: Any) -> Array:
                return -jnp.sum(weights * score(params, batch))

            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params))

        # Explicit shardings keep outputs laid out as inputs are: each program is compiled once.
        masters = abstract_like(abstract_params(config), mesh, jnp.float32)
        like, state = shardings((masters, abstract_state(optimizer, masters, offload=False)))
        total = (NamedSharding(mesh, PartitionSpec()), like)
        self.init = jax.jit(partial(init_state, optimizer), out_shardings=state)
        self.zeros = jax.jit(zeros, out_shardings=total)
        self.accumulate = jax.jit(accumulate, donate_argnums=1, out_shardings=total)
        self.apply = jax.jit(
            partial(apply_gradients, optimizer), donate_argnums=(0, 1), out_shardings=(like, state)
        )
        self.score = jax.jit(score)


def _microbatches(
    spec: RunSpec, traces: Sequence[Trace], answer_weight: float, mesh: Mesh
) -> Iterator[tuple[TokenBatch, Array]]:
    """Packed microbatches with the weights w_t, which sum to 1 over all of them."""
    packed = _pack(spec, traces)
    weights = [np.ones(len(trace.output_tokens), np.float32) for trace in traces]
    for trace, weight in zip(traces, weights, strict=True):
        weight[trace.answer_start :] = answer_weight
    total = sum(float(weight.sum()) for weight in weights)
    scattered = packed.scatter([weight / np.float32(total) for weight in weights])
    for index in range(packed.microbatches):
        yield shard_batch(packed.token_batch(index), mesh), shard_batch(scattered[index], mesh)


def _pack(spec: RunSpec, traces: Sequence[Trace]) -> Packed:
    samples = [
        Sample(np.asarray(t.prompt_tokens, np.int32), np.asarray(t.output_tokens, np.int32))
        for t in traces
    ]
    packing = spec.learner.packing
    return pack(samples, tokens=packing.tokens, rows=packing.rows)
