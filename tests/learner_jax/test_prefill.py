"""The prefill engine against the plain formula on each rollout alone; engines over real HTTP."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.publisher import Publisher
from learner_jax.checkpoint import save_params
from learner_jax.execution import Execution
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.prefill import JaxPrefill, Policy, prefill
from learner_jax.sharding import make_mesh, shard_params
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.models.config import ModelConfig
from runspec.core.run_files import params_folder
from runspec.core.spec import schema
from sampler.prefill.engine import TorchPrefill
from tests.learner_jax.conftest import VOCABULARY, Run, changed, tiny_spec, write_initial_model
from verify.choices import describe
from verify.noise import gumbel
from verify.plugins import (
    PrefillInput,
    PrefillOutput,
    WeightsLocation,
    load_prefill_engine,
)
from verify.truncation import Truncation, judged

TEMPERATURE = 0.7
ROW = 64


def rollouts(count: int, *, seeded: bool = True) -> list[PrefillInput]:
    rng = np.random.default_rng(1)
    return [
        PrefillInput(
            rng.integers(0, VOCABULARY, rng.integers(1, 20)).astype(np.int32),
            rng.integers(0, VOCABULARY, rng.integers(1, 30)).astype(np.int32),
            (int(rng.integers(-(2**31), 2**31)), i) if seeded else None,
        )
        for i in range(count)
    ]


def policy(devices: int, dtype: str = "float32") -> Policy:
    spec = tiny_spec()
    config = model_config(spec)
    mesh = make_mesh(schema.Mesh(fsdp=devices))
    params = init_params(config, jax.random.key(0))
    learner = spec.learner.model_copy(update={"compute_dtype": dtype})
    return Policy(shard_params(params, abstract_params(config), mesh), config, learner, mesh)


@partial(jax.jit, static_argnames=("config", "dtype"))
def hidden_of(
    params: Any, tokens: jax.Array, length: jax.Array, *, config: ModelConfig, dtype: str
) -> tuple[jax.Array, jax.Array]:
    """Hidden states and logits of the first `length` of [1, ROW] tokens."""
    positions = jnp.arange(tokens.shape[1])[None]
    bound = bind(config, params)
    hidden = bound(
        tokens,
        (positions < length).astype(jnp.int32),
        positions,
        Execution(jnp.dtype(dtype)),
    )[0]
    return hidden, (hidden @ bound.head_weight().astype(hidden.dtype)).astype(jnp.float32)


def states_alone(policy: Policy, rollout: PrefillInput) -> tuple[np.ndarray, np.ndarray]:
    """One rollout, no packing: u16 [n, D] of the hidden states, f64 [n, V] of logits / T."""
    text = np.concatenate([rollout.prompt_tokens, rollout.output_tokens])
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, : len(text)] = text
    hidden, all_logits = hidden_of(
        jax.device_get(policy.params),
        tokens,
        len(text),
        config=policy.config,
        dtype=policy.learner.compute_dtype,
    )
    n, p = len(rollout.output_tokens), len(rollout.prompt_tokens)
    producing = slice(p - 1, p - 1 + n)  # the positions that produced the output tokens
    bits = np.asarray(hidden[producing].astype(jnp.bfloat16)).view(np.uint16)
    return bits, np.asarray(all_logits[producing], np.float64) / TEMPERATURE


def noise_alone(rollout: PrefillInput) -> np.ndarray:
    """f32 [n, V]."""
    assert rollout.noise_key is not None
    first, second = (np.int32(word) for word in rollout.noise_key)
    position = np.arange(len(rollout.output_tokens), dtype=np.int32)[:, None]
    token = np.arange(VOCABULARY, dtype=np.int32)[None]
    with np.errstate(over="ignore"):
        return np.asarray(gumbel(np, first, second, position, token))


def logits_alone(
    policy: Policy, rollout: PrefillInput
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits / T f32, noise f32 and which token is the rollout's own, all [n, V]."""
    scaled = states_alone(policy, rollout)[1].astype(np.float32)
    own = np.arange(VOCABULARY) == rollout.output_tokens[:, None]
    return scaled, noise_alone(rollout), own


def alone(policy: Policy, rollout: PrefillInput) -> PrefillOutput:
    """The definition: one rollout, no packing, all logits, float64 after them."""
    bits, logits = states_alone(policy, rollout)
    own = np.arange(len(logits)), rollout.output_tokens
    logprobs = logits[own] - np.log(np.exp(logits).sum(-1))
    gap = None
    if rollout.noise_key is not None:
        noisy = logits + noise_alone(rollout)
        gap = noisy.max(-1) - noisy[own]
    return PrefillOutput(logprobs, bits, gap)


def assert_alone(output: PrefillOutput, policy: Policy, rollout: PrefillInput) -> None:
    """That an output is `alone`, to the rounding of another order of sums."""
    expected = alone(policy, rollout)
    assert expected.seeded_gap is not None and output.seeded_gap is not None
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=2e-6)
    np.testing.assert_allclose(output.seeded_gap, expected.seeded_gap, atol=5e-6)
    states = [x.view(jnp.bfloat16).astype(np.float32) for x in (output.hidden, expected.hidden)]
    # One unit in the last place of bf16; near 0, the rounding of a float32 sum of numbers near 1.
    np.testing.assert_allclose(*states, rtol=2**-7, atol=2e-7)
    assert output.hidden.dtype == np.uint16


@pytest.mark.parametrize("devices", [1, 2])
def test_every_rollout_gets_what_it_would_get_alone(devices: int) -> None:
    # given more rollouts than one microbatch holds, of all lengths
    subject, given = policy(devices), rollouts(40)
    # when they are prefilled together
    outputs = prefill(subject, given, temperature=TEMPERATURE)
    # then each has the log-probs, hidden states and gaps of the definition
    for output, rollout in zip(outputs, given, strict=True):
        assert_alone(output, subject, rollout)


def test_the_seeded_token_has_gap_zero_and_no_other_has() -> None:
    # given a prefix, and a rollout that continues it with each token of the vocabulary
    subject, (start,) = policy(1), rollouts(1)
    candidates = [
        PrefillInput(
            start.prompt_tokens, np.append(start.output_tokens, token).astype(np.int32),
            start.noise_key,
        )
        for token in range(VOCABULARY)
    ]  # fmt: skip
    # when they are prefilled
    outputs = prefill(subject, candidates, temperature=TEMPERATURE)
    # then exactly one of them is the token that the noise chose, and probabilities sum to 1
    gaps = [output.seeded_gap[-1] for output in outputs if output.seeded_gap is not None]
    assert len(gaps) == VOCABULARY and sorted(gaps)[0] == 0.0 < sorted(gaps)[1]
    assert np.exp([output.logprobs[-1] for output in outputs]).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "rule", [Truncation(0.9, -1, 1e-3), Truncation(1.0, 5, 1e-3), Truncation(0.8, 10, 0.1)], ids=str
)
def test_a_truncated_distribution_is_judged_by_its_definition(rule: Truncation) -> None:
    # given rollouts of any tokens, most of which top-k and top-p would not have kept
    subject, given = policy(1), rollouts(12)
    # when they are prefilled under the rule
    outputs = prefill(subject, given, temperature=TEMPERATURE, truncation=rule)
    # then log-probs and gaps are those of the rule on all logits of each rollout alone
    outside = 0
    for output, rollout in zip(outputs, given, strict=True):
        assert rollout.noise_key is not None and output.seeded_gap is not None
        scaled, noise, own = logits_alone(subject, rollout)
        logprob, gap = judged(np, scaled, noise, own, rule)
        np.testing.assert_allclose(output.logprobs, logprob, atol=1e-5)
        np.testing.assert_allclose(output.seeded_gap, gap, atol=1e-5)
        outside += int((output.seeded_gap > 2 * rule.margin).sum())
    assert outside > 0


@pytest.mark.parametrize("rule", [None, Truncation(0.8, 10, 0.1)], ids=str)
def test_unseeded_tokens_come_with_what_the_distributions_say(rule: Truncation | None) -> None:
    # given rollouts without noise, the first of which asks for nothing
    subject, (first, *given) = policy(1), rollouts(12, seeded=False)
    asking = [replace(each, end_token=3) for each in given]
    # when they are prefilled
    (plain, *outputs) = prefill(subject, [first, *asking], temperature=TEMPERATURE, truncation=rule)
    # then those that ask have what is said of all logits of each rollout alone
    assert plain.choices is None
    for output, rollout in zip(outputs, asking, strict=True):
        scaled = states_alone(subject, rollout)[1].astype(np.float32)
        ids = np.arange(VOCABULARY)[None]
        own = ids == rollout.output_tokens[:, None]
        expected = describe(np, scaled, own, ids == 3, rule)
        assert output.choices is not None and output.seeded_gap is None
        for name, values in expected._asdict().items():
            found = getattr(output.choices, name)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, values, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(output.logprobs, output.choices.logprobs)


def test_a_rule_that_cuts_nothing_changes_nothing() -> None:
    subject, given = policy(1), rollouts(3)
    plain = prefill(subject, given, temperature=TEMPERATURE)
    ruled = prefill(subject, given, temperature=TEMPERATURE, truncation=Truncation(margin=0.1))
    for one, two in zip(plain, ruled, strict=True):
        assert np.array_equal(one.logprobs, two.logprobs)
        assert one.seeded_gap is not None and np.array_equal(one.seeded_gap, two.seeded_gap)


def test_unseeded_rollouts_have_no_gap_and_none_is_no_work() -> None:
    subject = policy(1)
    outputs = prefill(subject, rollouts(3, seeded=False), temperature=1.0)
    assert [output.seeded_gap for output in outputs] == [None, None, None]
    assert prefill(subject, [], temperature=1.0) == []


def test_a_rollout_longer_than_a_row_is_an_error_that_says_so() -> None:
    long = PrefillInput(np.zeros(40, np.int32), np.zeros(40, np.int32), None)
    with pytest.raises(UserError, match="80 tokens"):
        prefill(policy(1), [long], temperature=1.0)


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        logging.getLogger("test").debug(format, *args)


@pytest.fixture
def published(run: Run) -> Iterator[tuple[Run, str]]:
    """A run with versions 0 to 3 published, its store served by a plain HTTP server."""
    write_initial_model(run)
    config = model_config(run.spec)
    for version in range(4):
        params = init_params(config, jax.random.key(version))
        save_params(params_folder(run.path, run.spec), version, params, {"sequences": []})()
        Publisher(run.path, run.spec, logging.getLogger("test")).publish_new()
    handler = partial(_QuietHandler, directory=str(run.path / "store" / "origin"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield run, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def digest_of(run: Run, version: int) -> str:
    """Digest of a published version's manifest."""
    folder = run.path / "store" / "origin" / run.spec.name / "versions" / str(version)
    return digest_bytes((folder / "manifest.json").read_bytes())


def test_a_run_with_adapters_is_prefilled(
    published: tuple[Run, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # given the engine of a run that trains adapters, whose versions are merged weights
    run, url = published
    where = WeightsLocation(run.spec.name, [url], run.root.public_hex, tmp_path / "cache")
    engine = JaxPrefill(changed(run.spec, learner={"lora": schema.Lora(rank=2)}), where)
    # when rollouts are prefilled
    engine.ensure_version(1, digest_of(run, 1), deadline_s=20)
    given = rollouts(3)
    outputs = engine.prefill(1, given, temperature=TEMPERATURE)
    engine.close()
    # then each has the log-probs of the published weights
    params = init_params(model_config(run.spec), jax.random.key(1))
    mesh = make_mesh(schema.Mesh(fsdp=1))
    expected = Policy(params, model_config(run.spec), run.spec.learner, mesh)
    for output, rollout in zip(outputs, given, strict=True):
        np.testing.assert_allclose(output.logprobs, alone(expected, rollout).logprobs, atol=2e-6)


@pytest.mark.parametrize(("name", "kind"), [("jax", JaxPrefill), ("torch", TorchPrefill)])
def test_versions_are_fetched_checked_and_kept_apart(
    name: str,
    kind: type,
    published: tuple[Run, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # given an engine, loaded by its name, that knows the run's root key and a URL
    run, url = published
    where = WeightsLocation(run.spec.name, [url], run.root.public_hex, tmp_path / "cache")
    engine = load_prefill_engine(changed(run.spec, verify={"engine": name}), where)
    assert isinstance(engine, kind)
    given = rollouts(3)
    # when versions are asked for in turn, as leases of different lag do
    for version in (3, 1, 2, 3, 1):
        path = engine.ensure_version(version, digest_of(run, version), deadline_s=20)
        outputs = engine.prefill(version, given, temperature=TEMPERATURE)
        # then each is the model of that version
        params = init_params(model_config(run.spec), jax.random.key(version))
        mesh = make_mesh(schema.Mesh(fsdp=1))
        expected = Policy(params, model_config(run.spec), run.spec.learner, mesh)
        for output, rollout in zip(outputs, given, strict=True):
            np.testing.assert_allclose(
                output.logprobs, alone(expected, rollout).logprobs, atol=2e-6
            )
        assert (path / "model.safetensors").exists()
    # and a manifest other than the lease's is refused
    with pytest.raises(UserError):
        engine.ensure_version(2, "00" * 32, deadline_s=1)
    engine.close()
