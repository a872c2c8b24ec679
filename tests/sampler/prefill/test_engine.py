"""The torch engine against the JAX engine, on the same published bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import learner_jax.prefill as jax_engine
from learner_jax.sharding import make_mesh
from runspec.core.errors import UserError
from runspec.core.spec import schema
from sampler.prefill import engine as torch_engine
from sampler.prefill import states
from sampler.prefill.states import batches_by_length
from tests.learner_jax.families import FAMILIES, VOCABULARY, saved
from tests.verify.small_model import small_spec
from verify.checks.prefill import judge_proofs
from verify.noise import gumbel
from verify.plugins import (
    PrefillInput,
    PrefillOutput,
    WeightsLocation,
    load_prefill_engine,
)
from verify.thresholds import BFLOAT16, FLOAT32
from verify.token_facts import TokenFacts, Wanted, token_facts
from verify.toploc.codec import build_proofs
from verify.toploc.statistics import verify_proofs
from verify.truncation import Truncation

CPU = [torch.device("cpu")]
TEMPERATURE = 0.7
END = 3


def learner(dtype: str = "float32") -> schema.Learner:
    packing = schema.Packing(tokens=32, rows=4)  # mistral's window in these families is 33
    return small_spec().learner.model_copy(update={"packing": packing, "compute_dtype": dtype})


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


def of_torch(name: str, inputs: list[PrefillInput], dtype: str = "float32") -> list[PrefillOutput]:
    policy = torch_engine.load_policy(saved(name), learner(dtype), CPU)
    return torch_engine.prefill(policy, inputs, temperature=TEMPERATURE)


def of_jax(name: str, inputs: list[PrefillInput], dtype: str = "float32") -> list[PrefillOutput]:
    policy = jax_engine.load_policy(saved(name), learner(dtype), make_mesh(schema.Mesh()))
    return jax_engine.prefill(policy, inputs, temperature=TEMPERATURE)


def logits_alone(
    policy: torch_engine.Policy, given: PrefillInput, temperature: float
) -> np.ndarray:
    """f32 [n, V], logits / T of one rollout, by transformers' model on it alone."""
    text = torch.from_numpy(np.concatenate([given.prompt_tokens, given.output_tokens]))
    with torch.inference_mode():
        states = policy.body(input_ids=text.long()[None]).last_hidden_state[0]
        logits = states[len(given.prompt_tokens) - 1 : -1].float() @ policy.head.T
    return (logits / temperature).numpy()


def exact_logprobs(name: str, inputs: list[PrefillInput]) -> list[np.ndarray]:
    """f64 [n] of each rollout, by transformers' model in float64 on it alone."""
    policy = torch_engine.load_policy(saved(name), learner(), CPU)
    body, head = policy.body.double(), policy.head.double()
    found = []
    for given in inputs:
        text = torch.from_numpy(np.concatenate([given.prompt_tokens, given.output_tokens]))
        with torch.inference_mode():
            states = body(input_ids=text.long()[None]).last_hidden_state[0]
            logits = states[len(given.prompt_tokens) - 1 : -1] @ head.T / TEMPERATURE
        all_tokens = torch.log_softmax(logits, -1).numpy()
        found.append(all_tokens[np.arange(len(given.output_tokens)), given.output_tokens])
    return found


def as_float(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "_positions", lambda hidden_size, device: 100)
    monkeypatch.setitem(torch_engine.CHUNK_LOGITS, "cpu", 7 * VOCABULARY)
    monkeypatch.setitem(torch_engine.JUDGED_LOGITS, "cpu", 3 * VOCABULARY)


@pytest.mark.parametrize("name", ["qwen2, tied", "qwen3, head_dim is not D / H", "llama 3"])
def test_in_float32_both_engines_say_the_same(name: str) -> None:
    inputs = rollouts()
    outputs = of_torch(name, inputs), of_jax(name, inputs)
    for ours, theirs, exact, given in zip(
        *outputs, exact_logprobs(name, inputs), inputs, strict=True
    ):
        assert ours.seeded_gap is not None and theirs.seeded_gap is not None
        # both with their own rounding, which depends on the machine's kernels
        np.testing.assert_allclose(ours.logprobs, exact, rtol=0, atol=2e-5)
        np.testing.assert_allclose(theirs.logprobs, exact, rtol=0, atol=2e-5)
        np.testing.assert_allclose(ours.seeded_gap, theirs.seeded_gap, atol=5e-5)
        assert ours.hidden.dtype == np.uint16
        assert ours.hidden.shape == (len(given.output_tokens), 30)
        np.testing.assert_allclose(
            as_float(ours.hidden), as_float(theirs.hidden), rtol=2**-7, atol=1e-5
        )
        assert ours.logprobs.dtype == ours.seeded_gap.dtype == np.float32
        assert ours.choices is None
        statistics = verify_proofs(ours.hidden, build_proofs(theirs.hidden))
        assert all(result.passed for result in judge_proofs(statistics, FLOAT32))


def test_every_family_of_the_learner_is_computed() -> None:
    # given each family, its biases, RoPE variants and windows
    for name in FAMILIES:
        policy = torch_engine.load_policy(saved(name), learner(), CPU)
        # when rollouts are prefilled together, then each has what transformers says of it alone
        together = torch_engine.prefill(policy, rollouts()[:8], temperature=1.0)
        for output, given in zip(together, rollouts()[:8], strict=True):
            scaled = torch.from_numpy(logits_alone(policy, given, 1.0))
            alone = scaled.log_softmax(-1).numpy()
            own = np.arange(len(alone)), given.output_tokens
            np.testing.assert_allclose(output.logprobs, alone[own], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rule", [None, Truncation(0.8, 10, 0.1)], ids=str)
def test_gaps_and_distributions_are_those_of_their_definitions(rule: Truncation | None) -> None:
    # given rollouts that are seeded, that are not, and one that asks for nothing
    policy = torch_engine.load_policy(saved("qwen2, tied"), learner(), CPU)
    seeded, asking = (
        rollouts()[:10],
        [replace(r, noise_key=None, end_token=END) for r in rollouts()[10:20]],
    )
    plain = replace(rollouts()[20], noise_key=None)
    # when they are prefilled together
    outputs = torch_engine.prefill(
        policy, [*seeded, *asking, plain], temperature=TEMPERATURE, truncation=rule
    )
    # then each has what its own logits say in numpy
    for output, given in zip(outputs, [*seeded, *asking, plain], strict=True):
        scaled = logits_alone(policy, given, TEMPERATURE)
        ids = np.arange(VOCABULARY, dtype=np.int32)[None]
        own = ids == given.output_tokens[:, None]
        noise = noise_of(given, ids)
        wanted = Wanted(noise is not None, given.end_token is not None, rule)
        facts = token_facts(np, scaled, noise, own, ids == END, wanted)
        np.testing.assert_allclose(output.logprobs, facts.logprobs, atol=2e-5)
        assert (output.seeded_gap is None) == (noise is None)
        if output.seeded_gap is not None:
            np.testing.assert_allclose(output.seeded_gap, facts.gaps, atol=5e-5)
        assert (output.choices is None) == (facts.choices is None)
        if output.choices is not None and facts.choices is not None:
            for column, expected in zip(output.choices, facts.choices, strict=True):
                assert column.dtype == np.float32
                np.testing.assert_allclose(column, expected, atol=5e-5)


def noise_of(given: PrefillInput, ids: np.ndarray) -> np.ndarray | None:
    """f32 [n, V]; None where it is not seeded."""
    if given.noise_key is None:
        return None
    position = np.arange(len(given.output_tokens), dtype=np.int32)[:, None]
    with np.errstate(over="ignore"):
        return np.asarray(gumbel(np, *map(np.int32, given.noise_key), position, ids))


def test_in_bfloat16_each_engine_passes_the_others_proofs() -> None:
    # given tokens that nobody sampled: log-probs of such differ by more than those of honest ones
    name = "qwen3, head_dim is not D / H"
    ours, theirs = of_torch(name, rollouts(), "bfloat16"), of_jax(name, rollouts(), "bfloat16")
    for one, other in zip(ours, theirs, strict=True):
        statistics = verify_proofs(one.hidden, build_proofs(other.hidden))
        assert all(result.passed for result in judge_proofs(statistics, BFLOAT16))
        assert np.abs(one.logprobs - other.logprobs).mean() <= BFLOAT16.logprob_rollout


def test_a_long_rollout_is_a_batch_of_its_own_and_none_is_no_work() -> None:
    policy = torch_engine.load_policy(saved("llama 3"), learner(), CPU)
    longest = PrefillInput(np.arange(12, dtype=np.int32), np.arange(20, dtype=np.int32), (1, 2))
    (output,) = torch_engine.prefill(policy, [longest], temperature=1.0)
    assert output.logprobs.shape == (20,)
    assert torch_engine.prefill(policy, [], temperature=1.0) == []
    # and one that the learner could not train is an error, as it is of the JAX engine
    longer = replace(longest, prompt_tokens=np.arange(13, dtype=np.int32))
    with pytest.raises(UserError, match="a rollout has 33 tokens"):
        torch_engine.prefill(policy, [longer], temperature=1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_that_are_computed_once_give_what_whole_rollouts_give(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given groups of samples, outputs of one token among them
    prompts = [each.prompt_tokens for each in rollouts()[:5]]
    outputs = [each.output_tokens for each in rollouts()[5:10]] + [np.array([4], np.int32)]
    groups = [
        PrefillInput(prompt, output, (number, 1))
        for prompt in prompts
        for number, output in enumerate(outputs)
    ]
    policy = torch_engine.load_policy(saved(name), learner(), CPU)
    found = {}
    for share in (0.0, 2.0):  # of repeated prompts: any is enough, none is
        monkeypatch.setattr(states, "WORTH_SHARING", share)
        found[share] = torch_engine.prefill(policy, groups, temperature=TEMPERATURE)
    # then sharing changes nothing but rounding
    for ours, whole, given in zip(found[0.0], found[2.0], groups, strict=True):
        assert len(ours.logprobs) == len(given.output_tokens)
        np.testing.assert_allclose(ours.logprobs, whole.logprobs, atol=2e-5)
        np.testing.assert_allclose(
            as_float(ours.hidden), as_float(whole.hidden), rtol=2**-7, atol=1e-5
        )


def groups_of_samples() -> list[PrefillInput]:
    """Two prompts with several outputs each."""
    own = rollouts()
    return [replace(own[i % 2], output_tokens=own[i].output_tokens) for i in range(8)]


@pytest.mark.parametrize("inputs", [rollouts(), groups_of_samples()], ids=["whole", "shared"])
def test_layers_over_several_devices_give_the_same_bits(inputs: list[PrefillInput]) -> None:
    # given three stages, each on its own device in effect: the one CPU, three times
    alone, divided = (
        torch_engine.load_policy(saved("qwen3, biases"), learner("bfloat16"), CPU * stages)
        for stages in (1, 3)
    )
    for one, other in zip(
        torch_engine.prefill(alone, inputs, temperature=TEMPERATURE),
        torch_engine.prefill(divided, inputs, temperature=TEMPERATURE),
        strict=True,
    ):
        np.testing.assert_array_equal(one.hidden, other.hidden)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.seeded_gap, other.seeded_gap)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("inputs", [rollouts(), groups_of_samples()], ids=["whole", "shared"])
def test_whatever_a_stage_computes_with_is_on_its_device(
    name: str, inputs: list[PrefillInput]
) -> None:
    # given a second device that is not the first: tensors there have shapes and no numbers, and no
    # operation takes tensors of both
    devices = [*CPU, torch.device("meta")]
    policy = torch_engine.load_policy(saved(name), learner(), devices)
    kinds = [next(layer.parameters()).device.type for layer in policy.body.layers]
    assert set(kinds) == {"cpu", "meta"} and kinds == sorted(kinds)
    assert policy.head.device.type == policy.body.norm.weight.device.type == "meta"
    assert policy.body.embed_tokens.weight.device.type == "cpu"
    # then a version needs no device whole, and the states come out on the last
    with torch.inference_mode():
        batches = list(states.hidden_states(policy.body, inputs, positions=100, device=CPU[0]))
    assert all(batch.hidden.device.type == "meta" for batch in batches)
    assert sum(len(batch.members) for batch in batches) == len(inputs)


def test_a_batch_is_fetched_once_every_stage_has_one() -> None:
    launched: list[int] = []

    def compute() -> Iterator[tuple[list[int], TokenFacts]]:
        for number in range(5):
            launched.append(number)
            numbers = torch.full((1,), number)
            yield [number], TokenFacts(numbers, None, None, numbers.short())

    behind = [
        (members[0], len(launched)) for members, _ in torch_engine._fetched(compute(), stages=3)
    ]
    assert behind == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


def test_a_validator_takes_the_gpus_of_its_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
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


def copy_of(name: str, folder: Path) -> Path:
    folder.mkdir()
    for file in saved(name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_weights_that_are_not_whole_are_an_error(tmp_path: Path) -> None:
    # given a version that lacks a tensor, which transformers would draw at random
    directory = copy_of("llama 3", tmp_path / "v0")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not this model's.*model\.norm\.weight"):
        torch_engine.load_policy(directory, learner(), CPU)
    # when its weights are damaged, or not there at all, then that is said
    (directory / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(UserError, match="cannot load the weights"):
        torch_engine.load_policy(directory, learner(), CPU)
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot load the weights"):
        torch_engine.load_policy(directory, learner(), CPU)


def test_a_family_that_the_learner_does_not_have_is_refused(tmp_path: Path) -> None:
    directory = copy_of("llama 3", tmp_path / "v0")
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"gpt2"'))
    with pytest.raises(UserError, match="model_type 'gpt2' is not supported"):
        torch_engine.load_policy(directory, learner(), CPU)


def test_the_spec_chooses_the_engine_by_its_name(tmp_path: Path) -> None:
    spec, where = small_spec(), WeightsLocation("small", ["http://x"], "00" * 32, tmp_path)
    chosen = spec.verify.model_copy(update={"engine": "torch"})
    engine = load_prefill_engine(spec.model_copy(update={"verify": chosen}), where)
    assert isinstance(engine, torch_engine.TorchPrefill)
    engine.close()


@hypothesis.given(st.lists(st.integers(2, 60), max_size=50), st.integers(1, 200))
def test_every_rollout_is_in_one_batch_within_the_bound(lengths: list[int], positions: int) -> None:
    batches = list(batches_by_length(lengths, positions=positions))
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[number] for number in batch)
        assert len(batch) == 1 or len(batch) * longest <= positions
    # and none of a later batch is longer than one of an earlier
    order = [lengths[number] for batch in batches for number in batch]
    assert order == sorted(order, reverse=True)
