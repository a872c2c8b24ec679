"""The torch engine against the JAX engine and transformers, on the same published bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import learner_jax.prefill as jax_engine
from learner_jax.sharding import make_mesh
from runspec.core import schema
from runspec.core.errors import UserError
from sampler import prefill as torch_engine
from sampler.prefill import batches_by_length
from tests.learner_jax.families import FAMILIES, VOCABULARY, saved
from tests.learner_jax.test_prefill import in_turns
from tests.verify.small_model import small_spec
from verify.checks.prefill import judge_proofs
from verify.noise import gumbel
from verify.plugins import PrefillInput, PrefillOutput
from verify.recompute import TokenFacts, Wanted, token_facts
from verify.thresholds import BFLOAT16, FLOAT32
from verify.toploc import build_proofs
from verify.toploc.statistics import verify_proofs
from verify.truncation import Truncation

pytestmark = pytest.mark.slow

CPU = [torch.device("cpu")]
TEMPERATURE, END = 0.7, 3
QWEN3 = "qwen3, head_dim is not D / H"


def learner(dtype: str = "float32") -> schema.Learner:
    packing = schema.Packing(tokens=32, rows=4)  # mistral's window in these families is 33
    return small_spec().learner.model_copy(update={"packing": packing, "compute_dtype": dtype})


def loaded(name: str, dtype: str = "float32", devices: list[torch.device] = CPU):
    return torch_engine.load_policy(saved(name), learner(dtype), devices)


def prefill(policy, inputs: list[PrefillInput], **options) -> list[PrefillOutput]:
    return torch_engine.prefill(policy, inputs, temperature=TEMPERATURE, **options)


@cache
def rollouts() -> list[PrefillInput]:
    """More than one batch of either engine, of all lengths."""
    rng = np.random.default_rng(1)
    return [
        PrefillInput(
            rng.integers(0, VOCABULARY, rng.integers(1, 12)).astype(np.int32),
            rng.integers(0, VOCABULARY, rng.integers(1, 20)).astype(np.int32),
            (int(rng.integers(-(2**31), 2**31)), number),
        )
        for number in range(30)
    ]


def groups_of_samples() -> list[PrefillInput]:
    """Prompts with several outputs each, of which one has one token."""
    prompts = [each.prompt_tokens for each in rollouts()[:4]]
    outputs = [each.output_tokens for each in rollouts()[5:9]] + [np.array([4], np.int32)]
    return [
        PrefillInput(prompt, output, (number, 1))
        for prompt in prompts
        for number, output in enumerate(outputs)
    ]


def tokens_of(given: PrefillInput) -> np.ndarray:
    """[m], the sampled tokens."""
    return given.output_tokens[given.sampled]


def logits_alone(policy, given: PrefillInput) -> np.ndarray:
    """[m, V], logits / T of one rollout, by transformers' model on it alone."""
    text = torch.from_numpy(np.concatenate([given.prompt_tokens, given.output_tokens]))
    with torch.inference_mode():
        states = policy.body(input_ids=text.long()[None]).last_hidden_state[0]
        states = states[len(given.prompt_tokens) - 1 + given.sampled]
        logits = states.to(policy.head.dtype) @ policy.head.T
    return (logits / TEMPERATURE).numpy()


def logprobs_alone(policy, given: PrefillInput) -> np.ndarray:
    every = torch.log_softmax(torch.from_numpy(logits_alone(policy, given)), -1).numpy()
    return every[np.arange(len(every)), tokens_of(given)]


def as_float(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(torch_engine, "CPU_POSITIONS", 100)
    monkeypatch.setattr(torch_engine, "CPU_NUMBERS", 0)
    monkeypatch.setitem(torch_engine.CHUNK_LOGITS, "cpu", 7 * VOCABULARY)
    monkeypatch.setitem(torch_engine.JUDGED_LOGITS, "cpu", 3 * VOCABULARY)


@pytest.mark.parametrize(
    ("name", "dtype", "limits"),
    [
        ("qwen2, tied", "float32", FLOAT32),
        (QWEN3, "float32", FLOAT32),
        ("llama 3", "float32", FLOAT32),
        (QWEN3, "bfloat16", BFLOAT16),
    ],
)
def test_both_engines_say_the_same_and_pass_each_others_proofs(name, dtype, limits):
    inputs, exact = rollouts(), loaded(name)
    exact.body.double()
    exact = replace(exact, head=exact.head.double())
    jax_policy = jax_engine.load_policy(saved(name), learner(dtype), make_mesh(schema.Mesh()))
    ours = prefill(loaded(name, dtype), inputs)
    theirs = jax_engine.prefill(jax_policy, inputs, temperature=TEMPERATURE)
    for one, other, given in zip(ours, theirs, inputs, strict=True):
        statistics = verify_proofs(one.hidden, build_proofs(other.hidden))
        assert all(result.passed for result in judge_proofs(statistics, limits))
        assert one.hidden.shape == (len(given.output_tokens), 30)
        assert one.choices is None
        dtypes = (one.hidden.dtype, one.logprobs.dtype, one.seeded_gap.dtype)
        assert dtypes == (np.uint16, np.float32, np.float32)
        if dtype == "bfloat16":  # of tokens that nobody sampled
            assert np.abs(one.logprobs - other.logprobs).mean() <= BFLOAT16.logprob_rollout
            continue
        # both with their own rounding, which depends on the machine's kernels
        truth = logprobs_alone(exact, given)
        np.testing.assert_allclose(one.logprobs, truth, rtol=0, atol=2e-5)
        np.testing.assert_allclose(other.logprobs, truth, rtol=0, atol=2e-5)
        np.testing.assert_allclose(one.seeded_gap, other.seeded_gap, atol=5e-5)
        hidden = as_float(one.hidden), as_float(other.hidden)
        np.testing.assert_allclose(*hidden, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_computed_together_as_alone_and_with_shared_prompts(name, monkeypatch):
    # given each family, its biases, RoPE variants and windows
    policy = loaded(name)
    # when rollouts are prefilled together, then each has what transformers says of it alone
    for output, given in zip(prefill(policy, rollouts()[:8]), rollouts()[:8], strict=True):
        np.testing.assert_allclose(output.logprobs, logprobs_alone(policy, given), atol=1e-5)
    # and whether prompts of groups are computed once changes nothing but rounding
    groups, found = groups_of_samples(), {}
    for share in (0.0, 2.0):  # of repeated prompts: any is enough, none is
        monkeypatch.setattr(torch_engine, "WORTH_SHARING", share)
        found[share] = prefill(policy, groups)
    for ours, whole, given in zip(found[0.0], found[2.0], groups, strict=True):
        assert len(ours.logprobs) == len(given.output_tokens)
        np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-5)
        hidden = as_float(ours.hidden), as_float(whole.hidden)
        np.testing.assert_allclose(*hidden, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 2.0])  # of repeated prompts: any is enough, none is
def test_only_sampled_tokens_have_numbers_and_their_noise_counts_no_others(share, monkeypatch):
    # given rollouts in whose outputs the policy sampled some of the tokens
    monkeypatch.setattr(torch_engine, "WORTH_SHARING", share)
    policy, whole = loaded("qwen2, tied"), [*groups_of_samples(), *rollouts()[:6]]
    inputs = [in_turns(each) for each in whole]
    # when they are prefilled, and the same sequences as outputs of one turn
    outputs, others = prefill(policy, inputs), prefill(policy, whole)
    for output, other, given in zip(outputs, others, inputs, strict=True):
        own = given.sampled
        # then the states of sampled tokens have the same bits, and their log-probs are the same
        np.testing.assert_array_equal(output.hidden, other.hidden[own])
        np.testing.assert_allclose(output.logprobs, other.logprobs[own], atol=1e-5)
        # and the gaps are those of the noise at their index among the sampled tokens
        noisy = logits_alone(policy, given) + noise_of(given, np.arange(VOCABULARY, dtype=np.int32))
        gaps = noisy.max(-1) - noisy[np.arange(len(own)), tokens_of(given)]
        np.testing.assert_allclose(output.seeded_gap, gaps, atol=5e-5)


@pytest.mark.parametrize("rule", [None, Truncation(0.8, 10, 0.1)], ids=str)
def test_gaps_and_distributions_are_those_of_their_definitions(rule):
    # given rollouts that are seeded, that are not, and one that asks for nothing, some of them of
    # several turns
    policy = loaded("qwen2, tied")
    own = [in_turns(each) if n % 2 else each for n, each in enumerate(rollouts())]
    asking = [replace(r, noise_key=None, end_token=END) for r in own[10:20]]
    inputs = [*own[:10], *asking, replace(own[20], noise_key=None)]
    # when they are prefilled together, then each has what its own logits say in numpy
    for output, given in zip(prefill(policy, inputs, truncation=rule), inputs, strict=True):
        scaled = logits_alone(policy, given)
        ids = np.arange(VOCABULARY, dtype=np.int32)[None]
        chosen = ids == tokens_of(given)[:, None]
        noise = noise_of(given, ids)
        wanted = Wanted(noise is not None, given.end_token is not None, rule)
        facts = token_facts(np, scaled, noise, chosen, ids == END, wanted)
        np.testing.assert_allclose(output.logprobs, facts.logprobs, atol=2e-5)
        assert (output.seeded_gap is None) == (noise is None)
        if output.seeded_gap is not None:
            np.testing.assert_allclose(output.seeded_gap, facts.gaps, atol=5e-5)
        assert (output.choices is None) == (facts.choices is None)
        for column, expected in zip(output.choices or (), facts.choices or (), strict=True):
            assert column.dtype == np.float32
            np.testing.assert_allclose(column, expected, atol=5e-5)


def noise_of(given: PrefillInput, ids: np.ndarray) -> np.ndarray | None:
    """f32 [m, V]; None where it is not seeded."""
    if given.noise_key is None:
        return None
    position = np.arange(len(given.sampled), dtype=np.int32)[:, None]
    with np.errstate(over="ignore"):
        return np.asarray(gumbel(np, *map(np.int32, given.noise_key), position, ids))


def test_a_long_rollout_is_a_batch_of_its_own_and_none_is_no_work():
    policy = loaded("llama 3")
    longest = PrefillInput(np.arange(12, dtype=np.int32), np.arange(20, dtype=np.int32), (1, 2))
    (output,) = prefill(policy, [longest])
    assert output.logprobs.shape == (20,)
    assert prefill(policy, []) == []
    # and one that the learner could not train is an error, as it is of the JAX engine
    with pytest.raises(UserError, match="a rollout has 33 tokens"):
        prefill(policy, [replace(longest, prompt_tokens=np.arange(13, dtype=np.int32))])


@pytest.mark.parametrize("inputs", [rollouts(), groups_of_samples()], ids=["whole", "shared"])
def test_layers_over_several_devices_give_the_same_bits(inputs):
    # given three stages, each on its own device in effect: the one CPU, three times
    alone, divided = (
        prefill(loaded("qwen3, biases", "bfloat16", CPU * stages), inputs) for stages in (1, 3)
    )
    for one, other in zip(alone, divided, strict=True):
        np.testing.assert_array_equal(one.hidden, other.hidden)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.seeded_gap, other.seeded_gap)


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_a_stage_computes_with_is_on_its_device(name):
    # given a second device that is not the first: tensors there have shapes and no numbers, and no
    # operation takes tensors of both
    policy = loaded(name, devices=[*CPU, torch.device("meta")])
    kinds = [next(layer.parameters()).device.type for layer in policy.body.layers]
    assert set(kinds) == {"cpu", "meta"} and kinds == sorted(kinds)
    assert policy.head.device.type == policy.body.norm.weight.device.type == "meta"
    assert policy.body.embed_tokens.weight.device.type == "cpu"
    # then a version needs no device whole, and the states come out on the last
    for inputs in (rollouts(), groups_of_samples()):
        with torch.inference_mode():
            batches = list(
                torch_engine.hidden_states(policy.body, inputs, positions=100, device=CPU[0])
            )
        assert all(hidden.device.type == "meta" for _, hidden in batches)
        assert sum(len(members) for members, _ in batches) == len(inputs)


def test_a_batch_is_fetched_once_every_stage_has_one():
    launched: list[int] = []

    def compute():
        for number in range(5):
            launched.append(number)
            numbers = torch.full((1,), number)
            yield [number], TokenFacts(numbers, None, None, numbers.short())

    fetched = torch_engine._fetched(compute(), stages=3)
    behind = [(members[0], len(launched)) for members, _ in fetched]
    assert behind == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


def test_a_validator_takes_the_gpus_of_its_hardware(monkeypatch):
    # given a fake driver with four GPUs
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = schema.Hardware(kind="h100-80g", count=2)
    assert torch_engine._devices(two) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert len(torch_engine._devices(None)) == 4
    with pytest.raises(UserError, match="8 GPUs a validator, and this process sees 4"):
        torch_engine._devices(schema.Hardware(kind="h100-80g", count=8))
    # then each needs room for its own part of a version
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * 10**9, 80 * 10**9))
    assert torch_engine._has_room(65 * 10**9, torch_engine._devices(two))
    assert not torch_engine._has_room(65 * 10**9, [torch.device("cuda", 0)])


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("no norm", r"not this model's.*model\.norm\.weight"),  # transformers would draw it
        ("damaged", "cannot load the weights"),
        ("missing", "cannot load the weights"),
        ("gpt2", "model_type 'gpt2' is not supported"),
    ],
)
def test_a_version_that_is_not_whole_or_of_no_family_is_refused(flaw, says, tmp_path):
    for file in saved("llama 3").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if flaw == "no norm":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif flaw == "damaged":
        weights.write_bytes(b"\0" * 64)
    elif flaw == "missing":
        weights.unlink()
    else:
        config.write_text(config.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(UserError, match=says):
        torch_engine.load_policy(tmp_path, learner(), CPU)


@hypothesis.settings(derandomize=True)
@hypothesis.given(st.lists(st.integers(2, 60), max_size=50), st.integers(1, 200))
def test_every_rollout_is_in_one_batch_within_the_bound(lengths, positions):
    batches = list(batches_by_length(lengths, positions=positions))
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or len(batch) * longest <= positions
    # and none of a later batch is longer than one of an earlier
    order = [lengths[number] for batch in batches for number in batch]
    assert order == sorted(order, reverse=True)
