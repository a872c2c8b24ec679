"""The warm start: supervised steps on generated traces, stopped while the model still fails.

The result, a Hugging Face directory, is version 0 of the run. It is kept in a cache under a digest
of everything that it follows from, and the run's `initial` is a link to it.

A run without a warm start may draw version 0 from its seed.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bridge.safetensors_io import SINGLE_NAME
from learner_jax.corpus.packed import CorpusRows
from learner_jax.leaves import save_weights
from learner_jax.model import abstract_params, init_params
from learner_jax.packing import Packed, Sample, pack, row_bound
from learner_jax.sampling import log_accuracy, sampled_right
from learner_jax.sharding import full_float32, make_mesh, shard_params
from learner_jax.step import Programs, build_programs, microbatch_bound
from learner_jax.supervised import score_rows, supervised_step
from runspec.core.canonical import (
    MalformedJson,
    canonical_json,
    digest_bytes,
    digest_file,
    parse_object,
)
from runspec.core.errors import UserError
from runspec.core.files import (
    locked,
    new_directory,
    open_folder_lock,
    read_bounded,
    remove_leftovers,
    write_atomic,
)
from runspec.core.models import family
from runspec.core.models.config import CONFIG_NAME, ModelConfig
from runspec.core.models.family import hf_config
from runspec.core.models.parameters import parameter_count
from runspec.core.process import RunStopped, not_retried
from runspec.core.run_files import initial_model
from runspec.core.schema import Optimizer, RunSpec, Sft, WarmStart
from runspec.core.schema.load import load_resolved
from runspec.core.tokenizer_files import TokenizerFiles
from verify.plugins import Split, Trace, WarmStartData, load_warm_start_data

FORMAT = 5
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
    held = UserError(
        f"another run's warm start has held the cache for {OTHERS_S:.0f} s",
        place=str(cache),
        remedy="end that run, or wait for it",
    )
    waiting = partial(log.info, "waiting for another run's warm start in %s", cache)
    # Two runs of one start make it once, and what another run has begun here is not a leftover.
    with locked(open_folder_lock(cache), OTHERS_S, held, waiting):
        model = _find_or_make(spec, data, cache, log)
    link = initial_model(run_dir)
    temporary = link.with_name(f".tmp-{uuid.uuid4().hex}-{link.name}")
    temporary.symlink_to(model.resolve())
    temporary.replace(link)
    return model


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
    config = family.model_config(spec)
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


def supervise(
    spec: RunSpec, config: ModelConfig, data: WarmStartData, log: logging.Logger
) -> tuple[Any, list[CurvePoint]]:
    """Trains until the held-out probability of the answer reaches its mark.

    The updates are those of a run of kind `sft` (`learner_jax.training`).

    Returns:
        The parameters, float32 on the mesh, and the curve.

    Raises:
        RunStopped: `max_updates` passed without the mark.
    """
    start_spec = spec.warm_start
    assert start_spec is not None, "the linter sees to it: a shape has a warm start"
    full_float32(jnp.float32)
    mesh, short = make_mesh(spec.learner.mesh), _short_run(spec, start_spec)
    programs = build_programs(short, config, mesh)
    key = jax.random.key(spec.seed)
    params = shard_params(init_params(config, key), abstract_params(config), mesh)
    state = programs.init_state(params)
    held_out = data.traces(np.random.default_rng([spec.seed, 1]), HELD_OUT_TRACES, "held_out")
    training = np.random.default_rng([spec.seed, 2])
    curve: list[CurvePoint] = []
    began = time.monotonic()
    log.info("warm start: compiling, then at most %d updates", start_spec.max_updates)
    for update in range(1, start_spec.max_updates + 1):
        traces = data.traces(training, start_spec.sequences, "train")
        rows = _rows(short, traces, start_spec.answer_weight)
        result = supervised_step(short, mesh, programs, state, rows)
        state = result.state
        if update % start_spec.evaluate_every and update != start_spec.max_updates:
            continue
        probability = answer_probability(programs, state.params, short, held_out, mesh)
        seconds, loss = time.monotonic() - began, result.numbers["loss"]
        curve.append(CurvePoint(update, loss, probability, round(seconds, 2)))
        log.info(
            "warm start: update %d, loss %.3f, P(answer) %.3f of %.3f, %.0f s",
            *(update, loss, probability, start_spec.stop_answer_probability, seconds),
        )
        if probability >= start_spec.stop_answer_probability:
            return state.params, curve
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
    programs: Programs, params: Any, spec: RunSpec, traces: Sequence[Trace], mesh: Mesh
) -> float:
    """Mean over the traces of P(answer | prompt, thinking), the product over its tokens.

    Args:
        programs, spec: of the supervised run.
        params: the weights.
        traces: to score.
        mesh: of the programs.
    """
    packed = _pack(spec, traces)
    shape = packed.batch.tokens.shape
    flat = jax.tree.map(lambda x: x.reshape(-1, shape[-1]), packed.batch)
    logprobs = packed.gather(score_rows(spec, mesh, programs, params, flat).reshape(shape))
    answers = [
        np.exp(values[trace.answer_start :].sum())
        for trace, values in zip(traces, logprobs, strict=True)
    ]
    return float(np.mean(answers))


def _short_run(spec: RunSpec, start: WarmStart) -> RunSpec:
    """The supervised run that a warm start is: its updates, in float32."""
    packing = spec.learner.packing
    longest = min(packing.tokens, max(pool.max_model_len for pool in spec.samplers))
    microbatches = -(-row_bound(start.sequences, longest, packing.tokens) // packing.rows)
    optimizer = Optimizer(
        lr=start.lr,
        betas=(0.9, start.beta2),
        clip_norm=start.clip_norm,
        warmup_updates=start.warmup_updates,
    )
    floats = {"compute_dtype": "float32", "master_dtype": "float32", "lora": None}
    return spec.model_copy(
        update={
            "steps": start.max_updates,
            "algorithm": Sft(tokens_per_update=microbatches * packing.rows * packing.tokens),
            "optimizer": optimizer,
            "learner": spec.learner.model_copy(update=floats),
        }
    )


def _rows(spec: RunSpec, traces: Sequence[Trace], answer_weight: float) -> CorpusRows:
    """Packed rows of an update; an answer's tokens weigh `answer_weight`, the thinking's 1."""
    packed = _pack(spec, traces, microbatch_bound(spec))
    weights = [np.ones(len(trace.output_tokens), np.float32) for trace in traces]
    for trace, weight in zip(traces, weights, strict=True):
        weight[trace.answer_start :] = answer_weight
    length = spec.learner.packing.tokens
    batch = jax.tree.map(lambda x: x.reshape(-1, length), packed.batch)
    return CorpusRows(batch, packed.scatter(weights).reshape(-1, length))


def _pack(spec: RunSpec, traces: Sequence[Trace], microbatches: int | None = None) -> Packed:
    samples = [
        Sample(np.asarray(t.prompt_tokens, np.int32), np.asarray(t.output_tokens, np.int32))
        for t in traces
    ]
    packing = spec.learner.packing
    return pack(samples, tokens=packing.tokens, rows=packing.rows, microbatches=microbatches)


def draw_initial_model(run_dir: Path, log: logging.Logger) -> None:
    """Write weights and config.json of `model.shape` beside the tokenizer in `initial/`.

    config.json comes last: where it is, version 0 is whole.

    Raises:
        UserError: the tokenizer cannot be read, or has no end token.
    """
    spec, folder = load_resolved(run_dir), initial_model(run_dir)
    with not_retried():
        config = model_config(spec)
        files = TokenizerFiles.read(folder)
        end = files.special_id("eos_token")
        if end is None:
            raise UserError(
                "the tokenizer has no end token",
                place=files.place,
                remedy="name eos_token in tokenizer_config.json",
            )
        padding = files.special_id("pad_token")
        padding = end if padding is None else padding
    full_float32(jnp.float32)
    params = init_params(config, jax.random.key(spec.seed))
    save_weights(params, config, folder)
    fields = hf_config(config, dtype="float32", eos_token_id=end, pad_token_id=padding)
    write_atomic(folder / CONFIG_NAME, json.dumps(fields, indent=2).encode())
    log.info("drawn from seed %d: %.3g parameters", spec.seed, parameter_count(config))
