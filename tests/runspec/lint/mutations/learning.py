"""What breaks a rule of what is learned: algorithm, optimizer, rewards, data, model."""

from __future__ import annotations

from collections.abc import Callable

from tests.runspec.lint.generated import Spec
from tests.runspec.lint.mutations.changes import FLEET, LAPTOP, MODELS, Mutation, local_model, put


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
    "decay-length": Mutation(put(optimizer__schedule="cosine", optimizer__decay_updates=10**6)),
    "final-lr": Mutation(
        put(optimizer__schedule="wsd", optimizer__decay_updates=1, optimizer__final_lr=1.0)
    ),
    "optimizer-fields": Mutation(put(optimizer__momentum=0.5)),
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
    "model-config": Mutation(local_model("unknown-family"), kinds=LAPTOP),
    "tokenizer-vocabulary": Mutation(
        local_model("small", model__tokenizer={"hf": str(MODELS / "more-tokens")}), kinds=LAPTOP
    ),
    "tokenizer-agrees": Mutation(
        local_model("small", model__tokenizer={"hf": str(MODELS / "other-order")}), kinds=LAPTOP
    ),
    "end-token": Mutation(local_model("other-end"), kinds=LAPTOP),
    "chat-template": Mutation(local_model("no-template"), kinds=LAPTOP),
    "one-model": Mutation(put(model__hf="some/model", model__revision="a" * 40), kinds=LAPTOP),
    "warm-start": Mutation(lambda spec: spec.pop("warm_start"), kinds=LAPTOP),
    "lora-targets": Mutation(
        put(learner__lora={"rank": 2, "targets": ["q", "q"]}), also=frozenset({"learning-rate"})
    ),
    "lora-rank": Mutation(
        put(learner__lora={"rank": 512}), kinds=LAPTOP, also=frozenset({"learning-rate"})
    ),
    "unpinned-revision": Mutation(put(model__revision="main"), kinds=FLEET),
}
