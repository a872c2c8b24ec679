"""What breaks a rule of those who sample, carry weights and check: lengths, lags, relays, trust."""

from __future__ import annotations

from tests.runspec.lint.generated import Spec
from tests.runspec.lint.mutations.changes import (
    FLEET,
    LAPTOP,
    Mutation,
    all_pools,
    both,
    local_model,
    put,
)

THRESHOLDS = {
    "logprob_submission": 0.1,
    "logprob_rollout": 0.2,
    "gap": 0.1,
    "gap_share": 0.01,
    "gap_max": 2.0,
    "gap_mean": 0.001,
    "mismatch_share": 0.3,
    "mantissa_mean": 10.0,
    "mantissa_median": 8.0,
}


def _cycle(spec: Spec) -> None:
    spec["broadcast"]["relays"] = [
        {"name": "one", "upstream": ["two", "origin"]},
        {"name": "two", "upstream": ["one", "origin"]},
    ]


def _no_path(spec: Spec) -> None:
    # An island: two relays in a ring, and one below them.
    _cycle(spec)
    relays = spec["broadcast"]["relays"]
    relays[0]["upstream"], relays[1]["upstream"] = ["two"], ["one"]
    relays.append({"name": "three", "upstream": ["one"]})


RULES = {
    "context-fits": Mutation(
        put(data__max_prompt_tokens=100, learner__packing__tokens=256), kinds=LAPTOP
    ),
    "model-len": Mutation(put(pool__max_model_len=300), kinds=LAPTOP),
    "model-positions": Mutation(put(model__max_context=10**6), kinds=FLEET),
    "packing-holds": Mutation(put(learner__packing__tokens=32), kinds=LAPTOP),
    "attention-window": Mutation(local_model("sliding"), kinds=LAPTOP),
    "neutral-sampling": Mutation(put(pool__sampling__top_p=0.9)),
    "pool-devices": Mutation(put(pool__hardware__count=64), kinds=FLEET),
    "pool-heads": Mutation(put(pool__parallel__tensor=7, pool__hardware__count=7), kinds=FLEET),
    "quantized-pool": Mutation(
        put(pool__quantization="fp8", verify__thresholds=[{"name": "fp8", **THRESHOLDS}]),
        kinds=LAPTOP,
    ),
    "versions-kept": Mutation(put(algorithm__async_level=3, broadcast__keep_versions=4)),
    "lease-outlasts-step": Mutation(put(verify__lease_timeout="3h")),
    "relay-upstream": Mutation(
        put(broadcast__relays=[{"name": "one", "upstream": ["origin", "nobody"]}])
    ),
    "relay-cycle": Mutation(_cycle),
    "relay-path": Mutation(_no_path, also=frozenset({"relay-cycle"})),
    "pool-relays": Mutation(put(pool__relays=["nobody"])),
    "broadcast-time": Mutation(
        both(
            put(algorithm__async_level=1, broadcast__keep_versions=5),
            all_pools(download="10kbit/s", tokens_per_s=1e6),
        ),
        kinds=FLEET,
        also=frozenset({"validator-capacity"}),
    ),
    "delta-gain": Mutation(put(broadcast__format="delta", estimate={"changed_share": 0.9})),
    "anchor-distance": Mutation(
        put(
            broadcast__format="delta",
            broadcast__anchor_every=100,
            estimate={"changed_share": 0.01},
        )
    ),
    "whole-versions": Mutation(
        both(
            put(
                algorithm__async_level=0,
                algorithm__prompts_per_step=64,
                algorithm__group_size=8,
                estimate={"mean_new_tokens": 1000.0},
            ),
            all_pools(download="100kbit/s", tokens_per_s=0.03),
        ),
        kinds=FLEET,
    ),
    "no-validators": Mutation(put(verify__validators=0)),
    "untrusted-unseeded": Mutation(put(pool__trust="untrusted", pool__sampling__seeded=False)),
    "untrusted-unproven": Mutation(put(pool__trust="untrusted", verify__prefill_share=0.0)),
    "prefill-floor": Mutation(put(verify__prefill_share=0.3, verify__prefill_floor=0.4)),
    "unsandboxed-grading": Mutation(
        lambda spec: spec["reward"].append({"name": "code", "kind": "code", "sandboxed": False})
    ),
    "in-flight-updates": Mutation(
        put(pool__trust="untrusted", pool__sampling__seeded=True, pool__in_flight_updates=True),
        kinds=FLEET,
    ),
    "engine-hardware": Mutation(
        put(verify__engine="torch", verify__hardware={"kind": "tpu-v5p", "topology": "2x2x1"}),
        kinds=FLEET,
    ),
    "validator-capacity": Mutation(
        both(put(verify__validators=1, verify__tokens_per_s=1.0), all_pools(tokens_per_s=1000.0)),
        kinds=FLEET,
    ),
    "uncalibrated-precision": Mutation(
        put(pool__dtype="float32"), kinds=FLEET, also=frozenset({"sampler-weights-fit"})
    ),
    "calibration-profile": Mutation(
        put(verify__profiles=[{"name": "measured", "file": "nowhere.json"}])
    ),
    "unused-thresholds": Mutation(put(verify__thresholds=[{"name": "fp8", **THRESHOLDS}])),
    "thresholds-order": Mutation(
        put(verify__thresholds=[{"name": "bfloat16", **THRESHOLDS, "gap_max": 0.01}]), kinds=FLEET
    ),
    "plain-http": Mutation(
        put(
            pool__trust="untrusted",
            broadcast__relays=[{"name": "one", "url": "http://one.example.org"}],
        )
    ),
    "unsigned-weights": Mutation(
        put(pool__trust="untrusted", identity__root_public_key=None), kinds=FLEET
    ),
    "inline-secret": Mutation(put(data__source__params={"token": "hf_" + "aB3" * 12})),
}
