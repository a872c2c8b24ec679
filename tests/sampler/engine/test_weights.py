"""After a load the engine computes with the new weights, all of them, or says which it lacks."""

from __future__ import annotations

import json
import math
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.safetensors_io import read_headers, read_tensor
from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from sampler.engine.loaded_weights import as_torch
from sampler.engine.requests import Sampled, SampleRequest, probe_difference, read_probe
from tests.harness import standing_still
from tests.sampler.engine.models import (
    END_TOKEN,
    FAMILIES,
    MAX_MODEL_LEN,
    VOCABULARY,
    WAIT_S,
    Reference,
    assert_follows,
    assert_samples,
    assert_takes_over,
    batch,
    call_workers,
    cpu_pool,
    differences,
    perturbed_version,
    running_engine,
    sample,
    save_version,
    weight_groups,
)
from tests.waiting import eventually
from verify.noise import noise_key
from verify.toploc import build_proofs_of
from verify.toploc.statistics import verify_proofs

CORES = len(os.sched_getaffinity(0))
GROUP = "gate_proj.weight"


@pytest.fixture(params=["untied", "tied"])
def held(request):
    """An engine on one rank, with matrices packed as vLLM has them on CPUs, and its version."""
    name = request.param
    engine = request.getfixturevalue("engine" if name == "untied" else "tied_engine")
    return engine, request.getfixturevalue(name)


@pytest.mark.slow
def test_each_weight_group_is_new_after_a_reload(held, tmp_path):
    engine, version = held
    for group in weight_groups(version):
        assert_follows(engine, perturbed_version(version, tmp_path / group, group))
        engine.load(version, 0)


@pytest.mark.slow
def test_a_patched_engine_is_one_that_loaded_the_version(held, tmp_path):
    assert_takes_over(*held, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampler_of_each_family_computes_what_transformers_does(family, tmp_path):
    # given two ranks, whose matrices can be read back, that loaded a version
    version = save_version(tmp_path / "v0", family=FAMILIES[family])
    names = sorted(load_file(version / "model.safetensors"))
    extension = "tests.sampler.engine.plain_matrices.PlainMatricesExtension"
    pool = cpu_pool(tensor=min(2, CORES))
    with running_engine(version, pool, worker_extension_cls=extension) as ranks:
        # then tokens that nobody sampled have the log-probs of transformers, over the whole context
        rng = np.random.default_rng(2)
        lengths = (MAX_MODEL_LEN - 1, 60, 2)
        texts = [rng.integers(2, VOCABULARY, length).tolist() for length in lengths]
        reference = Reference(version)
        expected = [reference.logprobs(text[:1], text[1:])[0] for text in texts]
        found = ranks.prompt_logprobs(texts)
        assert np.abs(np.concatenate(found) - np.concatenate(expected)).mean() < 1e-5
        # and every tensor of the files is read back, but for a packed copy of the head
        report = ranks.load(version, 1)
        assert sorted(report.compared) == names
        assert set(report.repacked) <= {"model.embed_tokens.weight", "lm_head.weight"}
        # and one number that differs on the last rank alone is missed, by its tensors' names alone
        for group in weight_groups(version):
            newer = perturbed_version(
                version, tmp_path / group, group, share=0.0, scale=1e-4, probe=False
            )
            stale = [name for name in names if name.endswith(group)]
            with pytest.raises(UserError, match="other bytes") as error:
                ranks.check(newer, 1)
            assert f"in {len(stale)} tensors: {', '.join(stale)}" in str(error.value)
        # and a quantised parameter is named as one that cannot be read back
        for each in call_workers(ranks, "compare_with_a_norm_in_fp8", weights_dir=str(version)):
            assert each["different"] == [] and "model.norm.weight" in each["repacked"]
        # and the ranks take over a version as one rank does
        assert_takes_over(ranks, version, tmp_path / "taken over")


@pytest.mark.slow
def test_a_tied_head_that_vllm_leaves_stale_is_caught_and_ours_follows_its_embedding(
    tied_engine, tied, tmp_path, monkeypatch
):
    core = tied_engine._client.core
    answers, rpc = {"patch_weights": [False]}, core.rpc

    async def answered(method, **arguments):
        return answers[method] if method in answers else await rpc(method, **arguments)

    monkeypatch.setattr(core, "rpc", answered)
    newer = perturbed_version(tied, tmp_path / "v1", "embed_tokens.weight")
    assert_follows(tied_engine, newer)
    # but where it is loaded as vLLM does alone, without packing a tied head anew
    answers["repack_tied_head"] = []
    with pytest.raises(UserError, match=r"version 2.*embed_tokens"):
        tied_engine.load(tied, 2)
    assert tied_engine.version is None


@pytest.mark.slow
def test_a_bfloat16_engine_agrees_with_float32_on_the_same_bits(tmp_path):
    old = save_version(tmp_path / "v0", tied=True, dtype=torch.bfloat16)
    new = save_version(tmp_path / "v1", tied=True, dtype=torch.bfloat16, seed=1)
    requests = batch(8, 4)
    with running_engine(old, cpu_pool("bfloat16")) as engine:
        sampled = sample(engine, requests)
        assert differences(old, requests, sampled).mean() < 0.02
        reference = Reference(old)
        proofs = build_proofs_of([result.selection for result in sampled])
        for request, result, proof in zip(requests, sampled, proofs, strict=True):
            tokens = result.output_tokens.tolist()
            hidden = reference.forward(list(request.prompt_tokens), tokens)[0]
            bits = torch.from_numpy(hidden).bfloat16().view(torch.int16).numpy().view(np.uint16)
            for chunk in verify_proofs(np.ascontiguousarray(bits), proof):
                assert chunk.exponent_mismatches + chunk.sign_mismatches <= 38 * chunk.k / 128
                assert chunk.mantissa_error_median <= 8
        assert_follows(engine, new, limit=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_of_the_files_is_that_of_torch(tmp_path, dtype):
    values = torch.tensor([1 / 3, -0.0, 6e-8, 65504.0]).to(dtype)
    save_file({"x": values}, tmp_path / "model.safetensors")
    found = as_torch(read_tensor(read_headers(tmp_path)["x"]))
    assert found.dtype == dtype and torch.equal(found, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "scale", "says"),
    [
        ("k_proj.bias", 1e-5, "other bytes.*model.layers.0.self_attn.k_proj.bias"),
        ("embed_tokens.weight", 1e-5, "other bytes.*model.embed_tokens.weight"),
        # packed copies are caught by the probe
        ("v_proj.weight", 0.2, r"log-probs differ.*perhaps stale.*\*\.v_proj\.weight"),
        ("down_proj.weight", 0.2, r"log-probs differ.*perhaps stale.*\*\.down_proj\.weight"),
    ],
)
def test_a_stale_tensor_is_named(engine, untied, tmp_path, group, scale, says):
    newer = perturbed_version(untied, tmp_path / "v9", group, scale=scale, probe=scale > 0.1)

    with pytest.raises(UserError, match=f"version 9.*{says}"):
        engine.check(newer, 9)


@pytest.mark.slow
def test_what_cannot_be_loaded_is_named_and_a_good_version_heals(engine, cramped, untied, tmp_path):
    # given a version without a probe, one that is damaged, and one whose files go after its load
    plain = perturbed_version(untied, tmp_path / "plain", "norm.weight")
    (plain / "probe.json").unlink()
    broken = perturbed_version(untied, tmp_path / "broken", "norm.weight")
    (broken / "model.safetensors").write_bytes(b"no tensors")
    # when they are loaded, then it is said, and nothing is sampled
    with pytest.raises(UserError, match=r"cannot read the probe"):
        engine.load(plain, 1)
    with pytest.raises(UserError, match=r"version 2: vLLM cannot load it") as error:
        engine.load(broken, 2)
    assert error.value.place == str(broken)
    with pytest.raises(RuntimeError, match="no version is loaded"):
        engine.submit(batch(1, 1))
    # until all of a good one is loaded
    gone = perturbed_version(untied, tmp_path / "gone", "norm.weight")
    assert not engine.load(gone, 3).patched
    shutil.rmtree(gone)
    assert not engine.load(untied, 4).patched
    assert engine.version == 4
    # and an engine that asks for no probe takes one without
    cramped.load(plain, 5)
    assert cramped.version == 5


# -- In flight: a trusted pool takes over a version in the middle of rollouts, others when idle ----


@pytest.fixture(scope="module")
def newer(untied, tmp_path_factory):
    return perturbed_version(untied, tmp_path_factory.mktemp("newer") / "v1", GROUP)


def under_way(engine: Engine, requests: list[SampleRequest]) -> Future[list[Sampled]]:
    future = engine.submit(requests)
    eventually(lambda: engine.running < len(requests), "a sequence ends")
    return future


@torch.no_grad()
def computed_by_both(
    old: Reference, new: Reference, prompt: list[int], result: Sampled
) -> np.ndarray:
    """f32 [n]: log-probs of the output where the weights changed in its middle."""
    tokens = torch.tensor([[*prompt, *result.output_tokens.tolist()]])
    before = len(prompt) - 1 + int((result.versions == 0).sum())
    first = old.model(tokens[:, :before], use_cache=True)
    last = new.model(tokens[:, before:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, last.logits], dim=1)[0, len(prompt) - 1 : -1]
    chosen = torch.arange(len(logits)), torch.tensor(result.output_tokens.tolist())
    return logits.log_softmax(-1)[chosen].numpy()


@pytest.mark.slow
def test_each_token_has_the_version_that_sampled_it(trusted, untied, newer):
    # given a prompt of more than a block, cached under version 0, and sequences in the middle of it
    prompt = np.random.default_rng(8).integers(2, 190, 70).tolist()
    keys = [noise_key(b"\x06" * 32, 0, number) for number in (0, 1)]
    cached = [SampleRequest(prompt, 8, END_TOKEN, 1.0, key) for key in keys]
    sample(trusted, cached)
    requests = batch(24, 16)
    future = under_way(trusted, requests)
    # when version 1 is loaded, and the prompt is sampled again
    report = trusted.load(newer, 1)
    # then its keys and values are the new version's
    assert_samples(trusted, newer, cached)
    # and what was under way has tokens of both, in order
    sampled = future.result(WAIT_S)
    assert all((np.diff(result.versions) >= 0).all() for result in sampled)
    mixed = [
        (request.prompt_tokens, result)
        for request, result in zip(requests, sampled, strict=True)
        if set(result.versions) == {0, 1}
    ]
    assert mixed
    # each computed by that version, the later ones from the keys and values of the earlier
    old, new = Reference(untied), Reference(newer)
    for prompt, result in mixed[:: len(mixed) // 6 + 1]:
        expected = computed_by_both(old, new, list(prompt), result)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    # and its pause is told
    assert 0 < report.pause_s <= report.load_s


@pytest.mark.slow
def test_a_bad_version_in_flight_fails_what_was_under_way(trusted, untied, newer, tmp_path):
    # given sequences under way, and a version whose probe speaks of other weights
    bad = perturbed_version(newer, tmp_path / "bad", "v_proj.weight", probe=False)
    future = under_way(trusted, batch(64, 16))
    # when it is loaded
    with pytest.raises(UserError, match="version 2") as error:
        trusted.load(bad, 2)
    # then nothing comes out of it, and nothing can be submitted
    assert future.exception(WAIT_S) is error.value
    assert trusted.version is None
    with pytest.raises(RuntimeError, match="no version"):
        trusted.submit(batch(1, 1))
    # and a good version makes the engine whole
    trusted.load(untied, 0)
    assert len(sample(trusted, batch(1, 1))) == 1


@pytest.mark.slow
def test_an_untrusted_pool_refuses_a_load_under_way(engine, newer):
    # given sequences that cannot end, since the engine core gets no processor time
    with standing_still(engine.pids[0]):
        future = engine.submit(batch(2, 2))
        # when a version is loaded, then it is refused, and the sequences are the old version's
        with pytest.raises(RuntimeError, match="under way during a load"):
            engine.load(newer, 1)
    assert {0} == {v for result in future.result(WAIT_S) for v in result.versions}


# -- What a load is compared with, without vLLM ----------------------------------------------------


def probe_in(directory: Path, payload: object) -> Path:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    (directory / "probe.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    "payload",
    [
        "not json",
        {},
        {"sequences": []},
        {"sequences": [{"tokens": [5], "logprobs": []}]},
        {"sequences": [{"tokens": [5, 6, 7], "logprobs": [-1.0]}]},
        {"sequences": [{"tokens": [5, 6], "logprobs": ["x"]}]},
        {"sequences": [{"tokens": [5, 6], "logprobs": [1e999]}]},
        {"sequences": [{"tokens": "56", "logprobs": None}]},
        {"sequences": [None]},
    ],
)
def test_a_malformed_probe_names_its_file(tmp_path, payload):
    with pytest.raises(UserError, match="cannot read the probe") as error:
        read_probe(probe_in(tmp_path, payload))

    assert error.value.place == str(tmp_path / "probe.json")


def test_the_difference_is_a_mean_over_all_tokens_and_one_that_is_no_number_is_none(tmp_path):
    sequences = [
        {"tokens": [5, 6, 7], "logprobs": [-1.0, -2.0]},
        {"tokens": [1, 2], "logprobs": [-3.0]},
    ]
    probe = read_probe(probe_in(tmp_path, {"sequences": sequences}))

    assert probe_difference(probe, [np.array([-1.5, -2.0]), np.array([-2.0])]) == pytest.approx(0.5)
    assert math.isnan(probe_difference(probe, [np.array([math.nan, -2.0]), np.array([-2.0])]))
