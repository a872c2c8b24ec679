"""The prefill engine against the plain formula on each rollout alone, prompts computed once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.publisher import Publisher
from broadcast.relay import run_origin
from learner_jax.checkpoint import save_params
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.packing import Rows, Sample
from learner_jax.prefill import JaxPrefill, Policy, prefill, samples_of
from learner_jax.sharding import Execution, make_mesh, shard_params
from learner_jax.shared_prompts import MOST_REPEATS, Shape, divide, halved, lay_out, shape_for
from learner_jax.warm_start import model_config
from runspec.core import schema
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.run_files import params_folder
from sampler.prefill import TorchPrefill
from tests.broadcast.conftest import Served
from tests.learner_jax.conftest import VOCABULARY, Run, changed, tiny_spec, write_initial_model
from verify.noise import gumbel
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation, load_prefill_engine
from verify.truncation import Truncation, describe, judged

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7
LOG = logging.getLogger("test")
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


def grouped(groups: list[tuple[int, list[int]]]) -> list[PrefillInput]:
    """Of each group the prompt's length and the outputs' lengths, in mixed order."""
    rng = np.random.default_rng(0)
    made = []
    for length, counts in groups:
        prompt = rng.integers(0, VOCABULARY, length).astype(np.int32)
        made += [
            PrefillInput(prompt, rng.integers(0, VOCABULARY, n).astype(np.int32), (n, 7))
            for n in counts
        ]
    return [made[i] for i in rng.permutation(len(made))]


@cache
def policy(devices: int = 1, version: int = 0) -> Policy:
    spec, mesh = tiny_spec(), make_mesh(schema.Mesh(fsdp=devices))
    config = model_config(spec)
    params = init_params(config, jax.random.key(version))
    return Policy(shard_params(params, abstract_params(config), mesh), config, spec.learner, mesh)


@partial(jax.jit, static_argnames="config")
def hidden_of(params: Any, tokens: jax.Array, length: jax.Array, config: ModelConfig) -> Any:
    """Hidden states and logits of the first `length` of [1, ROW] tokens."""
    positions = jnp.arange(tokens.shape[1])[None]
    bound, filled = bind(config, params), (positions < length).astype(jnp.int32)
    hidden = bound(tokens, filled, positions, Execution(jnp.float32))[0]
    return hidden, hidden @ bound.head_weight()


def in_turns(rollout: PrefillInput) -> PrefillInput:
    """The rollout, of whose output the first and the last token and some others were sampled."""
    own = np.random.default_rng(0).random(len(rollout.output_tokens)) < 0.5
    own[[0, -1]] = True
    return replace(rollout, own=own)


def states_alone(policy: Policy, rollout: PrefillInput) -> tuple[np.ndarray, np.ndarray]:
    """One rollout, no packing: u16 [m, D] of the hidden states, f64 [m, V] of logits / T."""
    text = np.concatenate([rollout.prompt_tokens, rollout.output_tokens])
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, : len(text)] = text
    hidden, all_logits = hidden_of(jax.device_get(policy.params), tokens, len(text), policy.config)
    # The positions that produced the sampled tokens.
    producing = len(rollout.prompt_tokens) - 1 + rollout.sampled
    bits = np.asarray(hidden[producing].astype(jnp.bfloat16)).view(np.uint16)
    return bits, np.asarray(all_logits[producing], np.float64) / TEMPERATURE


def logits_alone(
    policy: Policy, rollout: PrefillInput
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits / T f32, noise f32 and which token is the rollout's own, all [m, V]."""
    scaled = states_alone(policy, rollout)[1].astype(np.float32)
    first, second = (np.int32(word) for word in rollout.noise_key or (0, 0))
    position, token = np.ogrid[: len(scaled), :VOCABULARY]
    with np.errstate(over="ignore"):
        noise = gumbel(np, first, second, position.astype(np.int32), token.astype(np.int32))
    return scaled, np.asarray(noise), token == rollout.output_tokens[rollout.sampled, None]


def alone(policy: Policy, rollout: PrefillInput) -> PrefillOutput:
    """The definition: one rollout, no packing, all logits, float64 after them."""
    bits, logits = states_alone(policy, rollout)
    own = np.arange(len(logits)), rollout.output_tokens[rollout.sampled]
    logprobs = logits[own] - np.log(np.exp(logits).sum(-1))
    noisy = logits + logits_alone(policy, rollout)[1]
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
def test_every_rollout_gets_what_it_would_get_alone(devices):
    # given more rollouts than one microbatch holds, of all lengths, and groups that share prompts,
    # among them outputs of one token and a prompt of one
    groups = [(17, [9, 1, 30, 12]), (1, [1, 1, 5]), (30, [20, 20, 3]), (8, [25] * 6)]
    subject, given = policy(devices), rollouts(20) + grouped(groups)
    # when they are prefilled together
    outputs = prefill(subject, given, temperature=TEMPERATURE)
    # then each has the log-probs, hidden states and gaps of the definition
    for output, rollout in zip(outputs, given, strict=True):
        assert_alone(output, subject, rollout)


@pytest.mark.parametrize(
    "whole", [rollouts(20), grouped([(17, [9, 1, 30, 12]), (8, [25] * 6)])], ids=["apart", "shared"]
)
def test_only_sampled_tokens_have_numbers_and_their_noise_counts_no_others(whole):
    # given rollouts in whose outputs the policy sampled some of the tokens
    subject, given = policy(), [in_turns(each) for each in whole]
    # when they are prefilled, and the same sequences as outputs of one turn
    outputs, others = (prefill(subject, some, temperature=TEMPERATURE) for some in (given, whole))
    for output, other, rollout in zip(outputs, others, given, strict=True):
        own = rollout.sampled
        # then the states of sampled tokens have the same bits, and their log-probs are the same
        np.testing.assert_array_equal(output.hidden, other.hidden[own])
        np.testing.assert_allclose(output.logprobs, other.logprobs[own], atol=2e-6)
        # and the gaps are those of the definition
        assert_alone(output, subject, rollout)


@pytest.mark.parametrize("rule", [Truncation(0.9, -1, 1e-3), Truncation(0.8, 10, 0.1)], ids=str)
def test_a_truncated_distribution_is_judged_by_its_definition(rule):
    # given rollouts of any tokens, most of which top-k and top-p would not have kept
    subject, given = policy(), rollouts(12)
    # when they are prefilled under the rule
    outputs = prefill(subject, given, temperature=TEMPERATURE, truncation=rule)
    # then log-probs and gaps are those of the rule on all logits of each rollout alone
    outside = 0
    for output, rollout in zip(outputs, given, strict=True):
        assert output.seeded_gap is not None
        scaled, noise, own = logits_alone(subject, rollout)
        logprob, gap = judged(np, scaled, noise, own, rule)
        np.testing.assert_allclose(output.logprobs, logprob, atol=1e-5)
        np.testing.assert_allclose(output.seeded_gap, gap, atol=1e-5)
        outside += int((output.seeded_gap > 2 * rule.margin).sum())
    assert outside > 0


@pytest.mark.parametrize("rule", [None, Truncation(0.8, 10, 0.1)], ids=str)
def test_unseeded_tokens_come_with_what_the_distributions_say(rule):
    # given rollouts without noise, the first of which asks for nothing
    subject, (first, *given) = policy(), rollouts(12, seeded=False)
    asking = [replace(each, end_token=3) for each in given]
    # when they are prefilled
    (plain, *outputs) = prefill(subject, [first, *asking], temperature=TEMPERATURE, truncation=rule)
    # then those that ask have what is said of all logits of each rollout alone
    assert plain.choices is None
    for output, rollout in zip(outputs, asking, strict=True):
        scaled, _, own = logits_alone(subject, rollout)
        expected = describe(np, scaled, own, np.arange(VOCABULARY)[None] == 3, rule)
        assert output.choices is not None and output.seeded_gap is None
        for name, values in expected._asdict().items():
            found = getattr(output.choices, name)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, values, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(output.logprobs, output.choices.logprobs)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, str]]:
    """A run with versions 0 to 3 published, and the URL of its origin."""
    run = Run(tmp_path_factory.mktemp("published") / "run", tiny_spec())
    write_initial_model(run)
    for version in range(4):
        params = policy(version=version).params
        save_params(params_folder(run.path, run.spec), version, params, {"sequences": []})()
        Publisher(run.path, run.spec, LOG).publish_new()
    store = run.path / "store" / "origin"
    origin = Served(lambda started: run_origin(store, log=LOG, started=started))
    yield run, origin.url
    origin.stop()


def digest_of(run: Run, version: int) -> str:
    """Digest of a published version's manifest."""
    folder = run.path / "store" / "origin" / run.spec.name / "versions" / str(version)
    return digest_bytes((folder / "manifest.json").read_bytes())


@pytest.mark.parametrize(("name", "kind"), [("jax", JaxPrefill), ("torch", TorchPrefill)])
def test_versions_are_fetched_checked_and_kept_apart(name, kind, published, tmp_path, monkeypatch):
    # given an engine, loaded by its name, that knows the run's root key and a URL, of a run that
    # trains adapters, whose versions are merged weights
    monkeypatch.setattr("learner_jax.prefill.keep_compiled", lambda folder: None)
    run, url = published
    where = WeightsLocation(run.spec.name, [url], run.root.public_hex, tmp_path / "cache")
    spec = changed(run.spec, verify={"engine": name}, learner={"lora": schema.Lora(rank=2)})
    engine = load_prefill_engine(spec, where)
    assert isinstance(engine, kind)
    given = rollouts(3)
    # when versions are asked for in turn, as leases of different lag do
    for version in (3, 1, 2, 3, 1):
        path = engine.ensure_version(version, digest_of(run, version), deadline_s=600)
        outputs = engine.prefill(version, given, temperature=TEMPERATURE)
        # then each is the model of that version
        for output, rollout in zip(outputs, given, strict=True):
            expected = alone(policy(version=version), rollout)
            np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=2e-6)
        assert (path / "model.safetensors").exists()
    # and a manifest other than the lease's is refused
    with pytest.raises(UserError):
        engine.ensure_version(2, "00" * 32, deadline_s=1)
    engine.close()


T = 32


def read_back(seen: Rows, shard: int, rows: int) -> dict[tuple[int, int], list[int]]:
    """The tokens of each segment of a shard's rows, by row and number."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in range(shard * rows, (shard + 1) * rows):
        for source, segment in zip(seen.sources[row], seen.segment_ids[row], strict=True):
            if segment:
                found.setdefault((row, int(segment)), []).append(int(source))
    return found


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(groups=GROUPS, rows=st.integers(1, 4), shards=st.integers(1, 2))
def test_every_rollout_stands_in_a_row_whole_and_its_prompt_is_there_once(groups, rows, shards):
    # given rollouts of any lengths, every other one of several turns, and their parts
    given = [in_turns(each) if n % 2 else each for n, each in enumerate(grouped(groups))]
    inputs = samples_of(given)
    shape = shape_for(inputs, tokens=T, rows=rows)
    assert shape.rows <= MOST_REPEATS * rows
    parts = divide(inputs, shape)
    assert sorted(place.member for part in parts for place in part) == list(range(len(inputs)))
    for start in range(0, len(parts), shards):
        together = parts[start : start + shards]
        fit = halved(shape, together, inputs)
        # when they are laid out
        batch = lay_out(together, inputs, fit, shards)
        seen = batch.shared.seen
        assert isinstance(seen, Rows)
        for shard, part in enumerate(together):
            segments = read_back(seen, shard, fit.rows)
            assert len(segments) == len(part)
            for number, place in enumerate(part, start=1):
                each = inputs[place.member]
                sources = segments[shard * fit.rows + place.row, number]
                # then its row holds prompt and output but for the last token, in order
                text = np.concatenate([each.prompt, each.output[:-1]])
                np.testing.assert_array_equal(batch.tokens[shard, sources], text)
                np.testing.assert_array_equal(batch.positions[shard, sources], np.arange(len(text)))
                # and what predicts the output are the prompt's last position and the output's own
                expected, sampled = sources[len(each.prompt) - 1 :], given[place.member].sampled
                own = slice(place.target, place.target + len(sampled))
                predicted = batch.shared.predicts[shard, own]
                np.testing.assert_array_equal(predicted, np.array(expected)[sampled])
                np.testing.assert_array_equal(batch.targets[shard, own], each.output[sampled])
                assert set(batch.segment_ids[shard, own].tolist()) == {number}
                # and each position is read back from a place where it stands
                flat = seen.sources[shard * fit.rows : (shard + 1) * fit.rows].reshape(-1)
                np.testing.assert_array_equal(flat[seen.places[shard, sources]], sources)
            # and a prompt of the part is there once
            prompts = {p.prompt: inputs[p.member].prompt.tobytes() for p in part}
            assert len(set(prompts.values())) == len(prompts) == sum(p.first for p in part)


def apart(prompts: int, of: int, length: int, output: int) -> list[PrefillInput]:
    """Rollouts of one length, of so many prompts."""
    tokens = np.arange(output, dtype=np.int32)
    return [PrefillInput(np.full(length, n % prompts, np.int32), tokens, None) for n in range(of)]


@pytest.mark.parametrize(
    ("inputs", "tokens", "rows", "expected", "parts"),
    [
        # 184 tokens in rows, 72 positions: 2.6 times, so 2.5
        (apart(1, 8, 16, 8), T, 4, Shape(4 * T, 10, T), [8]),
        # 0.9 % fewer positions than tokens in rows: the rows that no sharing has, one each
        (apart(1, 16, 40, 4000), 4096, 8, Shape(8 * 4096, 8, 4096), [8, 8]),
        (apart(16, 16, 40, 4000), 4096, 8, Shape(8 * 4096, 8, 4096), [8, 8]),
    ],
    ids=["shared", "a little", "apart"],
)
def test_rows_are_as_many_as_prompts_are_shared(inputs, tokens, rows, expected, parts):
    samples = samples_of(inputs)
    shape = shape_for(samples, tokens=tokens, rows=rows)
    assert shape == expected and [len(part) for part in divide(samples, shape)] == parts


def test_parts_that_are_half_empty_are_halved():
    shape = Shape(4 * T, 4, T)
    for groups, expected in (
        ([(10, [10]), (9, [20])], Shape(2 * T, 2, T)),
        ([(10, [20] * 3)], shape),  # a row each
    ):
        samples = samples_of(grouped(groups))
        assert halved(shape, divide(samples, shape), samples) == expected


def test_prompts_are_parted_from_one_another():
    # given the same tokens, divided between prompt and output in two ways
    text = np.arange(9, dtype=np.int32)
    samples = [Sample(text[:n], text[n:]) for n in (3, 5)]
    (part,) = divide(samples, shape_for(samples, tokens=T, rows=2))
    assert [place.first for place in part] == [True, True]
    for one, two in pairwise(sorted(part, key=lambda place: place.prompt)):
        assert one.output + len(samples[one.member].output) - 1 == two.prompt


def test_what_cannot_be_laid_out_is_refused_and_nothing_is_no_work():
    assert prefill(policy(), [], temperature=1.0) == []
    with pytest.raises(ValueError, match="prompt token"):
        shape_for(samples_of(apart(1, 1, 0, 3)), tokens=T, rows=1)
    with pytest.raises(UserError, match="33 tokens"):
        shape_for(samples_of(apart(1, 1, 20, 13)), tokens=T, rows=1)
