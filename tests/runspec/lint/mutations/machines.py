"""What breaks a rule of machines: meshes, sharding, memory, placement, what they cost."""

from __future__ import annotations

from tests.runspec.lint.generated import Spec
from tests.runspec.lint.mutations.changes import FLEET, LAPTOP, Mutation, all_pools, both, put

SHARED = {"devices": {"learner": [0], "validator-0": [0]}}


def _relay_called_like_a_worker(spec: Spec) -> None:
    spec["samplers"][0]["name"] = "relay-x"
    spec["broadcast"]["relays"] = [{"name": "x-0"}]


RULES = {
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
