"""Every rule finds its bad case at the right value and is silent on the good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.lint.check import check_files
from runspec.lint.registry import RULES
from runspec.spec.load import SpecFiles
from tests.runspec.spec.spec_files import SPECS, load, small_spec

SHAPE = (
    "model.shape={model_type: qwen2, vocab_size: 64, hidden_size: %s, intermediate_size: 8, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: %s}"
)
TWO_POOLS = (
    "samplers.two={hardware: {kind: cpu}, max_model_len: 96, max_new_tokens: 48,"
    " sampling: {temperature: %s}}"
)
# rule, where it points, overrides that break it, overrides that are as near as can be and right
CASES = [
    ("one-model", "model", ["model.hf="], []),
    ("one-model", "model", [SHAPE % (8, 1), "warm_start={}"],
     [SHAPE % (8, 1), "warm_start={}", "model.hf="]),
    ("one-model", "model.revision", ["model.hf=", "model.revision=abc", SHAPE % (8, 1),
     "warm_start={}"], ["model.revision=abc"]),
    ("warm-start", "model.shape", ["model.hf=", SHAPE % (8, 1)],
     ["model.hf=", SHAPE % (8, 1), "warm_start={}"]),
    ("warm-start", "warm_start", ["warm_start={}"], []),
    ("shape-heads", "model.shape.hidden_size", ["model.hf=", SHAPE % (10, 1), "warm_start={}"],
     ["model.hf=", SHAPE % (12, 1), "warm_start={}"]),
    ("shape-heads", "model.shape.head_dim",
     ["model.hf=", SHAPE % (10, 1), "model.shape.head_dim=5", "warm_start={}"],
     ["model.hf=", SHAPE % (10, 1), "model.shape.head_dim=6", "warm_start={}"]),
    ("shape-heads", "model.shape.num_key_value_heads",
     ["model.hf=", SHAPE % (8, 3), "warm_start={}"],
     ["model.hf=", SHAPE % (8, 2), "warm_start={}"]),
    ("updates-divide-batch", "algorithm.updates_per_step", ["algorithm.updates_per_step=3"],
     ["algorithm.updates_per_step=16"]),
    ("clip-bounds", "algorithm.clip.delta", ["algorithm.clip.delta=1.2"],
     ["algorithm.clip.delta=1.21"]),
    ("clip-bounds", "algorithm.clip.eps_low", ["algorithm.clip.eps_low=1.0"],
     ["algorithm.clip.eps_low=0.99"]),
    ("clip-bounds", "algorithm.clip.eps_low", ["algorithm.clip.eps_low=1.0"],
     ["algorithm={surrogate: cispo, clip: {eps_low: 1.0, delta: null}}"]),
    ("cispo", "algorithm.clip.delta", ["algorithm.surrogate=cispo"],
     ["algorithm={surrogate: cispo, clip: {delta: null}}"]),
    ("cispo", "algorithm.ratio",
     ["algorithm={surrogate: cispo, ratio: sequence, clip: {delta: null}}"],
     ["algorithm.ratio=sequence"]),
    ("stale-pi-old", "algorithm.old_logprobs",
     ["algorithm={updates_per_step: 1, old_logprobs: recompute}"],
     ["algorithm={updates_per_step: 1, old_logprobs: recompute, importance: {cap: 2.0}}"]),
    ("stale-pi-old", "algorithm.old_logprobs", ["algorithm.updates_per_step=1"],
     ["algorithm={updates_per_step: 1, async_level: 0}"]),
    ("importance-cap", "algorithm.importance.cap",
     ["algorithm.importance.cap=2.0", "algorithm.old_logprobs=sampler"],
     ["algorithm.importance.cap=2.0"]),
    ("task-advantage", "algorithm.advantage.normalize",
     ["algorithm.advantage.normalize=task", "reward.length.form=max"],
     ["algorithm.advantage.normalize=task"]),
    ("context-fits", "samplers.pool.max_model_len", ["samplers.pool.max_model_len=79"],
     ["samplers.pool.max_model_len=80"]),
    ("context-fits", "samplers.pool.max_model_len", ["samplers.pool.max_model_len=129"],
     ["samplers.pool.max_model_len=128"]),
    ("context-fits", "learner.packing.tokens", ["learner.packing.tokens=79"],
     ["learner.packing.tokens=80"]),
    ("target-length", "reward.length", ["reward.length.alpha="],
     ["reward.length.alpha=", "reward.length.form=clip"]),
    ("target-length", "reward.length", ["reward.length.form="], []),
    ("target-length", "reward.length", ["reward.length.targets=[]"], ["reward.length.targets=[1]"]),
    ("target-length", "reward", ["reward.spelling="], []),
    ("target-length", "data.length_prompt", ["data.length_prompt=Think."],
     ["data.length_prompt='{target}'"]),
    ("one-term-a-kind", "reward.more.kind", ["reward.more.kind=reasoning_gym"],
     ["reward.more.kind=math"]),
    ("targets-reachable", "reward.length.targets", ["reward.length.targets=[8, 48]"],
     ["reward.length.targets=[8, 47]"]),
    ("source-fields", "data.sources.words", ["data.sources.words.dataset="], []),
    ("source-fields", "data.sources.words", ["data.sources.words.kind=parquet"],
     ["data.sources.words.kind=parquet", "data.sources.words.uri=rows"]),
    ("recomputable-sampling", "samplers.pool.sampling.seeded",
     ["samplers.pool.sampling.seeded=false"],
     ["samplers.pool.sampling.seeded=false", "samplers.pool.trust=trusted"]),
    ("recomputable-sampling", "samplers.pool.sampling.top_p",
     ["samplers.pool.sampling.top_p=0.9", "samplers.pool.trust=trusted"],
     ["samplers.pool.sampling={top_p: 0.9, seeded: false}", "samplers.pool.trust=trusted"]),
    ("recomputable-sampling", "samplers.pool.sampling.top_k", ["samplers.pool.sampling.top_k=5"],
     ["samplers.pool.sampling.top_k=-1"]),
    ("one-temperature", "samplers.two.sampling.temperature", [TWO_POOLS % 0.5],
     [TWO_POOLS % 1.0]),
    ("mesh-fits", "learner.mesh", ["learner.mesh.data=2"],
     ["learner.mesh.data=2", "learner.hardware.count=4"]),
    ("mesh-fits", "learner.mesh", ["learner.hardware={topology: 2x2x2, count: null}"],
     ["learner.hardware={topology: 1x2, count: null}"]),
    ("topology-form", "learner.hardware.topology", ["learner.hardware.topology=big"],
     ["learner.hardware.topology=2x1"]),
    ("topology-form", "samplers.pool.hardware.topology", ["samplers.pool.hardware.topology=2x"],
     ["samplers.pool.hardware.topology=2x1"]),
    ("mesh-fits", "learner.hardware.count", ["learner.hardware={topology: 2x2, count: 2}",
     "learner.mesh.data=2"], ["learner.hardware={topology: 2x2, count: 4}",
     "learner.mesh.data=2"]),
    ("mesh-fits", "learner.mesh",
     ["learner.hardware={topology: 2x2, count: null}", "learner.mesh={data: 2, slices: 2}"],
     ["learner.hardware={topology: 1x2, count: null}", "learner.mesh={data: 2, slices: 2}"]),
    ("mesh-fits", "learner.hosts", ["learner.hosts=4"], ["learner.hosts=1"]),
    ("mesh-fits", "learner.mesh.slices", ["learner.mesh.slices=2"],
     ["learner.mesh={slices: 2, slice_axis: fsdp}"]),
    ("lora-targets", "learner.lora.targets", ["learner.lora.targets=[q, v, q]"],
     ["learner.lora.targets=[q, v]"]),
    ("rows-divide", "learner.packing.rows", ["learner.packing.rows=3"], ["learner.packing.rows=6"]),
    ("rows-divide", "learner.packing.tokens",
     ["learner.packing.tokens=129", "learner.mesh={fsdp: 1, context: 2}"],
     ["learner.packing.tokens=130", "learner.mesh={fsdp: 1, context: 2}"]),
    ("versions-kept", "broadcast.keep_versions", ["broadcast.keep_versions=3"],
     ["broadcast.keep_versions=4"]),
    ("relay-tree", "broadcast.relays.a.upstream", ["broadcast.relays={a: {upstream: [b]}}"],
     ["broadcast.relays={a: {upstream: [b]}, b: {upstream: [origin]}}"]),
    ("relay-tree", "broadcast.relays.a.upstream",
     ["broadcast.relays={a: {upstream: [b, origin]}, b: {upstream: [a]}}"],
     ["broadcast.relays={a: {upstream: [origin]}, b: {upstream: [a, origin]}}"]),
    ("relay-tree", "broadcast.relays.origin", ["broadcast.relays={origin: {upstream: [origin]}}"],
     []),
    ("reserved-names", "samplers.validator",
     ["samplers={pool: null, validator: {hardware: {kind: cpu}, max_model_len: 96,"
      " max_new_tokens: 48}}"],
     ["samplers={pool: null, mine: {hardware: {kind: cpu}, max_model_len: 96,"
      " max_new_tokens: 48}}"]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "path", "bad", "good"), CASES)
def test_rule(tmp_path: Path, code: str, path: str, bad: list[str], good: list[str]) -> None:
    spec = small_spec(tmp_path)
    assert (code, path) in {(f.code, f.path) for f in load(spec, *bad).findings}
    assert load(spec, *good).findings == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(RULES)


def test_a_rule_points_at_the_layer_that_wrote_the_value(tmp_path: Path) -> None:
    loaded = load(small_spec(tmp_path, "algorithm:\n  updates_per_step: 3\n"))
    [finding] = loaded.findings
    assert (Path(finding.file).name, finding.line, finding.column) == ("spec.yaml", 3, 21)
    assert loaded.spec is not None  # it fits the schema, but must not run


@pytest.mark.parametrize("profile", [None, *(p.stem for p in (SPECS / "profiles").glob("*.yaml"))])
def test_every_shipped_spec_is_clean_with_every_profile(profile: str | None) -> None:
    shipped = sorted(SPECS.glob("*.yaml"))
    assert len(shipped) >= 3
    assert check_files([SpecFiles(path, profile) for path in shipped]).findings == []
