"""The warm start: learns, stops at its mark, is kept, and says so when it cannot reach it.

Samples follow the model's own forward pass, and right answers are counted as they are.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.model import abstract_params, bind, init_params
from learner_jax.sharding import Execution, make_mesh, shard_params
from learner_jax.warm_start import (
    _rows,
    _short_run,
    make_initial_model,
    model_config,
    sample,
    sampled_right,
    warm_start_digest,
)
from runspec.core.canonical import digest_bytes
from runspec.core.files import open_folder_lock
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.process import RunStopped
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from tests.bridge.conftest import iter_leaves
from tests.learner_jax.conftest import tiny_spec
from verify.plugins import Trace, load_task_set, load_warm_start_data

pytestmark = pytest.mark.slow

LOG = logging.getLogger("test")


def spec_with(start: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """The laptop's task on a smaller model, with a mark that a few updates reach."""
    tiny = tiny_spec().model_dump(mode="json", by_alias=True)
    sizes = {"vocab_size": 192, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    quick = {"stop_answer_probability": 1e-4, "evaluate_every": 5, "sequences": 32, "lr": 1e-2}
    length = {"name": "length", "kind": "target_length", "form": "exact", "alpha": 0.05}
    blocks = {
        "model": {"shape": tiny["model"]["shape"] | sizes, "max_context": 128},
        "warm_start": {**quick, **(start or {})},
        "reward": [*tiny["reward"], {**length, "targets": [8, 16]}],
        "samplers": [tiny["samplers"][0] | {"max_model_len": 112, "max_new_tokens": 48}],
        "learner": tiny["learner"] | {"packing": {"tokens": 128, "rows": 8}},
    }
    return tiny_spec(**{**blocks, **changes})


def run_dir_of(path: Path, spec: RunSpec) -> Path:
    path.mkdir()
    (path / "spec.json").write_bytes(dump_resolved(spec))
    return path


def test_a_start_is_made_once_and_both_runs_link_to_it(tmp_path, caplog):
    # given two runs of one spec
    spec, cache = spec_with(), tmp_path / "cache"
    first, second = (run_dir_of(tmp_path / name, spec) for name in ("a", "b"))
    # when both are started
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        model = make_initial_model(first, cache, LOG)
    written = (model / "model.safetensors").stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        assert make_initial_model(second, cache, LOG) == model
    # then each program of the first was compiled once, whatever its results went into
    for program in ("accumulate", "apply", "score"):
        assert caplog.text.count(f"Compiling jit({program}) ") == 1, program
    # and the second found the first's model, said so, and links to the same directory
    assert "there already, skipped" in caplog.text
    assert (model / "model.safetensors").stat().st_mtime_ns == written
    assert (first / "initial").resolve() == (second / "initial").resolve() == model.resolve()
    assert {entry.name for entry in cache.iterdir()} == {".lock", model.name}
    # and it is a Hugging Face model of the spec's shape whose last evaluation reached the mark
    assert load_config(first / "initial") == model_config(spec)
    leaves = dict(iter_leaves(first / "initial", model_config(spec)))
    assert all(leaf.dtype == np.float32 and np.isfinite(leaf).all() for leaf in leaves.values())
    record = json.loads((model / "warm_start.json").read_bytes())
    curve = record["curve"]
    assert curve[-1]["answer_probability"] >= 1e-4 > curve[0]["answer_probability"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    # and both runs are told that so early a model samples nothing right, with what to change
    assert record["sampled_right"] == {"train": 0.0, "held_out": 0.0}
    assert caplog.text.count("sampled at temperature 1: 0% of training problems") == 2
    assert caplog.text.count("raise warm_start.stop_answer_probability") == 2
    # and its tokenizer is the task's
    assert len(load_task_set(spec, first / "initial")) > 0


def put_in_cache(spec: RunSpec, cache: Path, folder: Path) -> Path:
    """A start as if it had been made before."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    load_warm_start_data(spec).write_tokenizer(tokenizer)
    model = cache / warm_start_digest(spec, tokenizer)
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    record = {
        "curve": [{"answer_probability": 0.5}],
        "sampled_right": {"train": 0.25, "held_out": 0.125},
        "model.safetensors": digest_bytes(b"weights"),
    }
    (model / "warm_start.json").write_text(json.dumps(record))
    return model


def test_what_another_run_has_begun_in_the_cache_is_left_alone(tmp_path):
    # given a start that is in the cache, and another run that is making a different one there
    spec, cache = spec_with(), tmp_path / "cache"
    model = put_in_cache(spec, cache, tmp_path)
    begun = cache / ".tmp-0123-another"
    begun.mkdir()
    run_dir, told = run_dir_of(tmp_path / "a", spec), threading.Event()
    log = logging.Logger("one of its own")
    log.addFilter(lambda record: told.set() or True)
    with ThreadPoolExecutor() as pool:
        holder = open_folder_lock(cache)
        fcntl.flock(holder, fcntl.LOCK_EX)
        # when ours starts, then it says that it waits and removes nothing of the other's
        made = pool.submit(make_initial_model, run_dir, cache, log)
        told.wait()
        assert begun.is_dir() and not made.done()
        # and when the other is dead, then what it left goes, and ours goes on
        os.close(holder)
        assert made.result() == model
    assert not begun.exists()
    assert (run_dir / "initial").resolve() == model.resolve()


def test_a_damaged_start_in_the_cache_is_named_and_not_used(tmp_path):
    # given a start in the cache
    spec, cache = spec_with(), tmp_path / "cache"
    model = put_in_cache(spec, cache, tmp_path)
    weights = model / "model.safetensors"
    # when a bit of its weights flips, they are cut short or gone, or its record is torn
    for number, damage in enumerate(
        [
            lambda: weights.write_bytes(b"weightr"),
            lambda: weights.write_bytes(b"wei"),
            weights.unlink,
            lambda: (model / "warm_start.json").write_text("{"),
        ]
    ):
        damage()
        # then another run of it is told which directory to delete, and gets no model
        run_dir = run_dir_of(tmp_path / f"run-{number}", spec)
        with pytest.raises(RunStopped, match="cached warm start is damaged") as failure:
            make_initial_model(run_dir, cache, LOG)
        assert failure.value.place == str(model)
        assert "delete this directory" in (failure.value.remedy or "")
        assert not (run_dir / "initial").is_symlink()


def test_a_mark_out_of_reach_is_an_error_with_the_number_reached(tmp_path):
    spec = spec_with({"max_updates": 7, "stop_answer_probability": 0.9})
    run_dir, cache = run_dir_of(tmp_path / "a", spec), tmp_path / "cache"
    with pytest.raises(RunStopped, match=r"after 7 updates .* is 0\.0\d+, the mark 0\.9") as error:
        make_initial_model(run_dir, cache, LOG)
    assert "lower stop_answer_probability" in (error.value.remedy or "")
    # then nothing half-made lies in the cache or in the run
    assert [entry.name for entry in cache.iterdir()] == [".lock"]
    assert not (run_dir / "initial").is_symlink()


def test_the_digest_follows_all_that_the_model_follows_from(tmp_path):
    # given a tokenizer's files and a spec
    load_warm_start_data(spec_with()).write_tokenizer(tmp_path)
    base = warm_start_digest(spec_with(), tmp_path)
    # then what the start does not see changes nothing
    assert warm_start_digest(spec_with(steps=9, optimizer={"lr": 1.0}), tmp_path) == base
    # and what it sees changes the digest
    (pool,) = spec_with().model_dump(mode="json")["samplers"]
    source = {"name": "words", "kind": "reasoning_gym", "dataset": "spell_backward", "size": 7}
    changed = [
        spec_with({"lr": 1e-3}),
        spec_with(seed=8),
        spec_with(data={"max_prompt_tokens": 48, "sources": [source]}),
        spec_with(reward=[{"name": "task", "kind": "reasoning_gym"}]),
        spec_with(samplers=[{**pool, "max_new_tokens": pool["max_new_tokens"] - 1}]),
    ]
    digests = {warm_start_digest(spec, tmp_path) for spec in changed}
    (tmp_path / "tokenizer.json").write_text("another")
    digests.add(warm_start_digest(spec_with(), tmp_path))
    assert len(digests) == 6 and base not in digests


END, NEW = 7, 12
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3], [5], [8, 9, 7], [9, 3], [2], [3, 8], [4, 6, 2, 6]]


@pytest.fixture(scope="module")
def model() -> tuple[RunSpec, ModelConfig, Any]:
    short = [{**spec_with().samplers[0].model_dump(), "max_new_tokens": NEW}]
    spec = spec_with(seed=3, samplers=short)
    config = model_config(spec)
    params = init_params(config, jax.random.key(0))
    # with weights this large the tokens before decide what follows
    params = jax.tree.map(lambda x: 6 * x, params)
    return spec, config, shard_params(params, abstract_params(config), make_mesh(spec.learner.mesh))


@pytest.fixture(scope="module")
def outputs(model: Any) -> list[list[int]]:
    spec, config, params = model
    return list(sample(spec, config, params, PROMPTS, END))


def test_each_token_is_drawn_from_a_forward_pass_over_those_before(model, outputs):
    spec, config, params = model

    @jax.jit  # of one shape
    def logits_of(tokens: jax.Array) -> jax.Array:
        policy, positions = bind(config, params), jnp.arange(tokens.shape[1])[None]
        hidden = policy(tokens, jnp.ones_like(tokens), positions, Execution(jnp.float32))
        return hidden[0] @ policy.head_weight()

    key, rows = jax.random.key(spec.seed), spec.learner.packing.rows
    assert len(outputs) == len(PROMPTS) > rows
    for begin in range(0, len(PROMPTS), rows):
        key, now = jax.random.split(key)
        for row, (prompt, output) in enumerate(
            zip(PROMPTS[begin : begin + rows], outputs[begin : begin + rows], strict=True)
        ):
            # when the whole output is computed at once, in a row of its own
            text = [*prompt, *output]
            tokens = np.pad(text, (0, 32 - len(text)))[None]
            logits = np.asarray(logits_of(tokens))[len(prompt) - 1 : len(text) - 1]
            # then each token wins the race of its logits with the noise of its step and row
            for step, (token, values) in enumerate(zip(output, logits, strict=True)):
                noise = jax.random.gumbel(jax.random.fold_in(now, step), (rows, len(values)))[row]
                assert token == int(jnp.argmax(values + noise))
    # and an output ends at its end token or at the limit
    assert all(len(output) == NEW or output[-1] == END for output in outputs)
    assert all(END not in output[:-1] for output in outputs)


def test_an_answer_counts_where_it_is_the_traces_behind_the_first_think_end(model, outputs):
    spec, config, params = model

    class Turns:
        """A trace of several turns, which is left out."""

        eos_token_id, trace = END, Trace(PROMPTS[0], outputs[0], 1, [True] * len(outputs[0]))

        def traces(self, rng: Any, count: int, split: str) -> list[Trace]:
            return [self.trace]

    class Known:
        """Traces whose answers are the ends of what the model samples, every other one changed."""

        eos_token_id = END

        def traces(self, rng: Any, count: int, split: str) -> list[Trace]:
            changed = [[*output[:-1], output[-1] + (i % 2)] for i, output in enumerate(outputs)]
            ends = [max(1, len(output) - 3) for output in outputs]
            one_turn = [Trace(*each) for each in zip(PROMPTS, changed, ends, strict=True)]
            return [*one_turn, Turns.trace]

    begins = [max(1, len(output) - 3) - 1 for output in outputs]
    right = [
        i % 2 == 0 and output[at] not in output[:at]
        for i, (output, at) in enumerate(zip(outputs, begins, strict=True))
    ]
    assert 0 < sum(right) < len(right) / 2 + 1
    assert sampled_right(spec, config, params, Known(), "train") == np.mean(right)
    assert sampled_right(spec, config, params, Turns(), "train") is None


def test_of_a_trace_of_several_turns_only_the_policys_tokens_train():
    # given a trace whose observation is tokens 4 and 5, and whose answer begins at token 6
    spec, own = spec_with(), [True, False, False, True, True]
    trace = Trace([1, 2], [3, 4, 5, 6, 7], 3, own)
    # when its rows are made
    rows = _rows(_short_run(spec, spec.warm_start), [trace], 4.0)
    # then these are the targets, and an answer's weigh more
    targets = rows.batch.targets
    assert targets[targets >= 0].tolist() == [3, 6, 7]
    assert rows.weights[targets >= 0].tolist() == [1.0, 4.0, 4.0]
    assert not rows.weights[targets < 0].any()
