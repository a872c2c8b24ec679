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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bridge.safetensors_io import SINGLE_NAME
from learner_jax.corpus.packed import CorpusRows
from learner_jax.leaves import save_weights
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.packing import Packed, Sample, pack, row_bound
from learner_jax.sharding import Execution, full_float32, make_mesh, shard_batch, shard_params
from learner_jax.step import Programs, build_programs, microbatch_bound
from learner_jax.training import score_rows, supervised_step
from runspec.core import canonical, files
from runspec.core.errors import UserError
from runspec.core.models import CONFIG_NAME, ModelConfig, family
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
    with files.locked(files.open_folder_lock(cache), OTHERS_S, held, waiting):
        model = _find_or_make(spec, data, cache, log)
    link = initial_model(run_dir)
    temporary = link.with_name(f".tmp-{uuid.uuid4().hex}-{link.name}")
    temporary.symlink_to(model.resolve())
    temporary.replace(link)
    return model


def _find_or_make(spec: RunSpec, data: WarmStartData, cache: Path, log: logging.Logger) -> Path:
    files.remove_leftovers(cache)
    tokenizer = cache / f".tmp-{uuid.uuid4().hex}-tokenizer"
    tokenizer.mkdir()
    try:
        data.write_tokenizer(tokenizer)
        model = cache / warm_start_digest(spec, tokenizer)
        if model.is_dir():
            record = _checked_record(model)
            log.info("warm start: %s is there already, skipped", model)
        else:
            with files.new_directory(model) as directory:
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
        data = files.read_bounded(model / CURVE_FILE, _MAX_RECORD_BYTES)
        record = canonical.parse_object(data, max_bytes=_MAX_RECORD_BYTES)
        kept = record.get(SINGLE_NAME)
        found = canonical.digest_file(model / SINGLE_NAME)
    except (OSError, canonical.MalformedJson) as error:
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
        "tokenizer": {p.name: canonical.digest_file(p) for p in sorted(tokenizer.iterdir())},
    }
    return canonical.digest_bytes(canonical.canonical_json(origins))


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
        "curve": curve,
        "sampled_right": {
            split: sampled_right(spec, config, params, data, split) for split in get_args(Split)
        },
        SINGLE_NAME: canonical.digest_file(directory / SINGLE_NAME),
    }
    (directory / CURVE_FILE).write_text(json.dumps(record, indent=1))
    return record


def supervise(
    spec: RunSpec, config: ModelConfig, data: WarmStartData, log: logging.Logger
) -> tuple[Any, list[dict[str, float]]]:
    """Trains until the held-out probability of the answer reaches its mark.

    The updates are those of a run of kind `sft` (`learner_jax.training`).

    Returns:
        The parameters, float32 on the mesh, and the curve. A point of it is a look at the held-out
        traces: `update`, `loss` of the last training batch, `answer_probability`, and `seconds`.

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
    curve: list[dict[str, float]] = []
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
        point = {"update": update, "loss": loss, "answer_probability": probability}
        curve.append({**point, "seconds": round(seconds, 2)})
        log.info(
            "warm start: update %d, loss %.3f, P(answer) %.3f of %.3f, %.0f s",
            *(update, loss, probability, start_spec.stop_answer_probability, seconds),
        )
        if probability >= start_spec.stop_answer_probability:
            return state.params, curve
    half, reached = (curve[i]["answer_probability"] for i in ((len(curve) - 1) // 2, -1))
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
    begins = [_own(trace)[: trace.answer_start].sum() for trace in traces]
    answers = [np.exp(values[begin:].sum()) for begin, values in zip(begins, logprobs, strict=True)]
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
    # On another platform than the run's, where that has several hosts, and never in bfloat16.
    own = {"compute_dtype": "float32", "master_dtype": "float32", "lora": None, "attention": "auto"}
    return spec.model_copy(
        update={
            "steps": start.max_updates,
            "algorithm": Sft(tokens_per_update=microbatches * packing.rows * packing.tokens),
            "optimizer": optimizer,
            "learner": spec.learner.model_copy(update=own),
        }
    )


def _rows(spec: RunSpec, traces: Sequence[Trace], answer_weight: float) -> CorpusRows:
    """Packed rows of an update; an answer's tokens weigh `answer_weight`, the thinking's 1."""
    packed, weights = _pack(spec, traces, microbatch_bound(spec)), []
    for trace in traces:
        weight = np.ones(len(trace.output_tokens), np.float32)
        weight[trace.answer_start :] = answer_weight
        weights.append(weight[_own(trace)])
    length = spec.learner.packing.tokens
    batch = jax.tree.map(lambda x: x.reshape(-1, length), packed.batch)
    return CorpusRows(batch, packed.scatter(weights).reshape(-1, length))


def _pack(spec: RunSpec, traces: Sequence[Trace], microbatches: int | None = None) -> Packed:
    samples = [
        Sample(
            np.asarray(trace.prompt_tokens, np.int32),
            np.asarray(trace.output_tokens, np.int32),
            None if trace.own is None else _own(trace),
        )
        for trace in traces
    ]
    packing = spec.learner.packing
    return pack(samples, tokens=packing.tokens, rows=packing.rows, microbatches=microbatches)


def _own(trace: Trace) -> np.ndarray:
    """Return which output tokens of a trace the policy is to say, bool [n]."""
    return np.asarray(trace.own or [True] * len(trace.output_tokens), bool)


def draw_initial_model(run_dir: Path, log: logging.Logger) -> None:
    """Write weights and config.json of `model.shape` beside the tokenizer in `initial/`.

    config.json comes last: where it is, version 0 is whole.

    Raises:
        UserError: the tokenizer cannot be read, or has no end token.
    """
    spec, folder = load_resolved(run_dir), initial_model(run_dir)
    with not_retried():
        config = model_config(spec)
        tokenizer = TokenizerFiles.read(folder)
        end = tokenizer.special_id("eos_token")
        if end is None:
            raise UserError(
                "the tokenizer has no end token",
                place=tokenizer.place,
                remedy="name eos_token in tokenizer_config.json",
            )
        padding = tokenizer.special_id("pad_token")
        padding = end if padding is None else padding
    full_float32(jnp.float32)
    params = init_params(config, jax.random.key(spec.seed))
    save_weights(params, config, folder)
    fields = hf_config(config, dtype="float32", eos_token_id=end, pad_token_id=padding)
    files.write_atomic(folder / CONFIG_NAME, json.dumps(fields, indent=2).encode())
    log.info("drawn from seed %d: %.3g parameters", spec.seed, parameter_count(config))


SAMPLED_PROBLEMS = 64
"""Number of problems of each split that a new model answers."""
FEW_RIGHT = 0.05
"""Share of right answers to training problems under which a run has little to learn from."""


def sample(
    spec: RunSpec,
    config: ModelConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    end_token: int,
) -> Iterator[list[int]]:
    """Yields a continuation of each prompt, drawn at temperature 1 in float32.

    There is no cache of keys and values: each new token costs a pass over whole rows, which the
    small model of a warm start affords.

    Args:
        spec: its mesh cuts the rows, its packing says how many are computed at once and how long
            they are, and its shortest `max_new_tokens` ends a continuation.
        config: the shape of the model.
        params: its weights, on the mesh.
        prompts: token ids, at most `data.max_prompt_tokens` of them each.
        end_token: the id after which a continuation ends.
    """
    key, packing = jax.random.key(spec.seed), spec.learner.packing
    mesh = make_mesh(spec.learner.mesh)
    new_tokens = min(pool.max_new_tokens for pool in spec.samplers)
    for begin in range(0, len(prompts), packing.rows):
        batch = prompts[begin : begin + packing.rows]
        tokens = np.zeros((packing.rows, packing.tokens), np.int32)
        lengths = np.zeros(packing.rows, np.int32)
        for row, prompt in enumerate(batch):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
        key, now = jax.random.split(key)
        rows = shard_batch(tokens, mesh)
        drawn = _continue(params, rows, lengths, now, end_token, config, mesh, new_tokens)
        for row, prompt in zip(np.asarray(drawn), batch, strict=False):
            output = row[len(prompt) : len(prompt) + new_tokens].tolist()
            yield output[: output.index(end_token) + 1] if end_token in output else output


@partial(jax.jit, static_argnames=("config", "mesh", "new_tokens"))
def _continue(
    params: Any,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    key: Array,
    end_token: int,
    config: ModelConfig,
    mesh: Mesh,
    new_tokens: int,
) -> Int[Array, "B T"]:
    """Writes up to `new_tokens` drawn tokens behind the first `lengths` of each row; a row of
    length 0 holds no prompt."""
    policy = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rows = jnp.arange(len(tokens))

    def unended(state: tuple[Array, Array, Array]) -> Array:
        step, _, going_on = state
        return (step < new_tokens) & going_on.any()

    def one_more(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, tokens, going_on = state
        at = lengths + step
        filled = (positions < at[:, None]).astype(jnp.int32)
        hidden = policy(tokens, filled, positions, Execution(jnp.float32, mesh=mesh))
        logits = hidden[rows, at - 1] @ policy.head_weight()
        drawn = jax.random.categorical(jax.random.fold_in(key, step), logits)
        return step + 1, tokens.at[rows, at].set(drawn), going_on & (drawn != end_token)

    return jax.lax.while_loop(unended, one_more, (jnp.zeros((), jnp.int32), tokens, lengths > 0))[1]


def sampled_right(
    spec: RunSpec, config: ModelConfig, params: Any, data: WarmStartData, split: Split
) -> float | None:
    """Share of problems that the model, sampled as the run samples, answers as the traces do.

    An answer counts where it is the trace's token for token, behind the only `</think>`; a run's
    grader may accept more. Problems of several turns are left out, because no environment answers
    the model here; None where no other problem was drawn.
    """
    drawn = data.traces(np.random.default_rng([spec.seed, 3]), SAMPLED_PROBLEMS, split)
    traces = [trace for trace in drawn if trace.own is None]
    if not traces:
        return None
    outputs = sample(spec, config, params, [t.prompt_tokens for t in traces], data.eos_token_id)
    right = 0
    for trace, output in zip(traces, outputs, strict=True):
        wanted = trace.output_tokens[trace.answer_start - 1 :]  # from `</think>` on
        ending = len(output) - len(wanted)
        right += output[ending:] == wanted and wanted[0] not in output[:ending]
    return right / len(traces)


def log_accuracy(
    right: Mapping[str, float | None], probability: float, log: logging.Logger
) -> None:
    """Logs how often the model is right by itself, with what to do where it never is."""
    train, held_out = right["train"], right["held_out"]
    if train is None or held_out is None:
        log.info("P(answer) %.3f is that after given thinking and observations", probability)
        return
    figures = (
        f"sampled at temperature 1: {train:.0%} of training problems and {held_out:.0%} of "
        f"held-out ones are right; P(answer) {probability:.3f} is that after given thinking"
    )
    if train >= FEW_RIGHT:
        log.info("%s", figures)
    else:
        log.warning(
            "%s. The run has almost nothing to learn from: raise "
            "warm_start.stop_answer_probability (and max_updates), lower warm_start.answer_weight "
            "to 1, or choose easier problems (docs/first-run.md)",
            figures,
        )
