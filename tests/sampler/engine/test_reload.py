"""After a reload the engine computes with the new weights, all of them, or says so."""

from __future__ import annotations

from itertools import product

import pytest

from runspec.core.errors import UserError
from tests.sampler.engine.agreement import assert_follows
from tests.sampler.engine.models import (
    WEIGHT_GROUPS,
    Reference,
    perturbed_version,
    save_version,
)
from tests.sampler.engine.requests import batch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("head", "group"),
    [("untied", "lm_head.weight"), *product(("untied", "tied"), WEIGHT_GROUPS)],
)
def test_each_weight_group_is_new_after_a_reload(request, head, tmp_path, group):
    engine = request.getfixturevalue("engine" if head == "untied" else "tied_engine")
    version = perturbed_version(request.getfixturevalue(head), tmp_path / "v1", group)

    assert_follows(engine, version, Reference(version).outputs)


def test_a_tied_head_follows_its_embedding_where_all_is_loaded_anew(
    tied_engine, tied, tmp_path, monkeypatch
):
    monkeypatch.setattr(tied_engine, "patch", lambda held, weights_dir: False)
    version = perturbed_version(tied, tmp_path / "v1", "embed_tokens.weight")

    assert_follows(tied_engine, version, Reference(version).outputs)


def test_bfloat16_weights_with_a_tied_head_are_new_after_a_reload(tmp_path, new_engine):
    import torch

    old = save_version(tmp_path / "v0", tied=True, dtype=torch.bfloat16)
    new = save_version(tmp_path / "v1", tied=True, dtype=torch.bfloat16, seed=1)
    engine = new_engine("bfloat16")
    engine.load(old, 0)

    assert_follows(engine, new, Reference(new).outputs, limit=0.02)


def test_a_load_names_what_was_compared_and_what_was_repacked(engine, untied):
    report = engine.load(untied, 3)

    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(
        report.compared
    )
    assert "model.layers.2.self_attn.k_proj.bias" in report.compared
    assert "model.layers.0.self_attn.q_proj.weight" in report.repacked
    assert "lm_head.weight" in report.repacked
    assert engine.version == 3


def test_a_quantised_parameter_is_named_as_one_that_cannot_be_read_back(engine, untied):
    [report] = engine._rpc("compare_with_a_norm_in_fp8", weights_dir=str(untied))

    assert report["different"] == []
    assert "model.norm.weight" in report["repacked"]


@pytest.mark.parametrize(
    ("group", "tensor"),
    [
        ("k_proj.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("post_attention_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_stale_tensor_that_can_be_read_back_is_named(engine, untied, tmp_path, group, tensor):
    newer = perturbed_version(untied, tmp_path / "v9", group, scale=1e-5, probe=False)

    with pytest.raises(UserError, match=r"version 9.*other bytes") as error:
        engine.check(newer, 9)

    assert tensor in str(error.value)


@pytest.mark.parametrize("group", ["v_proj.weight", "down_proj.weight"])
def test_a_stale_tensor_in_a_packed_copy_is_caught_by_the_probe(engine, untied, tmp_path, group):
    newer = perturbed_version(untied, tmp_path / "v9", group)

    with pytest.raises(UserError, match=r"version 9.*log-probs differ.*perhaps stale") as error:
        engine.check(newer, 9)

    assert f"*.{group}" in str(error.value)


def test_the_tied_head_that_vllm_leaves_stale_is_caught(tied_engine, tied, tmp_path, monkeypatch):
    # given an engine that reloads as vLLM does alone: without packing a tied head anew
    monkeypatch.setattr(tied_engine, "patch", lambda held, weights_dir: False)
    monkeypatch.setattr(tied_engine, "repack", lambda: None)
    newer = perturbed_version(tied, tmp_path / "v1", "embed_tokens.weight")
    # when another version is loaded, then the embedding is named
    with pytest.raises(UserError, match=r"version 1.*embed_tokens"):
        tied_engine.load(newer, 1)

    assert tied_engine.version is None


def test_files_that_cannot_be_read_are_named_and_a_good_version_heals(engine, untied, tmp_path):
    broken = perturbed_version(untied, tmp_path / "v1", "norm.weight")
    (broken / "model.safetensors").write_bytes(b"no tensors")

    with pytest.raises(UserError, match=r"version 1: vLLM cannot load it") as error:
        engine.load(broken, 1)

    assert error.value.place == str(broken)
    with pytest.raises(RuntimeError, match="no version is loaded"):
        engine.submit(batch(1, 1))
    assert not engine.load(untied, 2).patched
    assert engine.version == 2


def test_without_a_probe_an_engine_that_asks_for_none_loads(cramped, tmp_path, untied):
    plain = perturbed_version(untied, tmp_path / "plain", "norm.weight")
    (plain / "probe.json").unlink()

    cramped.load(plain, 5)

    assert cramped.version == 5


def test_a_version_without_a_probe_is_refused(engine, untied, tmp_path):
    newer = perturbed_version(untied, tmp_path / "v1", "norm.weight")
    (newer / "probe.json").unlink()

    with pytest.raises(UserError, match=r"cannot read the probe"):
        engine.load(newer, 1)
