"""For each rule, the smallest change that breaks it in a spec that was valid.

A change is made to a generated spec (`generated.valid_spec`), before or after it is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import runspec.lint
from tests.runspec.lint.generated import Spec

MODELS = Path(runspec.lint.__file__).parent / "examples" / "models"
Kind = Literal["laptop", "fleet"]


@dataclass(frozen=True)
class Mutation:
    """How a rule is broken."""

    change: Callable[[Spec], None] = lambda spec: None
    """To the spec as data."""
    write: Callable[[str], str] = lambda text: text
    """To its text."""
    kinds: tuple[Kind, ...] = ("laptop", "fleet")
    """The generated specs that it can be made to."""
    also: frozenset[str] = frozenset()
    """Other rules that are right to speak of it too, as far as the spec goes."""


def put(**values: Any) -> Callable[[Spec], None]:
    """Sets values by path: `__` is a dot, `pool` the first pool, `length` its reward term."""

    def change(spec: Spec) -> None:
        for path, value in values.items():
            *above, last = path.split("__")
            at: Any = spec
            for step in above:
                at = _step(at, step)
            at[last] = value

    return change


def _step(at: Any, step: str) -> Any:
    if step in ("pool", "relay", "source"):
        key = {"pool": "samplers", "relay": "relays", "source": "sources"}[step]
        return at[key][0]
    if step in ("task", "length"):
        return at["reward"][("task", "length").index(step)]
    return at.setdefault(step, {})


def both(*changes: Callable[[Spec], None]) -> Callable[[Spec], None]:
    """One change after the other."""

    def change(spec: Spec) -> None:
        for each in changes:
            each(spec)

    return change


def lines(*added: str) -> Callable[[str], str]:
    """The text with lines at its end."""
    return lambda text: text + "".join(f"{line}\n" for line in added)


def all_pools(**values: Any) -> Callable[[Spec], None]:
    """The same change to every pool."""

    def change(spec: Spec) -> None:
        for pool in spec["samplers"]:
            put(**values)(pool)

    return change


def _second_pool(spec: Spec) -> None:
    first = spec["samplers"][0]
    other = first | {"name": "other", "sampling": {"temperature": 0.5, "seeded": True}}
    spec["samplers"] = [first, other]


def _second_task(spec: Spec) -> None:
    spec["reward"].append({"name": "again", "kind": "reasoning_gym"})


def _only_length(spec: Spec) -> None:
    del spec["reward"][0]


def _source(uri: str, **params: str) -> Callable[[Spec], None]:
    revision = "a" * 40 if "://" in uri else None

    def change(spec: Spec) -> None:
        rows = {"kind": "jsonl", "uri": uri, "revision": revision, "params": params}
        spec["data"]["sources"][0] |= rows

    return change


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


def _relay_called_like_a_worker(spec: Spec) -> None:
    spec["samplers"][0]["name"] = "relay-x"
    spec["broadcast"]["relays"] = [{"name": "x-0"}]


def _local_model(name: str, **values: Any) -> Callable[[Spec], None]:
    """A small model of the rules' own examples, in the place of the generated shape."""

    def change(spec: Spec) -> None:
        spec["model"] = {"hf": str(MODELS / name), "max_context": 128}
        spec.pop("warm_start")
        put(**values)(spec)

    return change


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
SHARED = {"devices": {"learner": [0], "validator-0": [0]}}
LAPTOP: tuple[Kind, ...] = ("laptop",)
FLEET: tuple[Kind, ...] = ("fleet",)
SEEDED: frozenset[str] = frozenset({"stale-pi-old"})

FILES = {
    "yaml": Mutation(write=lines("a: [1")),
    "extends": Mutation(write=lines("extends: [nowhere.yaml]")),
    "duplicate-key": Mutation(write=lines("steps: 77")),
    "duplicate-name": Mutation(lambda spec: spec["reward"].append(dict(spec["reward"][0]))),
    "unknown-name": Mutation(write=lines("secrets: {nobody: null}"), kinds=LAPTOP),
    "unknown-key": Mutation(put(algorithm__groupsize=8)),
    "missing-key": Mutation(lambda spec: spec["data"].pop("max_prompt_tokens")),
    "no-seed": Mutation(lambda spec: spec.pop("seed")),
    "wrong-type": Mutation(put(steps="12")),
    "bad-value": Mutation(put(steps=0)),
    "unit": Mutation(put(verify__lease_timeout=60)),
    "ambiguous-scalar": Mutation(
        write=lambda text: text.replace("name: words", "name: 'no'").replace("'no'", "no")
    ),
    "variable": Mutation(put(checkpoints__dir="${NOBODY_SETS_THIS}")),
    "secret-value": Mutation(
        put(
            secrets=[{"name": "TOKEN", "from": {"env": "HOME"}}],
            checkpoints__dir="${HOME}/states",
        )
    ),
    "malformed-suppression": Mutation(write=lines("# runspec: ignore the rest")),
    "suppression-reason": Mutation(
        write=lines("# runspec: ignore[group-size]"), also=frozenset({"unused-suppression"})
    ),
    "unknown-rule": Mutation(write=lines('# runspec: ignore[no-such-rule] reason="x"')),
    "unused-suppression": Mutation(write=lines('# runspec: ignore[group-size] reason="x"')),
}
"""Of `placement-scope` the files are two: see its own test."""

RULES = {
    "updates-divide-batch": Mutation(put(algorithm__updates_per_step=7)),
    "whole-groups": Mutation(put(algorithm__prompts_per_step=66, algorithm__updates_per_step=4)),
    "group-size": Mutation(
        put(algorithm__group_size=1), also=frozenset({"idle-shards", "padded-microbatch"})
    ),
    "clip-bounds": Mutation(put(algorithm__surrogate="clip", algorithm__clip__delta=1.1)),
    "clip-lower": Mutation(
        put(algorithm__surrogate="clip", algorithm__clip__delta=None, algorithm__clip__eps_low=1.5)
    ),
    "cispo": Mutation(put(algorithm__surrogate="cispo", algorithm__clip__delta=4.0)),
    "stale-pi-old": Mutation(
        put(algorithm__updates_per_step=1, algorithm__async_level=1, broadcast__keep_versions=5)
    ),
    "importance-cap": Mutation(
        put(algorithm__old_logprobs="sampler", algorithm__importance__cap=2.0)
    ),
    "one-temperature": Mutation(_second_pool),
    "kl-reference": Mutation(put(algorithm__kl={"coef": 0.01, "reference": "none"})),
    "kl-unused": Mutation(put(algorithm__kl={"coef": 0.0, "reference": "initial"})),
    "std-without-filter": Mutation(
        put(algorithm__advantage__normalize="std", algorithm__filters__zero_variance=False)
    ),
    "learning-rate": Mutation(put(optimizer__lr=0.1)),
    "warmup-length": Mutation(put(optimizer__warmup_updates=10**6)),
    "adam-betas": Mutation(put(optimizer__betas=[0.9, 1.0])),
    "task-advantage": Mutation(
        put(algorithm__advantage__normalize="task", length__form="max"),
    ),
    "target-length": Mutation(put(length__form="exact", length__alpha=None)),
    "task-reward": Mutation(_only_length),
    "length-prompt": Mutation(put(data__length_prompt="Think first.")),
    "one-term-a-kind": Mutation(_second_task),
    "targets-reachable": Mutation(
        put(length__targets=[10**5], length__form="clip", algorithm__advantage__normalize="none")
    ),
    "length-swamps-task": Mutation(put(length__alpha=10.0)),
    "source-fields": Mutation(lambda spec: spec["data"]["sources"][0].pop("dataset")),
    "source-columns": Mutation(_source("hf://a/b", promt="question")),
    "source-files": Mutation(_source("gone/*.jsonl")),
    "think-prefill": Mutation(put(data__think_prefill=True), kinds=LAPTOP),
    "solve-rate": Mutation(put(data__source__solve_rate={"field": "x", "min": 0.9, "max": 0.1})),
    "shape-heads": Mutation(
        put(model__shape__num_attention_heads=4, model__shape__num_key_value_heads=3), kinds=LAPTOP
    ),
    "unknown-model": Mutation(put(model__hf="some/model"), kinds=FLEET),
    "model-config": Mutation(_local_model("unknown-family"), kinds=LAPTOP),
    "tokenizer-vocabulary": Mutation(
        _local_model("small", model__tokenizer={"hf": str(MODELS / "more-tokens")}), kinds=LAPTOP
    ),
    "tokenizer-agrees": Mutation(
        _local_model("small", model__tokenizer={"hf": str(MODELS / "other-order")}), kinds=LAPTOP
    ),
    "end-token": Mutation(_local_model("other-end"), kinds=LAPTOP),
    "chat-template": Mutation(_local_model("no-template"), kinds=LAPTOP),
    "one-model": Mutation(put(model__hf="some/model", model__revision="a" * 40), kinds=LAPTOP),
    "warm-start": Mutation(lambda spec: spec.pop("warm_start"), kinds=LAPTOP),
    "lora-targets": Mutation(
        put(learner__lora={"rank": 2, "targets": ["q", "q"]}), also=frozenset({"learning-rate"})
    ),
    "lora-rank": Mutation(
        put(learner__lora={"rank": 512}), kinds=LAPTOP, also=frozenset({"learning-rate"})
    ),
    "topology-form": Mutation(
        put(learner__hardware={"kind": "tpu-v9", "topology": "4*4", "memory": "80GB"}), kinds=FLEET
    ),
    "tpu-topology": Mutation(
        put(pool__hardware={"kind": "tpu-v5e", "topology": "3x3"}, pool__trust="trusted"),
        also=frozenset({"pool-devices", "sampler-weights-fit"}),
    ),
    "topology-count": Mutation(
        put(verify__hardware={"kind": "tpu-v5e", "topology": "2x2", "count": 8}),
    ),
    "mesh-fits": Mutation(put(learner__hardware__count=10**4, learner__hardware__topology=None)),
    "hosts-divide": Mutation(put(learner__hosts=7, storage={"shared": True})),
    "slices-divide": Mutation(put(learner__mesh__slices=7), also=frozenset({"mesh-fits"})),
    "rows-divide": Mutation(
        put(learner__mesh={"data": 3}, learner__hardware={"kind": "cpu"}, learner__packing__rows=4),
        kinds=LAPTOP,
    ),
    "context-divides": Mutation(
        put(learner__mesh={"context": 3}, learner__hardware={"kind": "cpu"}), kinds=LAPTOP
    ),
    "idle-shards": Mutation(
        put(
            learner__mesh={"data": 4096},
            learner__hardware={"kind": "cpu"},
            learner__packing__rows=4096,
        ),
        kinds=LAPTOP,
    ),
    "padded-microbatch": Mutation(
        put(
            learner__packing={"tokens": 128, "rows": 24},
            learner__mesh={"data": 8},
            learner__hardware={"kind": "cpu"},
            data__max_prompt_tokens=64,
        ),
        kinds=LAPTOP,
        also=frozenset({"context-fits"}),
    ),
    "tensor-heads": Mutation(
        put(learner__mesh={"tensor": 3}, learner__hardware={"kind": "cpu"}),
        kinds=LAPTOP,
        also=frozenset({"sharded-widths", "tensor-kv-heads"}),
    ),
    "tensor-kv-heads": Mutation(
        put(
            model__shape__num_attention_heads=4,
            model__shape__num_key_value_heads=1,
            model__shape__hidden_size=64,
            learner__mesh={"tensor": 2},
            learner__hardware={"kind": "cpu"},
        ),
        kinds=LAPTOP,
        also=frozenset({"sharded-widths"}),
    ),
    "sharded-widths": Mutation(
        put(learner__mesh={"fsdp": 3}, learner__hardware={"kind": "cpu"}, learner__packing__rows=6),
        kinds=LAPTOP,
        also=frozenset({"padded-microbatch"}),
    ),
    "attention-kernel": Mutation(
        put(learner__attention="splash", learner__hardware__kind="cpu"), kinds=LAPTOP
    ),
    "unknown-hardware": Mutation(put(pool__hardware__kind="quantum-1", pool__trust="trusted")),
    "train-state-fits": Mutation(put(learner__hardware__memory="100MB"), kinds=FLEET),
    "step-fits": Mutation(
        put(learner__remat="none", learner__packing__rows=4096),
        kinds=FLEET,
        also=frozenset({"padded-microbatch", "idle-shards"}),
    ),
    "logits-chunk": Mutation(
        put(learner__logits_chunk=16384), kinds=FLEET, also=frozenset({"step-fits"})
    ),
    "bf16-master": Mutation(put(learner__master_dtype="bfloat16"), kinds=FLEET),
    "sampler-weights-fit": Mutation(put(pool__hardware__memory="1GB"), kinds=FLEET),
    "kv-cache-fits": Mutation(
        put(pool__max_model_len=10**7), kinds=FLEET, also=frozenset({"model-len"})
    ),
    "context-fits": Mutation(
        put(data__max_prompt_tokens=100, learner__packing__tokens=256), kinds=LAPTOP
    ),
    "model-len": Mutation(put(pool__max_model_len=300), kinds=LAPTOP),
    "model-positions": Mutation(put(model__max_context=10**6), kinds=FLEET),
    "packing-holds": Mutation(put(learner__packing__tokens=32), kinds=LAPTOP),
    "attention-window": Mutation(_local_model("sliding"), kinds=LAPTOP),
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
    "unpinned-revision": Mutation(put(model__revision="main"), kinds=FLEET),
    "no-budget": Mutation(
        both(lambda spec: spec.pop("budget", None), put(pool__hardware__price_per_hour=2.0))
    ),
    "over-budget": Mutation(
        both(
            put(budget__max_cost=0.01, pool__hardware__price_per_hour=2.0),
            all_pools(tokens_per_s=10.0),
        ),
        kinds=FLEET,
    ),
    "reserved-names": Mutation(put(pool__name="validator")),
    "role-clash": Mutation(_relay_called_like_a_worker),
    "unknown-role": Mutation(
        put(placement__roles=["validators", "nobody"]), also=frozenset({"unsigned-weights"})
    ),
    "shared-device": Mutation(put(placement=SHARED), kinds=LAPTOP),
    "too-few-devices": Mutation(put(placement__devices={"learner": [0]}), kinds=FLEET),
    "local-storage": Mutation(put(learner__hosts=4, storage={"shared": False}), kinds=FLEET),
    "server-url": Mutation(
        put(broadcast__relays=[{"name": "one", "url": "ftp://one.example.org"}])
    ),
    "port-clash": Mutation(
        put(
            broadcast__relays=[
                {"name": "one", "url": "https://one.example.org"},
                {"name": "two", "url": "https://one.example.org:443"},
            ]
        )
    ),
}
