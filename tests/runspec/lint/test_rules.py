"""What the rules find, where they point, and what they leave alone.

Cases are values laid over the specs that the rules' examples extend.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from runspec.cli.checks import located
from runspec.core.models.parameters import CPU_HEAD_SIZES
from runspec.core.schema import yaml_nodes
from runspec.core.schema.findings import format_finding
from runspec.core.schema.load import SpecFiles
from runspec.core.tokenizer_files import TEMPLATE_DATE
from runspec.lint import RULES, check
from runspec.lint.rules.security import secret_kind
from tests.runspec.core.schema import spec_files
from tests.runspec.core.schema.spec_files import BASE, DOCUMENTS, EXAMPLES, FLEET, find, load

COMMIT = "0123456789abcdef" * 2 + "01234567"
ROOM = "max_model_len: 96, max_new_tokens: 48, dtype: float32, trust: trusted"
THRESHOLDS = (
    "verify.thresholds=[{name: bfloat16, logprob_submission: 0.1, logprob_rollout: 0.3, gap: %s, "
    "gap_share: 0.02, gap_max: %s, gap_mean: %s, mismatch_share: 0.3, mantissa_mean: 9.0, "
    "mantissa_median: 9.0}]"
)
AT_A = "data.sources={reads: null, mine: {kind: %s, uri: 'https://example.org/a', params: {%s}}}"
OWN_PARAMS = "error document-params data.sources.mine.params"
# By the spec: severity, code and path of what is found; the values.
BREACHES = {
    BASE: [
        ("error whole-groups algorithm.updates_per_step", "algorithm.updates_per_step=16"),
        ("error cispo algorithm.ratio",
         "algorithm={surrogate: cispo, ratio: sequence, clip: {delta: null}}"),
        ("warning learning-rate optimizer.lr", "optimizer.lr=9e-7",
         "model.shape={hidden_size: 32, head_dim: 32}"),
        ("error optimizer-fields optimizer.schedule", "optimizer.schedule=wsd"),
        ("error optimizer-fields optimizer.final_lr", "optimizer.final_lr=1e-5"),
        ("warning std-without-filter algorithm.filters.zero_variance",
         "algorithm.filters.zero_variance=false", "reward.length=null"),
        ("error target-length reward.length", "reward.length.form=null"),
        ("error source-fields data.sources.words", "data.sources.words.dataset=null"),
        ("warning source-files data.sources.words.uri",
         "data.sources.words={kind: jsonl, uri: gone.jsonl}"),
        ("error source-columns data.sources.words.params.split",
         "data.sources.words={kind: jsonl, uri: 'https://example.org/a', params: {split: a}}"),
        ("error solve-rate data.sources.words.solve_rate.min",
         "data.sources.words={kind: jsonl, uri: 'https://example.org/a'}",
         "data.sources.words.solve_rate={field: rate, min: 0.5, max: 0.4}"),
        ("error context-divides learner.packing.tokens",
         "learner={mesh: {fsdp: 1, context: 2}, packing: {tokens: 129}}"),
        ("warning sharded-widths learner.mesh.fsdp", "algorithm={prompts_per_step: 6}",
         "learner={hardware: {count: 3}, mesh: {fsdp: 3}, packing: {rows: 3}}"),
        ("error shape-heads model.shape.hidden_size", "model.shape={hidden_size: 44}"),
        ("error shape-heads model.shape.head_dim", "model.shape.head_dim=15"),
        ("error one-model model.revision", f"model.revision={COMMIT}"),
        ("error warm-start warm_start", "model={hf: ./models/small, shape: null}"),
        ("error target-length reward.length", "reward.length.targets=null"),
        *(("warning sharded-widths learner.mesh.tensor", f"model.shape.{width}_size=97",
           "learner.mesh={fsdp: 1, tensor: 2}") for width in ("intermediate", "vocab")),
        ("error model-config model.shape", "model.shape.num_hidden_layers=5000"),
        *(("warning cpu-head-size samplers.pool.hardware.kind", f"model.shape.head_dim={size}")
          for size in (8, 16, 48, 72, 144, 320)),
        ("warning cpu-head-size samplers.pool.hardware.kind", "model.shape.hidden_size=64"),
        ("warning cpu-head-size evaluator.hardware.kind", "model.shape.head_dim=16",
         "samplers.pool.hardware.kind=l4", "evaluator.hardware={kind: cpu, count: 1}",
         "evaluations=[{name: words, source: words, every: 10}]"),
        ("warning neutral-sampling samplers.pool.sampling.top_k", "samplers.pool.sampling.top_k=5"),
        ("warning pool-devices samplers.pool.parallel.tensor", "samplers.pool.hardware.count=2"),
        ("error versions-kept broadcast.keep_versions", "learner.islands={count: 2, overlap: 1}",
         "algorithm.old_logprobs=sampler", "broadcast.keep_versions=4"),
        ("error island-overlap algorithm.async_level", "learner.islands={count: 2, overlap: 1}",
         "algorithm={old_logprobs: sampler, async_level: 0}"),
        ("error role-clash samplers.island-b", "learner.islands.members=[{name: pool}, {name: b}]",
         f"samplers={{pool: null, island-b: {{hardware: {{kind: cpu, count: 1}}, {ROOM}}}}}"),
        ("error relay-cycle broadcast.relays.eu.upstream",
         "broadcast.relays=[{name: eu, upstream: [eu]}]"),
        ("error relay-upstream broadcast.relays.a.upstream",
         "broadcast.relays=[{name: a, upstream: [origin, none, nor]}]"),
        ("error pool-relays samplers.pool.relays", "broadcast.relays=[{name: eu}]",
         "samplers.pool.relays=[eu, eu]"),
        ("error reserved-names broadcast.relays.origin", "broadcast.relays=[{name: origin}]"),
        ("error unsigned-weights identity.root_public_key", "samplers.pool={trust: untrusted}",
         "broadcast.origin.url=https://origin.example.org",
         "placement={roles: [validators], url: https://run.example.org}"),
        ("error inline-secret broadcast.relays.eu.url",
         "broadcast.relays=[{name: eu, url: 'https://me:hunter2@relay.example.org'}]"),
        ("error one-model model", "model={hf: ./models/small}"),
        ("error unknown-role placement.devices.pool", "placement.devices={pool: [0]}"),
        ("error unknown-role placement.kubernetes.images.pools",
         "placement.kubernetes={image: i, images: {pools: j}}"),
        ("error role-clash samplers.relay-eu", "broadcast.relays=[{name: eu}]",
         f"samplers.relay-eu={{hardware: {{kind: cpu}}, {ROOM}}}"),
        ("warning shared-device placement.devices.pool-0",
         "placement.devices={learner: [1], pool-0: [0, 1]}"),
        ("error local-storage checkpoints.dir", "learner.hosts=2", "placement.backend=ray"),
        ("error server-url broadcast.origin.url", "broadcast.origin.url=http://127.0.0.1:99999"),
        ("error port-clash broadcast.relays.b.url", "broadcast.relays=[{name: a, url: "
         "'http://localhost:9000'}, {name: b, url: 'http://127.0.0.1:9000/'}]"),
        ("error port-clash placement.metrics.base_port",
         "placement={base_port: 8000, metrics: {base_port: 8001}}"),
    ],
    FLEET: [
        ("warning learning-rate optimizer.lr", "optimizer.lr=5e-8", "learner.lora={}"),
        ("warning learning-rate optimizer.lr", "optimizer.lr=5e-9"),
        ("warning learning-rate optimizer.lr", "optimizer.kind=sgd"),
        ("warning learning-rate optimizer.lr", "optimizer={kind: sgd, lr: 20.0}"),
        ("error tpu-topology learner.hardware.topology", "learner={hardware: {topology: 2x8x4}}"),
        ("error public-address broadcast.origin.url",
         "broadcast={relays: [], origin: {url: null}}"),
        ("error uncalibrated-precision samplers.pool.dtype", "samplers.pool.dtype=float32",
         "samplers.pool.hardware.memory=1000GB"),
        ("error too-few-devices placement.devices.learner-3", "learner={hosts: 16}",
         "storage.shared=true", "checkpoints.dir=/mnt/c", "placement.devices={learner-3: [0]}"),
        ("error attention-kernel learner.attention", "learner.attention=cudnn"),
        ("error tokenizer-agrees model.tokenizer.hf",
         f"model.tokenizer={{hf: meta-llama/Llama-3.1-8B, revision: {COMMIT}}}"),
        ("error plain-http broadcast.origin.url", "broadcast.origin.url=http://203.0.113.7:8000"),
        ("error plain-http placement.url", "placement.url=http://203.0.113.7"),
        ("warning unsandboxed-grading reward.code.sandboxed", "samplers.pool.trust=trusted",
         "reward.code={kind: code, sandboxed: false}", "reward.math=null"),
        ("error untrusted-unproven verify.prefill_floor", "verify.prefill_floor=0.0"),
        ("error thresholds-order verify.thresholds.bfloat16.gap", THRESHOLDS % (0.3, 0.1, 1e-3)),
        ("error thresholds-order verify.thresholds.bfloat16.gap_mean",
         THRESHOLDS % (0.1, 0.3, 0.2)),
        ("error quantized-pool samplers.pool.dtype",
         "samplers.pool={quantization: fp8, dtype: float32, hardware: {memory: 1000GB}}",
         "verify.prefill_share=0.0", "samplers.pool.trust=trusted"),
        ("error unpinned-revision model.revision", "model.revision=null"),
        # Directories have no revision.
        ("warning model-path model.hf", "model={hf: /gone/QwQ-32B, revision: null}"),
        ("warning model-path model.tokenizer.hf", "model.tokenizer={hf: ../gone}"),
        ("error local-storage checkpoints.dir", "storage.shared=false",
         "checkpoints.dir=/mnt/local"),
    ],
    DOCUMENTS: [
        ("warning learning-rate optimizer.lr", "optimizer.lr=1e-6"),
        ("error tokenizer-vocabulary model.tokenizer.hf", "model.shape.vocab_size=11"),
        ("error document-params data.sources.mine",
         "data.sources={reads: null, mine: {kind: text}}"),
        (f"{OWN_PARAMS}.whole", AT_A % ("text", "whole: 1")),
        (f"{OWN_PARAMS}.text", AT_A % ("fasta", "text: body")),
        (f"{OWN_PARAMS}.tokens", AT_A % ("jsonl", "text: body, tokens: ids")),
        (f"{OWN_PARAMS}.id_offset", AT_A % ("parquet", "id_offset: -1")),
        (f"{OWN_PARAMS}.messages", AT_A % ("jsonl", "messages: talk")),
        ("error document-params data.sources.reads.params.reads",
         "data.sources.reads.params.reads=0"),
        ("error chat-template model.tokenizer.hf", "algorithm.kind=sft", AT_A % ("jsonl", "")),
        ("error tokens-per-update algorithm.tokens_per_update", "algorithm.tokens_per_update=1024",
         "learner.islands.members=[{name: a}, {name: b, rows: 6}]"),
        ("error tokens-per-update algorithm.tokens_per_update", "learner.islands.count=3"),
        ("error mesh-fits learner.islands.members.b.mesh",
         "learner.islands.members=[{name: a}, {name: b, mesh: {fsdp: 4}}]"),
        ("warning unknown-hardware learner.islands.members.b.hardware.kind",
         "learner.islands.members=[{name: a}, {name: b, hardware: {kind: mine, count: 2}}]"),
        ("error hosts-divide learner.islands.members.b.hosts",
         "learner.islands.members=[{name: a}, {name: b, hosts: 3}]"),
        ("error mesh-fits learner.mesh", "learner.islands.count=2", "learner.mesh.fsdp=4"),
    ],
}  # fmt: skip
SILENT = {
    BASE: [
        # CISPO's weight may go without a lower bound.
        ["algorithm={surrogate: cispo, clip: {eps_low: 1.0, delta: null}}"],
        # One update a step needs a correction only where there is a lag.
        ["algorithm={updates_per_step: 1, async_level: 0}"],
        ["algorithm={updates_per_step: 1, importance: {cap: 2.0}}"],
        ["optimizer={schedule: wsd, decay_updates: 40, final_lr: 5e-5}"],
        # A length term that multiplies cannot cost more than the task gives.
        ["reward.length={form: max, alpha: 10.0}"],
        # No spec says how many sequences come to share a row.
        ["learner.packing={tokens: 160, rows: 6}"],
        # More ranks than key/value heads: each holds a copy.
        ["samplers.pool={hardware: {count: 4}, parallel: {tensor: 4}}"],
        ["samplers.pool.sampling={temperature: 0.3, top_k: 0}"],
        ["learner={mesh: {fsdp: 1, context: 2}, packing: {tokens: 132}}"],
        ["data.sources.words.weight=1.0"],
        ["learner.islands={count: 2, quorum: 1}"],
        # Several processes of a CPU share its files.
        ["learner.hosts=2"],
        # A cycle-free graph of several tiers, with more than one way down.
        ["broadcast.relays=[{name: a}, {name: b, upstream: [a, origin]}, "
         "{name: c, upstream: [b, a]}]", "samplers.pool.relays=[c, b]"],
        ["samplers.pool.trust=untrusted"],
        # vLLM's kernels for CPUs have these head sizes, those for GPUs others too.
        *([f"model.shape.head_dim={size}"] for size in CPU_HEAD_SIZES),
        ["model.shape.head_dim=16", "samplers.pool.hardware.kind=l4"],
        ["model.shape.head_dim=16", "samplers.pool.hardware.kind=l4",
         "evaluator.hardware={kind: cpu, count: 1}"],
        # Public keys, digests and long names are no secrets, nor is a key that is a word.
        ["data.sources.words.params={key: ascending, token_count: 12, at: " + COMMIT + "}"],
        ["name=sk-learn-tiny-model-for-the-tests-2026"],
        ["learner.hardware.price_per_hour=0.0", "budget.max_hours=null"],
        ["placement.devices={pool-0: []}"],
        # A pool that is called like another's worker is named where workers are not.
        [f"samplers.pool-0={{hardware: {{kind: cpu}}, {ROOM}}}"],
        # One port of two hosts.
        ["broadcast.relays=[{name: a, url: 'https://a.example.org'}, "
         "{name: b, url: 'https://b.example.org'}]"],
        ["placement.base_port=8000", "broadcast.relays=[{name: a}, {name: b}]"],
        # Figures after the servers' ports.
        ["placement={base_port: 8000, metrics: {base_port: 8002}}"],
    ],
    FLEET: [
        # Adapters want ten times the rate, and start at zero: no rounding floor.
        ["optimizer.lr=1e-4", "learner.lora={}"],
        ["optimizer.lr=1e-5", "learner={lora: {}, master_dtype: bfloat16}"],
        ["optimizer.lr=3e-5", "learner.master_dtype=bfloat16"],
        # With sgd all weights share one clipped step.
        ["optimizer={kind: sgd, lr: 1.0}"],
        ["learner={hosts: 32, hardware: {topology: 4x4x4, count: 128},"
         " mesh: {data: 2, slices: 2}, packing: {rows: 32}}"],
        ["learner={hosts: 32, hardware: {kind: tpu-v6e, topology: 8x16, memory: 95GB},"
         " mesh: {fsdp: 32}, packing: {rows: 32}}"],
        # One family, its vocabulary padded differently.
        [f"model.tokenizer={{hf: Qwen/Qwen3-4B, revision: {COMMIT}}}"],
        # The spec's own memory makes a kind known.
        ["samplers.pool.hardware={kind: mine, memory: 80GB, count: 4}"],
        # Kubernetes makes the volume that the learner's hosts share.
        ["storage.shared=false", "checkpoints.dir=null", "placement.backend=kubernetes",
         "placement.kubernetes={image: 'runspec@sha256:00'}"],
        # Nothing leaves the machine, or nobody untrusted listens.
        ["broadcast.origin.url=http://localhost:8000"],
        ["broadcast.origin.url=http://127.3.2.1:8000"],
        ["broadcast.origin.url='http://[::1]:8000'"],
        ["broadcast.origin.url=http://203.0.113.7:8000", "samplers.pool.trust=trusted"],
        # An untrusted pool that is started here knows the throw-away root.
        ["identity.root_public_key=null", "placement.roles=[validators, pool]"],
        # Nothing is proven, so nothing is compared.
        ["samplers.pool={quantization: fp8, trust: trusted}", "verify.prefill_share=0.0"],
        [THRESHOLDS % (0.3, 0.3, 0.3)],
        # A speed that nobody knows is not guessed.
        ["samplers.pool.hardware={kind: mine, memory: 80GB, peak_flops: null, count: 4}",
         "broadcast.relays.eu.download=1kbit/s"],
        ["broadcast.relays.eu.download=1Mbit/s", "algorithm.async_level=0"],
        ["learner.hardware.price_per_hour=4.2", "budget={max_cost: 1.0}",
         "samplers.pool.hardware={kind: mine, memory: 80GB, peak_flops: null, count: 4}"],
        ["data.sources.problems={uri: 'hf://datasets/some/data', revision: " + COMMIT + "}"],
        # All hosts reach an object store.
        ["learner.hosts=16", "checkpoints.dir=s3://runs/checkpoints"],
        ["placement={devices: {pool-0: [4, 5, 6, 7], learner: [0], validator-1: [8]}}",
         "learner={hardware: {kind: h100-80g, topology: null, count: 64}, hosts: 64}",
         "storage.shared=true", "checkpoints.dir=/mnt/c", "learner.mesh={fsdp: 64, tensor: 1}",
         "learner.packing.rows=64"],
        # One number of two machines.
        ["placement={roles: [validators], devices: {validator-0: [0], pool-0: [0, 1, 2, 3]}}"],
    ],
    DOCUMENTS: [
        # Random weights take a rate that would wreck trained ones.
        ["optimizer.lr=0.05"],
        # Plain text needs no chat template.
        ["algorithm.kind=sft"],
        ["algorithm.kind=sft", AT_A % ("jsonl", "text: body")],
        # Defaults of what a run has no use for, as `runspec render` writes them.
        ["reward=[]", "samplers=[]", "verify={validators: 0, prefill_share: 1.0}",
         "data.max_prompt_tokens=2048"],
        ["learner.islands.members=[{name: a}, {name: b, rows: 2}]"],
    ],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def work_done_once():
    """Each file is parsed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_nodes, "parse_yaml", cache(yaml_nodes.parse_yaml))
        yield


# `problems` is a rule of `lint --data`, which the command's tests hold.
@pytest.mark.parametrize("code", [code for code in RULES if code != "problems"])
def test_only_the_rule_finds_its_bad_example(code):
    found = load(EXAMPLES / code / "bad.yaml").findings
    assert {finding.code for finding in found} == {code}
    assert all(finding.message and finding.line for finding in found)
    if RULES[code].check:
        assert all(finding.suggestion for finding in found)


@pytest.mark.parametrize("code", RULES)
def test_nothing_finds_the_good_example_and_a_page_says_why(code):
    assert load(EXAMPLES / code / "good.yaml").findings == []
    first, _, rest = RULES[code].page.partition("\n")
    assert first.endswith(".") and len(rest.split()) >= 10


def test_every_example_is_of_a_rule_and_what_they_extend_is_clean():
    folders = {folder.name for folder in EXAMPLES.iterdir() if folder.is_dir()}
    assert folders - {"models"} == set(RULES)
    assert [find(base) for base in (BASE, FLEET, DOCUMENTS)] == [[], [], []]


@pytest.mark.parametrize(
    ("spec", "found", "values"),
    [(spec, found, values) for spec, rows in BREACHES.items() for found, *values in rows],
)
def test_a_breach(spec, found, values):
    [finding] = find(spec, *values)
    assert f"{finding.severity} {finding.code} {finding.path}" == found
    assert finding.requires and finding.suggestion


@pytest.mark.parametrize(
    ("spec", "values"), [(spec, values) for spec, rows in SILENT.items() for values in rows]
)
def test_what_is_right(spec, values):
    assert find(spec, *values) == []


PAID = "learner.hardware.price_per_hour=100", "learner.hardware.peak_flops=1e11", "steps=100000"


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("over-budget", (*PAID, "budget.max_cost=0.1")),
        ("short-budget", (*PAID, "budget.max_hours=0.01")),
        ("no-budget", (*PAID, "budget=null")),
        ("step-fits", ("learner.hardware.memory=40MB",)),
        ("train-state-fits", ("learner.hardware.memory=500kB",)),
    ],
)
def test_a_run_on_documents_has_an_estimate_too(code, values):
    assert code in {finding.code for finding in find(DOCUMENTS, *values)}


def test_numbers_are_those_of_the_inequality():
    [found] = find(BASE, "samplers.pool.max_model_len=79")
    assert found.numbers == {"max_prompt_tokens": 32, "max_new_tokens": 48, "max_model_len": 79}


def test_the_rounding_floor_is_what_bfloat16_does():
    [found] = find(FLEET, "learner.master_dtype=bfloat16")
    floor = found.numbers["floor"]
    assert floor == pytest.approx(2.73e-5, rel=1e-2) and isinstance(floor, float)
    # By hand: 1 / sqrt(5120) = 1.789 x 2^-7, whose neighbours are 2^-14 away.
    assert 2**-7 < floor * 2**9 < 2**-6 and floor < 2**-14 / 2


def local_model(folder: Path, name: str, text: str, more: str = "") -> Path:
    """A spec whose model is the small example's, with another file in the place of its own."""
    for source in (EXAMPLES / "models" / "small").iterdir():
        spec_files.write(folder / "model" / source.name, source.read_text())
    (folder / "model" / name).write_text(text)
    overlay = "model: {hf: model, shape: null}\nwarm_start: null\n"
    overlay += f"data: {{{more or 'thinking: null'}}}\n"
    return spec_files.write(folder / "spec.yaml", f"extends: [{BASE}]\n{overlay}")


def test_added_tokens_count(tmp_path):
    tokenizer = json.loads((EXAMPLES / "models" / "small" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [{"id": 8, "content": "<new>"}]
    [found] = find(local_model(tmp_path, "tokenizer.json", json.dumps(tokenizer)))
    assert found.code == "tokenizer-vocabulary"
    assert found.numbers == {"largest_id": 8, "vocab_size": 8}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model": 3, "added_tokens": 7}', "[" * 10**5])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_of_nonsense_are_no_crash(tmp_path, name, text):
    assert {found.code for found in find(local_model(tmp_path, name, text))} <= {
        "chat-template",
        "thinking",
    }


PLAIN = "{% for m in messages %}{{ m.content }}"
DEFAULT = [{"name": "default", "template": f"{PLAIN}<end>{{% endfor %}}"}]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (f"{PLAIN}{{{{ eos_token }}}}{{% endfor %}}", None),
        (f"{PLAIN}\n<end>\n{{% endfor %}}{{{{ eos_token }}}}", 7),
        (f"{PLAIN}{{% generation %}}<end>{{% endgeneration %}}{{% endfor %}}", 7),
        (f"{PLAIN}<endless><eos>{{% endfor %}}", 6),
        (DEFAULT, 7),
        # Nothing is known where no token follows, or the assistant's words are left out.
        (f"{PLAIN}\nUser:{{% endfor %}}", None),
        ("<end>{{ messages[0].content }}<end>", None),
        ("{{ raise_exception('no') }}", None),
        ("{% if", None),
    ],
)
def test_the_token_that_ends_the_turn_of_the_chat_template(tmp_path, template, end):
    # given a model that ends at <eos>, with two more special tokens, one the beginning of the other
    config = json.dumps({"eos_token": "<eos>", "chat_template": template})
    spec = local_model(tmp_path, "tokenizer_config.json", config)
    path = tmp_path / "model" / "tokenizer.json"
    tokens = [{"id": i, "content": text} for i, text in ((1, "<eos>"), (6, "<endless>"))]
    tokens.append({"id": 7, "content": "<end>"})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{**token, **flags, "special": True} for token in tokens]
    text = path.read_text().replace('"</think>": 6', '"<endless>": 6, "<end>": 7')
    path.write_text(json.dumps(json.loads(text) | {"added_tokens": added}))
    # when it is linted, then another end is a warning with the token's id, where a template is used
    found = [(f.severity, f.numbers) for f in find(spec) if f.code == "end-token"]
    numbers = {"turn_end": end, "eos_token": 1}
    assert found == ([] if end is None else [("warning", numbers)])


LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>"
    "\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN25 = (
    "{# no <think> here #}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined"
    " and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
R1 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "data", "form"),
    [
        (LLAMA, "", "none"),
        (QWEN25, "", "none"),
        (QWEN3, "", "required"),
        (R1, "", "required"),
        (None, "", "none"),
        (QWEN25, "thinking: null, think_prefill: true", "required"),
        (QWEN25, "thinking: null, system_prompt: Write <think>", "required"),
        (R1, "thinking: optional", "optional"),
        ([{"name": "a", "template": LLAMA}, {"name": "b", "template": R1}], "", None),
    ],
)
def test_what_is_graded_follows_from_the_chat_template(tmp_path, template, data, form):
    config = {"eos_token": "<eos>"} | ({} if template is None else {"chat_template": template})
    path = local_model(tmp_path, "tokenizer_config.json", json.dumps(config), data)
    checked = check.check_spec(SpecFiles(path))
    assert checked.spec is not None
    assert located(checked.spec, tmp_path).data.thinking == form
    assert [f.code for f in checked.findings if f.code == "thinking"] == ["thinking"] * (not form)


def test_a_chat_template_that_asks_for_the_date_is_told_which_it_gets(tmp_path):
    template = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    config = json.dumps({"eos_token": "<eos>", "chat_template": template})
    spec = local_model(tmp_path, "tokenizer_config.json", config)
    [found] = [finding for finding in find(spec) if finding.code == "chat-template"]
    assert (found.severity, found.path) == ("warning", "model.hf")
    assert f"always {TEMPLATE_DATE:%-d %B %Y}" in found.message


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"model_type": "gpt2"}'])
def test_a_config_that_is_none_is_one_finding(tmp_path, text):
    [found] = find(local_model(tmp_path, "config.json", text))
    assert (found.code, found.path) == ("model-config", "model.hf")


def test_each_relay_without_a_way_to_the_origin_is_told_once():
    # given a and b that fetch from each other, c below them, d from a relay that is not there
    relays = "[{name: a, upstream: [b]}, {name: b, upstream: [a]}, {name: c, upstream: [b]}, "
    found = find(BASE, f"broadcast.relays={relays}{{name: d, upstream: [e]}}]")
    told = sorted((f.code, f.path.split(".")[2]) for f in found)
    assert told in (
        [("relay-cycle", first), ("relay-path", "c"), ("relay-upstream", "d")] for first in "ab"
    )
    # and a cycle of 300 relays, in no time
    chain = [f"{{name: r{i}, upstream: [r{(i - 1) % 300}]}}" for i in range(300)]
    [one] = find(BASE, f"broadcast.relays=[{', '.join(chain)}]")
    assert (one.code, one.numbers["relays_in_cycle"]) == ("relay-cycle", 300)
    chain[0] = "{name: r0, upstream: [origin]}"
    assert find(BASE, f"broadcast.relays=[{', '.join(chain)}]") == []


def test_the_slowest_declared_link_decides():
    # given a version of 65.5 GB, steps of 775 s and two relays, the second behind 200 Mbit/s
    slow = (
        "samplers.pool={tokens_per_s: 100000, replicas: 2}",
        "broadcast.relays={eu: {download: 10Gbit/s}, us: {download: 200Mbit/s}}",
    )
    [found] = find(FLEET, *slow)
    assert (found.code, found.path) == ("broadcast-time", "broadcast.relays.us.download")
    assert found.numbers["broadcast_s"] == pytest.approx(65.5e9 * 8 / 200e6, rel=0.01)
    assert found.numbers["step_s"] == pytest.approx(774.5, rel=0.01)
    # when versions may lag by twice as many steps, then they are in time, if only just
    later = ("algorithm.async_level=4", "broadcast.keep_versions=6")
    assert [f.code for f in find(FLEET, *slow, *later)] == ["whole-versions"]
    # and with deltas, which the rule suggests, at once
    assert found.suggestion.startswith("broadcast.format: delta")
    assert find(FLEET, *slow, "broadcast.format=delta") == []


def test_a_delta_that_every_update_fills_gains_nothing():
    # given rates from the reference's to what moves every weight by half a step of bf16
    delta = "broadcast.format=delta"
    for lr in ("3e-7", "1e-5"):
        assert "delta-gain" not in [f.code for f in find(FLEET, delta, f"optimizer.lr={lr}")]
    # then only the largest is spoken of: 5e-5 x 5120^.5 x 2^8
    [found] = [f for f in find(FLEET, delta, "optimizer.lr=5e-5") if f.code == "delta-gain"]
    assert found.numbers["changed_share"] == pytest.approx(0.916, rel=0.01)
    # and not where somebody measured that few change all the same
    assert find(FLEET, delta, "optimizer.lr=5e-5", "estimate.changed_share=0.02") == []


def test_an_anchor_is_due_before_the_deltas_outweigh_it():
    # given deltas of 1 %, 66 of which are a version
    [found] = find(FLEET, "broadcast={format: delta, anchor_every: 100}")
    assert (found.code, found.path) == ("anchor-distance", "broadcast.anchor_every")
    joiner = found.numbers["version_bytes"] + 99 * found.numbers["delta_bytes"]
    assert found.numbers["joiner_bytes"] == pytest.approx(joiner)
    # when what is suggested is done, then it is right, and one more would not be
    assert found.suggestion == "anchor_every: 67 or less"
    assert find(FLEET, "broadcast={format: delta, anchor_every: 67}") == []
    assert len(find(FLEET, "broadcast={format: delta, anchor_every: 68}")) == 1
    # nor is it spoken of where no deltas are sent
    assert find(FLEET, "broadcast.anchor_every=100") == []


def test_what_is_suggested_is_enough():
    # given samplers for which 1.3 validators would do
    fleet = ["samplers.pool.tokens_per_s=10000", "verify={validators: 1, tokens_per_s: 27000}"]
    [slow] = find(FLEET, *fleet)
    assert slow.suggestion.startswith("2 would do")
    assert find(FLEET, *fleet, "verify.validators=2") == []
    # and money for 172.9 of 300 steps
    fleet = ["samplers.pool.tokens_per_s=100000", "learner.hardware.price_per_hour=4.2"]
    [dear] = find(FLEET, *fleet, "budget.max_cost=10000")
    assert dear.suggestion == "it pays 172 steps"
    assert find(FLEET, *fleet, "budget.max_cost=10000", "steps=172") == []
    # and hours for some of them
    hours = [fleet[0], "budget.max_hours=30"]
    [short] = find(FLEET, *hours)
    steps = int(short.suggestion.removeprefix("it lasts for ").removesuffix(" steps"))
    assert 0 < steps < 300
    assert find(FLEET, *hours, f"steps={steps}") == [] != find(FLEET, *hours, f"steps={steps + 1}")


def test_a_secret_is_found_and_never_shown(tmp_path):
    # given a token among a source's parameters, and one where other rules name what they found
    token = "hf_" + "aB3" * 12
    params = f"data: {{sources: [{{name: words, params: {{auth: {token}}}}}]}}\n"
    [found] = find(spec_files.write(tmp_path / "spec.yaml", f"extends: [{BASE}]\n{params}"))
    assert (found.code, found.path) == ("inline-secret", "data.sources.words.params.auth")
    assert "a Hugging Face token" in found.message
    everywhere = find(FLEET, f"model.hf={token}", "model.revision=")
    assert "inline-secret" in {finding.code for finding in everywhere}
    assert not [f for f in (found, *everywhere) if token in format_finding(f)]


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        ("ghp_" + 36 * "a", "", "a GitHub token"), ("github_pat_" + 22 * "A", "", "a GitHub token"),
        ("glpat-" + 20 * "a", "", "a GitLab token"), ("xoxb-1234567890-abc", "", "a Slack token"),
        ("sk-ant-api03-" + 10 * "aB3", "", "an API key"), ("sk-" + 16 * "aB3", "", "an API key"),
        ("AKIA" + 16 * "Z", "", "an AWS access key"), ("AIza" + 35 * "q", "", "a Google API key"),
        ("eyJ" + 9 * "a" + ".eyJ" + 9 * "b" + "." + 20 * "c", "", "a JSON web token"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "", "a private key"), (64 * "0a", "", ""),
        ("-----BEGIN PRIVATE KEY-----", "", "a private key"),
        ("-----BEGIN PUBLIC KEY-----", "", ""),
        ("postgres://user:secret@host/db", "", "a password in a URL"),
        ("QWxhZGRpbjpvcGVuIHNlc2FtZQ==1", "auth_token", "a secret auth_token"),
        ("QWxhZGRpbjpvcGVuIHNlc2FtZQ==1", "column", ""),
        ("https://relay.example.org:8443/v1?at=me@example.org", "", ""),
        ("hf_dataset_with_a_very_long_name_indeed_2026", "", ""),
        ("a correct horse with 4 legs", "password", ""), ("solve_rate_qwen_r1", "sort_key", ""),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret(text, key, kind):
    assert secret_kind(text, key) == kind
