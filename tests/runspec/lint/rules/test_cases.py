"""What rules find beside their examples: other breaches, where they point, and what is left alone.

Each case is the small or the large spec that examples extend, with values laid over it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runspec.core.spec.spec_files import BASE, DOCUMENTS, EXAMPLES, FLEET, find, write
from tests.runspec.lint.rules import test_operations as operations

COMMIT = "0123456789abcdef" * 2 + "01234567"
# spec, overrides, what is found: code, path, severity
BREACHES = [
    (BASE, ["algorithm.updates_per_step=16"],
     "whole-groups", "algorithm.updates_per_step", "error"),
    (BASE, ["algorithm={surrogate: cispo, ratio: sequence, clip: {delta: null}}"],
     "cispo", "algorithm.ratio", "error"),
    (BASE, ["algorithm={updates_per_step: 1, old_logprobs: recompute}"],
     "stale-pi-old", "algorithm.old_logprobs", "warning"),
    (BASE, ["optimizer.lr=9e-7", "model.shape.hidden_size=32"],
     "learning-rate", "optimizer.lr", "warning"),
    (FLEET, ["optimizer.lr=5e-8", "learner.lora={}"], "learning-rate", "optimizer.lr", "warning"),
    (FLEET, ["optimizer.lr=5e-9"], "learning-rate", "optimizer.lr", "warning"),
    (FLEET, ["optimizer.kind=sgd"], "learning-rate", "optimizer.lr", "warning"),
    (FLEET, ["optimizer={kind: sgd, lr: 20.0}"], "learning-rate", "optimizer.lr", "warning"),
    (BASE, ["optimizer.schedule=wsd"], "optimizer-fields", "optimizer.schedule", "error"),
    (BASE, ["optimizer.final_lr=1e-5"], "optimizer-fields", "optimizer.final_lr", "error"),
    (BASE, ["optimizer.betas=[1.0, 0.95]"], "adam-betas", "optimizer.betas", "error"),
    (BASE, ["algorithm.filters.zero_variance=false", "reward.length=null"],
     "std-without-filter", "algorithm.filters.zero_variance", "warning"),
    (BASE, ["data.think_prefill=true"], "think-prefill", "data.think_prefill", "warning"),
    (BASE, ["reward.length.form=null"], "target-length", "reward.length", "error"),
    (BASE, ["data.sources.words.dataset=null"], "source-fields", "data.sources.words", "error"),
    (BASE, ["data.sources.words={kind: jsonl, uri: gone.jsonl}"],
     "source-files", "data.sources.words.uri", "warning"),
    (BASE, ["data.sources.words={kind: jsonl, uri: 'https://example.org/a', params: {split: a}}"],
     "source-columns", "data.sources.words.params.split", "error"),
    (BASE, ["data.sources.words={kind: jsonl, uri: 'https://example.org/a'}",
            "data.sources.words.solve_rate={field: rate, min: 0.5, max: 0.4}"],
     "solve-rate", "data.sources.words.solve_rate.min", "error"),
    (BASE, ["samplers.pool.hardware.topology=2x"],
     "topology-form", "samplers.pool.hardware.topology", "error"),
    (FLEET, ["learner={hardware: {topology: 2x8x4}}"],
     "tpu-topology", "learner.hardware.topology", "error"),
    (FLEET, ["learner={hosts: 32, mesh: {slices: 2, slice_axis: fsdp}}"],
     "mesh-fits", "learner.mesh", "error"),
    (BASE, ["learner={mesh: {fsdp: 1, context: 2}, packing: {tokens: 129}}"],
     "context-divides", "learner.packing.tokens", "error"),
    (BASE, ["learner={hardware: {count: 3}, mesh: {fsdp: 3}, packing: {rows: 3}}",
            "algorithm={prompts_per_step: 6}"],
     "sharded-widths", "learner.mesh.fsdp", "warning"),
    (FLEET, ["learner.attention=cudnn"], "attention-kernel", "learner.attention", "error"),
    (BASE, ["model.shape={hidden_size: 44}"],
     "shape-heads", "model.shape.hidden_size", "error"),
    (BASE, ["model.shape.num_hidden_layers=5000"], "model-config", "model.shape", "error"),
    (FLEET, ["model.max_context=131072"], "model-positions", "model.max_context", "error"),
    (FLEET, [f"model.tokenizer={{hf: meta-llama/Llama-3.1-8B, revision: {COMMIT}}}"],
     "tokenizer-agrees", "model.tokenizer.hf", "error"),
    (BASE, ["samplers.pool.sampling.top_k=5"],
     "neutral-sampling", "samplers.pool.sampling.top_k", "warning"),
    (BASE, ["samplers.pool.hardware.count=2"],
     "pool-devices", "samplers.pool.parallel.tensor", "warning"),
    (FLEET, ["learner.hardware.kind=tpu-v7x"],
     "unknown-hardware", "learner.hardware.kind", "warning"),
    (FLEET, ["learner.hardware.memory=6GB"], "train-state-fits", "learner.mesh", "error"),
    (FLEET, ["learner.hardware.memory=10GB"], "step-fits", "learner", "error"),
    # Runs on documents.
    (DOCUMENTS, ["optimizer.lr=1e-6"], "learning-rate", "optimizer.lr", "warning"),
    (DOCUMENTS, ["algorithm.updates_per_step=2", "optimizer.warmup_updates=200"],
     "warmup-length", "optimizer.warmup_updates", "warning"),
    (DOCUMENTS, ["learner.hardware.memory=1MB"], "step-fits", "learner", "error"),
    (DOCUMENTS, ["model.shape.vocab_size=11"],
     "tokenizer-vocabulary", "model.tokenizer.hf", "error"),
    (DOCUMENTS, ["model.max_context=2048", "learner.packing={tokens: 1024, rows: 2}",
                 "algorithm.tokens_per_update=3072"],
     "tokens-per-update", "algorithm.tokens_per_update", "error"),
    (DOCUMENTS, ["data.sources={reads: null, mine: {kind: reasoning_gym}}"],
     "document-kind", "data.sources.mine.kind", "error"),
    (DOCUMENTS, ["data.sources={reads: null, mine: {kind: text}}"],
     "document-params", "data.sources.mine", "error"),
    (DOCUMENTS, ["data.sources={reads: null, mine: {kind: text, uri: gone.txt}}"],
     "source-files", "data.sources.mine.uri", "warning"),
    *(
        (DOCUMENTS,
         [f"data.sources={{reads: null, mine: {{kind: {kind}, uri: 'https://example.org/a',"
          f" params: {{{params}}}}}}}"],
         "document-params", f"data.sources.mine.params.{key}", "error")
        for kind, params, key in (
            ("text", "whole: 1", "whole"),
            ("fasta", "text: body", "text"),
            ("jsonl", "text: body, tokens: ids", "tokens"),
            ("parquet", "id_offset: -1", "id_offset"),
            ("jsonl", "messages: talk", "messages"),
        )
    ),
    (DOCUMENTS, ["data.sources.reads.params.reads=0"],
     "document-params", "data.sources.reads.params.reads", "error"),
    (DOCUMENTS, ["algorithm.kind=sft",
                 "data.sources={reads: null, mine: {kind: jsonl, uri: 'https://example.org/a'}}"],
     "chat-template", "model.tokenizer.hf", "error"),
    # Islands.
    (DOCUMENTS, ["learner.islands.members=[{name: a}, {name: b, rows: 6}]",
                 "algorithm.tokens_per_update=1024"],
     "tokens-per-update", "algorithm.tokens_per_update", "error"),
    (DOCUMENTS, ["learner.islands.count=3"],
     "tokens-per-update", "algorithm.tokens_per_update", "error"),
    (DOCUMENTS, ["learner.islands.members=[{name: a}, {name: b, mesh: {fsdp: 4}}]"],
     "mesh-fits", "learner.islands.members.b.mesh", "error"),
    (DOCUMENTS, ["learner.islands.members="
                 "[{name: a}, {name: b, hardware: {kind: mine, count: 2}}]"],
     "unknown-hardware", "learner.islands.members.b.hardware.kind", "warning"),
    (DOCUMENTS, ["learner.islands.members=[{name: a}, {name: b, hosts: 3}]"],
     "hosts-divide", "learner.islands.members.b.hosts", "error"),
    (DOCUMENTS, ["learner.islands.count=2", "learner.mesh.fsdp=4"],
     "mesh-fits", "learner.mesh", "error"),
    (BASE, ["learner.islands={count: 2, overlap: 1}", "algorithm.old_logprobs=sampler",
            "broadcast.keep_versions=4"],
     "versions-kept", "broadcast.keep_versions", "error"),
    (BASE, ["learner.islands={count: 2, overlap: 1}",
            "algorithm={old_logprobs: sampler, async_level: 0}"],
     "island-overlap", "algorithm.async_level", "error"),
    (BASE, ["learner.islands.members=[{name: pool}, {name: b}]",
            "samplers={pool: null, island-b: {trust: trusted, hardware: {kind: cpu, count: 1},"
            " dtype: float32, max_model_len: 96, max_new_tokens: 48}}"],
     "role-clash", "samplers.island-b", "error"),
]  # fmt: skip
SILENT = [
    # CISPO's weight may go without a lower bound.
    (BASE, ["algorithm={surrogate: cispo, clip: {eps_low: 1.0, delta: null}}"]),
    # One update a step needs a correction only where there is a lag.
    (BASE, ["algorithm={updates_per_step: 1, async_level: 0}"]),
    (BASE, ["algorithm={updates_per_step: 1, importance: {cap: 2.0}}"]),
    # Adapters want ten times the rate.
    (FLEET, ["optimizer.lr=1e-4", "learner.lora={}"]),
    # With sgd all weights share one clipped step.
    (FLEET, ["optimizer={kind: sgd, lr: 1.0}"]),
    (BASE, ["optimizer={schedule: wsd, decay_updates: 40, final_lr: 5e-5}"]),
    # Adapters start at zero: no rounding floor.
    (FLEET, ["optimizer.lr=1e-5", "learner={lora: {}, master_dtype: bfloat16}"]),
    (FLEET, ["optimizer.lr=3e-5", "learner.master_dtype=bfloat16"]),
    # A length term that multiplies cannot cost more than the task gives.
    (BASE, ["reward.length={form: max, alpha: 10.0}"]),
    (FLEET, ["learner={hosts: 32, hardware: {topology: 4x4x4, count: 128},"
             " mesh: {data: 2, slices: 2}, packing: {rows: 32}}"]),
    (FLEET, ["learner={hosts: 32, hardware: {kind: tpu-v6e, topology: 8x16, memory: 95GB},"
             " mesh: {fsdp: 32}, packing: {rows: 32}}"]),
    # One family, its vocabulary padded differently.
    (FLEET, [f"model.tokenizer={{hf: Qwen/Qwen3-4B, revision: {COMMIT}}}"]),
    # Rows that hold several sequences: how many come to share one no spec says.
    (BASE, ["learner.packing={tokens: 160, rows: 6}"]),
    # The spec's own memory makes a kind known.
    (FLEET, ["samplers.pool.hardware={kind: mine, memory: 80GB, count: 4}"]),
    # More ranks than key/value heads: each holds a copy.
    (BASE, ["samplers.pool={hardware: {count: 4}, parallel: {tensor: 4}}"]),
    (BASE, ["samplers.pool.sampling={temperature: 0.3, top_k: 0}"]),
    (BASE, ["learner={mesh: {fsdp: 1, context: 2}, packing: {tokens: 132}}"]),
    # Random weights take a rate that would wreck trained ones.
    (DOCUMENTS, ["optimizer.lr=0.05"]),
    # Plain text needs no chat template.
    (DOCUMENTS, ["algorithm.kind=sft"]),
    (DOCUMENTS, ["algorithm.kind=sft", "data.sources={reads: null, mine: {kind: jsonl,"
                 " uri: 'https://example.org/a', params: {text: body}}}"]),
    # Defaults of what a run has no use for, as `runspec render` writes them.
    (DOCUMENTS, ["reward=[]", "samplers=[]", "verify={validators: 0, prefill_share: 1.0}",
                 "data.max_prompt_tokens=2048"]),
    (BASE, ["data.sources.words.weight=1.0"]),
    (DOCUMENTS, ["learner.islands.members=[{name: a}, {name: b, rows: 2}]"]),
    (BASE, ["learner.islands={count: 2, quorum: 1}"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "overrides", "code", "path", "severity"), [*BREACHES, *operations.BREACHES]
)
def test_a_breach(spec: Path, overrides: list[str], code: str, path: str, severity: str) -> None:
    found = find(spec, *overrides)
    assert [(f.code, f.path, f.severity) for f in found] == [(code, path, severity)]
    assert found[0].requires and found[0].suggestion


@pytest.mark.parametrize(("spec", "overrides"), [*SILENT, *operations.SILENT])
def test_what_is_right(spec: Path, overrides: list[str]) -> None:
    assert find(spec, *overrides) == []


def test_numbers_are_those_of_the_inequality() -> None:
    [found] = find(BASE, "samplers.pool.max_model_len=79")
    assert found.numbers == {"max_prompt_tokens": 32, "max_new_tokens": 48, "max_model_len": 79}


def test_the_rounding_floor_is_what_bfloat16_does() -> None:
    [found] = find(FLEET, "learner.master_dtype=bfloat16")
    floor = found.numbers["floor"]
    assert floor == pytest.approx(2.73e-5, rel=1e-2)
    assert isinstance(floor, float)
    weight = floor * 2**9  # 1 / sqrt(hidden size)
    # By hand: 1 / sqrt(5120) = 1.789 x 2^-7, whose neighbours are 2^-14 away.
    assert 2**-7 < weight < 2**-6
    assert floor < 2**-14 / 2


def local_model(folder: Path, **files: object) -> Path:
    """A spec whose model is the small example's, with other files in the place of its own."""
    model = folder / "model"
    for source in (EXAMPLES / "models" / "small").iterdir():
        write(model / source.name, source.read_text())
    for name, content in files.items():
        write(model / f"{name}.json", json.dumps(content))
    return write(
        folder / "spec.yaml",
        f"extends: [{BASE}]\nmodel: {{hf: model, shape: null}}\nwarm_start: null\n",
    )


def test_added_tokens_count(tmp_path: Path) -> None:
    tokenizer = json.loads((EXAMPLES / "models" / "small" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [{"id": 8, "content": "<new>"}]
    [found] = find(local_model(tmp_path, tokenizer=tokenizer))
    assert (found.code, found.numbers) == (
        "tokenizer-vocabulary",
        {"largest_id": 8, "vocab_size": 8},
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3, "added_tokens": 7}', "[" * 10**5])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_of_nonsense_are_no_crash(tmp_path: Path, name: str, text: str) -> None:
    spec = local_model(tmp_path)
    write(tmp_path / "model" / name, text)
    assert {found.code for found in find(spec)} <= {"chat-template"}


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"model_type": "gpt2"}'])
def test_a_config_that_is_none_is_one_finding(tmp_path: Path, text: str) -> None:
    spec = local_model(tmp_path)
    write(tmp_path / "model" / "config.json", text)
    [found] = find(spec)
    assert (found.code, found.path) == ("model-config", "model.hf")
