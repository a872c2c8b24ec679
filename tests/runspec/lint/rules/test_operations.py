"""Asynchrony, verification, reproducibility, security and placement, beside the rules' examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.findings import format_finding
from runspec.lint.rules.security import secret_kind
from tests.runspec.core.spec.spec_files import BASE, FLEET, find, write

COMMIT = "89abcdef" * 5
ROOM = "max_model_len: 96, max_new_tokens: 48, dtype: float32, trust: trusted"
THRESHOLDS = (
    "verify.thresholds=[{name: bfloat16, logprob_submission: 0.1, logprob_rollout: 0.3, gap: %s, "
    "gap_share: 0.02, gap_max: %s, gap_mean: %s, mismatch_share: 0.3, mantissa_mean: 9.0, "
    "mantissa_median: 9.0}]"
)
# spec, overrides, what is found: code, path, severity
BREACHES = [
    # relays
    (BASE, ["broadcast.relays=[{name: eu, upstream: [eu]}]"],
     "relay-cycle", "broadcast.relays.eu.upstream", "error"),
    (BASE, ["broadcast.relays=[{name: a, upstream: [origin, none, nor]}]"],
     "relay-upstream", "broadcast.relays.a.upstream", "error"),
    (BASE, ["broadcast.relays=[{name: eu}]", "samplers.pool.relays=[eu, eu]"],
     "pool-relays", "samplers.pool.relays", "error"),
    (BASE, ["broadcast.relays=[{name: origin}]"],
     "reserved-names", "broadcast.relays.origin", "error"),
    # security
    (FLEET, ["broadcast.origin.url=http://203.0.113.7:8000"],
     "plain-http", "broadcast.origin.url", "error"),
    (FLEET, ["broadcast={relays: [], origin: {url: null}}"],
     "public-address", "broadcast.origin.url", "error"),
    (FLEET, ["placement.url=http://203.0.113.7"], "plain-http", "placement.url", "error"),
    (FLEET, ["placement.url=run.example.org"], "server-url", "placement.url", "error"),
    (BASE, ["samplers.pool={trust: untrusted}", "broadcast.origin.url=https://origin.example.org",
            "placement={roles: [validators], url: https://run.example.org}"],
     "unsigned-weights", "identity.root_public_key", "error"),
    (BASE, ["broadcast.relays=[{name: eu, url: 'https://me:hunter2@relay.example.org'}]"],
     "inline-secret", "broadcast.relays.eu.url", "error"),
    # verification
    (FLEET, ["samplers.pool.trust=trusted",
             "reward.code={kind: code, sandboxed: false}", "reward.math=null"],
     "unsandboxed-grading", "reward.code.sandboxed", "warning"),
    (FLEET, ["verify.prefill_floor=0.0"], "untrusted-unproven", "verify.prefill_floor", "error"),
    (FLEET, ["samplers.pool.in_flight_updates=true"],
     "in-flight-updates", "samplers.pool.in_flight_updates", "error"),
    (FLEET, ["samplers.pool.dtype=float32", "samplers.pool.hardware.memory=1000GB"],
     "uncalibrated-precision", "samplers.pool.dtype", "error"),
    (FLEET, [THRESHOLDS % (0.3, 0.1, 1e-3)],
     "thresholds-order", "verify.thresholds.bfloat16.gap", "error"),
    (FLEET, ["samplers.pool={quantization: fp8, dtype: float32, hardware: {memory: 1000GB}}",
             "verify.prefill_share=0.0", "samplers.pool.trust=trusted"],
     "quantized-pool", "samplers.pool.dtype", "error"),
    (FLEET, ["verify={engine: torch, hardware: {kind: h100-80g, count: 1}}"],
     "validator-weights-fit", "verify.hardware", "error"),
    (FLEET, ["samplers.pool.tokens_per_s=20000",
             "verify={validators: 1, hardware: {kind: h100-80g, count: 2}}"],
     "validator-capacity", "verify.validators", "error"),
    # reproducibility
    (FLEET, ["model.revision=null"], "unpinned-revision", "model.revision", "error"),
    (BASE, ["model={hf: ./models/small}"], "one-model", "model", "error"),
    # Directories have no revision.
    (FLEET, ["model={hf: ./QwQ-32B, revision: null}"], "model-path", "model.hf", "warning"),
    (FLEET, ["model={hf: /gone/QwQ-32B, revision: null}"], "model-path", "model.hf", "warning"),
    (FLEET, ["model.tokenizer={hf: ../gone}"], "model-path", "model.tokenizer.hf", "warning"),
    # placement
    (BASE, ["placement.devices={pool: [0]}"], "unknown-role", "placement.devices.pool", "error"),
    (
        BASE,
        ["placement.kubernetes={image: i, images: {pools: j}}"],
        "unknown-role",
        "placement.kubernetes.images.pools",
        "error",
    ),
    (BASE, [f"samplers.relay-eu={{hardware: {{kind: cpu}}, {ROOM}}}",
            "broadcast.relays=[{name: eu}]"],
     "role-clash", "samplers.relay-eu", "error"),
    (BASE, ["placement.devices={learner: [1], pool-0: [0, 1]}"],
     "shared-device", "placement.devices.pool-0", "warning"),
    (FLEET, ["learner={hosts: 16}", "storage.shared=true", "checkpoints.dir=/mnt/c",
            "placement.devices={learner-3: [0]}"],
     "too-few-devices", "placement.devices.learner-3", "error"),
    (FLEET, ["storage.shared=false", "checkpoints.dir=/mnt/local"],
     "local-storage", "checkpoints.dir", "error"),
    (BASE, ["learner.hosts=2", "placement.backend=ray"],
     "local-storage", "checkpoints.dir", "error"),
    (BASE, ["placement.backend=kubernetes"], "no-cluster", "placement.kubernetes", "error"),
    (BASE, ["broadcast.origin.url=http://127.0.0.1:99999"],
     "server-url", "broadcast.origin.url", "error"),
    (BASE, ["broadcast.relays=[{name: a, url: 'http://localhost:9000'}, "
            "{name: b, url: 'http://127.0.0.1:9000/'}]"],
     "port-clash", "broadcast.relays.b.url", "error"),
    (BASE, ["placement={base_port: 8000, metrics: {base_port: 8001}}"],
     "port-clash", "placement.metrics.base_port", "error"),
    (BASE, ["verify.hardware={kind: l4, count: 1, price_per_hour: 0.8}", "budget.max_hours=null"],
     "no-budget", "budget", "error"),
]  # fmt: skip
SILENT = [
    # Kubernetes makes the volume that the learner's hosts share.
    (FLEET, ["storage.shared=false", "checkpoints.dir=null", "placement.backend=kubernetes",
             "placement.kubernetes={image: 'runspec:1'}"]),
    (BASE, ["learner.hosts=2"]),
    # A cycle-free graph of several tiers, with more than one way down.
    (BASE, ["broadcast.relays=[{name: a}, {name: b, upstream: [a, origin]}, "
            "{name: c, upstream: [b, a]}]", "samplers.pool.relays=[c, b]"]),
    # Nothing leaves the machine, or nobody untrusted listens.
    (FLEET, ["broadcast.origin.url=http://localhost:8000"]),
    (FLEET, ["broadcast.origin.url=http://127.3.2.1:8000"]),
    (FLEET, ["broadcast.origin.url='http://[::1]:8000'"]),
    (FLEET, ["broadcast.origin.url=http://203.0.113.7:8000", "samplers.pool.trust=trusted"]),
    # An untrusted pool that is started here knows the throw-away root.
    (FLEET, ["identity.root_public_key=null", "placement.roles=[validators, pool]"]),
    (BASE, ["samplers.pool.trust=untrusted"]),
    # Public keys, digests and long names are no secrets, nor is a key that is a word.
    (BASE, ["data.sources.words.params={key: ascending, token_count: 12, at: " + COMMIT + "}"]),
    (BASE, ["name=sk-learn-tiny-model-for-the-tests-2026"]),
    # Nothing is proven, so nothing is compared.
    (FLEET, ["samplers.pool={quantization: fp8, trust: trusted}", "verify.prefill_share=0.0"]),
    (FLEET, [THRESHOLDS % (0.3, 0.3, 0.3)]),
    # A speed that nobody knows is not guessed.
    (FLEET, ["samplers.pool.hardware={kind: mine, memory: 80GB, peak_flops: null, count: 4}",
             "broadcast.relays.eu.download=1kbit/s"]),
    (FLEET, ["broadcast.relays.eu.download=1Mbit/s", "algorithm.async_level=0"]),
    (FLEET, ["learner.hardware.price_per_hour=4.2", "budget={max_cost: 1.0}",
             "samplers.pool.hardware={kind: mine, memory: 80GB, peak_flops: null, count: 4}"]),
    (BASE, ["learner.hardware.price_per_hour=0.0", "budget.max_hours=null"]),
    (FLEET, ["data.sources.problems={uri: 'hf://datasets/some/data', revision: " + COMMIT + "}"]),
    # All hosts reach an object store.
    (FLEET, ["learner.hosts=16", "checkpoints.dir=s3://runs/checkpoints"]),
    # Several processes of a CPU share its files.
    (BASE, ["learner.hosts=2"]),
    (BASE, ["placement.devices={pool-0: []}"]),
    (FLEET, ["placement={devices: {pool-0: [4, 5, 6, 7], learner: [0], validator-1: [8]}}",
             "learner={hardware: {kind: h100-80g, topology: null, count: 64}, hosts: 64}",
             "storage.shared=true", "checkpoints.dir=/mnt/c", "learner.mesh={fsdp: 64, tensor: 1}",
             "learner.packing.rows=64"]),
    # A pool that is called like another's worker is named where workers are not.
    (BASE, [f"samplers.pool-0={{hardware: {{kind: cpu}}, {ROOM}}}"]),
    # One number of two machines.
    (FLEET, ["placement={roles: [validators], devices: {validator-0: [0], pool-0: [0, 1, 2, 3]}}"]),
    # One port of two hosts.
    (BASE, ["broadcast.relays=[{name: a, url: 'https://a.example.org'}, "
            "{name: b, url: 'https://b.example.org'}]"]),
    (BASE, ["placement.base_port=8000", "broadcast.relays=[{name: a}, {name: b}]"]),
    # Figures after the servers' ports.
    (BASE, ["placement={base_port: 8000, metrics: {base_port: 8002}}"]),
]  # fmt: skip


def test_each_relay_without_a_way_to_the_origin_is_told_once() -> None:
    # a and b fetch from each other, c below them from b, d from a relay that is not there
    relays = "[{name: a, upstream: [b]}, {name: b, upstream: [a]}, {name: c, upstream: [b]}, "
    found = find(BASE, f"broadcast.relays={relays}{{name: d, upstream: [e]}}]")
    told = {f.code: f.path for f in found}
    assert len(found) == 3
    assert told["relay-cycle"] in (
        "broadcast.relays.a.upstream",
        "broadcast.relays.b.upstream",
    )
    assert told["relay-path"] == "broadcast.relays.c.upstream"
    assert told["relay-upstream"] == "broadcast.relays.d.upstream"


def test_a_long_chain_and_a_large_cycle_of_relays_take_no_time() -> None:
    chain = [f"{{name: r{i}, upstream: [{f'r{i - 1}' if i else 'origin'}]}}" for i in range(300)]
    assert find(BASE, f"broadcast.relays=[{', '.join(chain)}]") == []
    chain[0] = "{name: r0, upstream: [r299]}"
    [found] = find(BASE, f"broadcast.relays=[{', '.join(chain)}]")
    assert (found.code, found.numbers["relays_in_cycle"]) == ("relay-cycle", 300)


def test_the_slowest_declared_link_decides() -> None:
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


def test_a_delta_that_every_update_fills_gains_nothing() -> None:
    # given a bf16 run at rates from the reference's to what moves every weight by half a step of it
    shares = []
    for lr in ("3e-7", "3e-6", "1e-5", "5e-5"):
        found = find(FLEET, "broadcast.format=delta", f"optimizer.lr={lr}")
        shares.append([f.numbers["changed_share"] for f in found if f.code == "delta-gain"])
    # then only the largest is spoken of: 5e-5 x 5120^.5 x 2^8
    assert shares == [[], [], [], [pytest.approx(0.916, rel=0.01)]]
    # and not where somebody measured that few change all the same
    measured = ["broadcast.format=delta", "optimizer.lr=5e-5", "estimate.changed_share=0.02"]
    assert [f.code for f in find(FLEET, *measured)] == []


def test_an_anchor_is_due_before_the_deltas_outweigh_it() -> None:
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


def test_what_is_suggested_is_enough() -> None:
    # given samplers for which 1.2 validators would do
    fleet = ["samplers.pool.tokens_per_s=10000", "verify={validators: 1, tokens_per_s: 9000}"]
    [slow] = find(FLEET, *fleet)
    assert slow.suggestion.startswith("2 would do")
    assert find(FLEET, *fleet, "verify.validators=2") == []
    # and money for 172.9 of 300 steps
    fleet = ["samplers.pool.tokens_per_s=100000", "learner.hardware.price_per_hour=4.2"]
    [dear] = find(FLEET, *fleet, "budget.max_cost=10000")
    assert dear.suggestion == "it pays 172 steps"
    assert find(FLEET, *fleet, "budget.max_cost=10000", "steps=172") == []
    # and hours for some of them
    [short] = find(FLEET, *fleet[:1], "budget.max_hours=30")
    steps = int(short.suggestion.removeprefix("it lasts for ").removesuffix(" steps"))
    assert 0 < steps < 300
    assert find(FLEET, *fleet[:1], "budget.max_hours=30", f"steps={steps}") == []
    assert find(FLEET, *fleet[:1], "budget.max_hours=30", f"steps={steps + 1}") != []


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    token = "hf_" + 34 * "x"
    spec = write(
        tmp_path / "spec.yaml",
        f"extends: [{BASE}]\ndata: {{sources: [{{name: words, params: {{auth: {token}}}}}]}}\n",
    )
    [found] = find(spec)
    assert (found.code, found.path) == ("inline-secret", "data.sources.words.params.auth")
    assert "a Hugging Face token" in found.message
    assert token not in format_finding(found)


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        ("ghp_" + 36 * "a", "", "a GitHub token"),
        ("github_pat_" + 22 * "A", "", "a GitHub token"),
        ("glpat-" + 20 * "a", "", "a GitLab token"),
        ("xoxb-1234567890-abc", "", "a Slack token"),
        ("sk-ant-api03-" + 10 * "aB3", "", "an API key"),
        ("sk-" + 16 * "aB3", "", "an API key"),
        ("AKIA" + 16 * "Z", "", "an AWS access key"),
        ("AIza" + 35 * "q", "", "a Google API key"),
        ("eyJ" + 9 * "a" + ".eyJ" + 9 * "b" + "." + 20 * "c", "", "a JSON web token"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "", "a private key"),
        ("-----BEGIN PRIVATE KEY-----", "", "a private key"),
        ("postgres://user:secret@host/db", "", "a password in a URL"),
        ("QWxhZGRpbjpvcGVuIHNlc2FtZQ==1", "auth_token", "a secret auth_token"),
        ("QWxhZGRpbjpvcGVuIHNlc2FtZQ==1", "column", ""),
        ("-----BEGIN PUBLIC KEY-----", "", ""),
        (64 * "0a", "", ""),
        ("https://relay.example.org:8443/v1?at=me@example.org", "", ""),
        ("hf_dataset_with_a_very_long_name_indeed_2026", "", ""),
        ("a correct horse with 4 legs", "password", ""),
        ("solve_rate_qwen_r1_distill", "sort_key", ""),
    ],
)
def test_what_looks_like_a_secret(text: str, key: str, kind: str) -> None:
    assert secret_kind(text, key) == kind


def test_a_secret_in_the_place_of_a_name_is_quoted_by_no_rule() -> None:
    # given a token where other rules would name what they found
    token = "hf_" + "aB3" * 12
    found = find(FLEET, f"model.hf={token}", "model.revision=")
    # then the secret is found, and nothing that is printed holds it
    assert "inline-secret" in {finding.code for finding in found}
    assert not [finding for finding in found if token in format_finding(finding)]
