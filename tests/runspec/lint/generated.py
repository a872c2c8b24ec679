"""Valid specs drawn from a seed: what a careful engineer might write, over the whole schema."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """A model with hardware that it surely fits, on either side."""

    hf: str
    context: int
    learner: Spec
    sampler: Spec
    tensors: tuple[int, ...]
    """Tensor-parallel sizes that divide the heads."""


TPU_32B = {
    "hardware": {"kind": "tpu-v5p", "topology": "4x4x8"},
    "mesh": {"fsdp": 32, "tensor": 4},
    "packing": {"tokens": 16384, "rows": 32},
}
TPU_8B = {
    "hardware": {"kind": "tpu-v5p", "topology": "2x4x4"},
    "mesh": {"fsdp": 32},
    "packing": {"tokens": 8192, "rows": 32},
}
GPU_4B = {
    "hardware": {"kind": "h100-80g", "count": 16},
    "mesh": {"data": 2, "fsdp": 8},
    "hosts": 2,
    "packing": {"tokens": 4096, "rows": 16},
}
SITES = [
    Site("Qwen/QwQ-32B", 40960, TPU_32B, {"kind": "h100-80g"}, (4, 8)),
    Site("meta-llama/Llama-3.1-8B", 16384, TPU_8B, {"kind": "h100-80g"}, (1, 2, 4)),
    Site("Qwen/Qwen3-4B", 8192, GPU_4B, {"kind": "a100-80g"}, (1, 2)),
]


def valid_spec(seed: int) -> Spec:
    """A spec without a finding; equal seeds give equal specs."""
    rng = random.Random(seed)
    spec = _laptop(rng, seed) if rng.random() < 0.4 else _fleet(rng, seed)
    # No two places share an object, so that a change at one is a change at one.
    return json.loads(json.dumps(spec))


def _laptop(rng: random.Random, seed: int) -> Spec:
    """A shape that the run makes itself, on CPUs of one machine."""
    heads = rng.choice([1, 2, 4])
    fsdp, data = rng.choice([1, 2, 4]), rng.choice([1, 2])
    prompt, new = rng.choice([32, 48, 64]), rng.choice([32, 48])
    spec = _common(rng, seed, new)
    spec |= {
        "model": {
            "max_context": 256,
            "shape": {
                "model_type": rng.choice(["qwen2", "qwen3", "llama", "mistral"]),
                "vocab_size": rng.choice([128, 192, 512]),
                "hidden_size": 16 * heads * rng.choice([1, 2]),
                "intermediate_size": rng.choice([64, 96]),
                "num_hidden_layers": rng.randint(1, 4),
                "num_attention_heads": heads,
                "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
                "tie_word_embeddings": rng.random() < 0.5,
            },
        },
        "warm_start": {"max_updates": rng.randint(10, 900)},
        "data": {"max_prompt_tokens": prompt, "sources": [_generator(rng)]},
        "optimizer": _optimizer(rng, rng.choice([1e-4, 5e-4, 1e-3])),
        "learner": {
            "hardware": {"kind": "cpu", "count": data * fsdp},
            "mesh": {"data": data, "fsdp": fsdp},
            "packing": {"tokens": 128, "rows": data * fsdp * rng.choice([1, 2, 4])},
            "compute_dtype": "float32",
        },
        "samplers": [
            _pool(rng, name, "float32", prompt, new, {"hardware": {"kind": "cpu"}})
            for name in ("alpha", "beta")[: rng.randint(1, 2)]
        ],
    }
    spec["broadcast"]["dtype"] = "float32"
    spec["broadcast"]["relays"] = [{"name": "near"}][: rng.randint(0, 1)]
    return spec


def _fleet(rng: random.Random, seed: int) -> Spec:
    """A named model on accelerators of several sites, sampled by strangers."""
    site = rng.choice(SITES)
    prompt, packed = 512, site.learner["packing"]["tokens"]
    new = rng.choice([packed // 4, packed // 2])
    tensor = rng.choice(site.tensors)
    paid = rng.random() < 0.5
    hardware = site.sampler | {"count": tensor} | ({"price_per_hour": 2.5} if paid else {})
    spec = _common(rng, seed, new)
    spec |= {
        "model": {"hf": site.hf, "revision": _hex(rng, 40), "max_context": site.context},
        "data": {"max_prompt_tokens": prompt, "sources": [_generator(rng)]},
        "optimizer": _optimizer(rng, rng.choice([3e-7, 1e-6])),
        "learner": dict(site.learner) | {"remat": rng.choice(["full", "offload"])},
        "samplers": [
            _pool(
                rng, name, "bfloat16", prompt, new,
                {"hardware": hardware, "parallel": {"tensor": tensor}},
            )
            for name in ("volunteers", "partners")[: rng.randint(1, 2)]
        ],
        "identity": {"root_public_key": _hex(rng, 64)},
        "storage": {"dir": "/mnt/runs", "shared": True},
        "secrets": [{"name": "HF_TOKEN", "from": {"env": "HF_TOKEN"}}][: rng.randint(0, 1)],
    }  # fmt: skip
    if paid:
        spec["budget"] = {"max_hours": rng.choice([24, 240])}
    relays = [
        {"name": name, "url": f"https://{name}.example.org", "upstream": ["origin"]}
        for name in ("eu", "us", "asia")[: rng.randint(1, 3)]
    ]
    if len(relays) > 1:
        relays[-1]["upstream"] = [relays[0]["name"], "origin"]
    spec["broadcast"]["relays"] = relays
    spec["broadcast"]["origin"] = {"url": "https://origin.example.org"}
    spec["verify"]["validators"] = 64
    return spec


def _common(rng: random.Random, seed: int, new: int) -> Spec:
    lag = rng.randint(0, 3)
    updates = rng.choice([2, 4])
    cispo = rng.random() < 0.2
    normalize = rng.choice(["task", "none"])
    clip: Spec = {"eps_low": 0.2, "eps_high": rng.choice([0.2, 0.28])}
    clip["delta"] = None if cispo else rng.choice([3.0, 4.0])
    targets = sorted({new // 8, new // 4, new // 2})
    return {
        "version": "runspec/v1",
        "name": f"run-{seed}",
        "seed": rng.randrange(2**31),
        "steps": rng.randint(20, 400),
        "algorithm": {
            "prompts_per_step": 16 * rng.choice([4, 8]),
            "group_size": rng.choice([8, 16]),
            "updates_per_step": updates,
            "async_level": lag,
            "surrogate": "cispo" if cispo else "clip",
            "clip": clip,
            "kl": {"coef": rng.choice([0.0, 1e-3])},
            "advantage": {"normalize": normalize},
            "loss_normalizer": rng.choice(["sequence", "token", "constant"]),
        },
        "reward": [
            {"name": "task", "kind": "reasoning_gym"},
            {
                "name": "length",
                "kind": "target_length",
                "form": "exact",
                "alpha": float(f"{0.5 / new:.1g}"),
                "targets": targets,
            },
        ],
        "broadcast": {"keep_versions": lag + rng.choice([2, 5])},
        "verify": {"validators": rng.randint(1, 3)},
        "checkpoints": {"every": rng.randint(1, 20), "keep": rng.randint(1, 5)},
    }


def _pool(rng: random.Random, name: str, dtype: str, prompt: int, new: int, where: Spec) -> Spec:
    return where | {
        "name": name,
        "trust": rng.choice(["trusted", "untrusted"]),
        "replicas": rng.choice([1, 2]) if dtype == "float32" else 64,
        "dtype": dtype,
        "max_model_len": prompt + new,
        "max_new_tokens": new,
        "groups_per_submission": rng.choice([1, 4]),
        "sampling": {"temperature": 1.0, "seeded": True},
    }


def _generator(rng: random.Random) -> Spec:
    return {
        "name": "words",
        "kind": "reasoning_gym",
        "dataset": "spell_backward",
        "size": rng.choice([1000, 20000]),
        "params": {"min_word_len": 3},
    }


def _optimizer(rng: random.Random, lr: float) -> Spec:
    return {"lr": lr, "clip_norm": rng.choice([0.1, 1.0]), "warmup_updates": rng.randint(0, 20)}


def _hex(rng: random.Random, digits: int) -> str:
    return f"{rng.getrandbits(4 * digits):0{digits}x}"
