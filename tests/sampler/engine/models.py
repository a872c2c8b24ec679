"""Tiny random models as published versions, engines and requests for them, and transformers."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from runspec.core.errors import UserError
from runspec.core.schema import SamplerPool
from sampler.engine.engine import Engine
from sampler.engine.requests import Sampled, SampleRequest
from verify.noise import noise_key

VOCABULARY, LAYERS, END_TOKEN = 192, 3, 1
MAX_MODEL_LEN, MAX_NEW_TOKENS = 96, 40
WAIT_S = 1200.0
"""How long a test waits for what an engine is to do."""
ALL_ROWS = slice(None)
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Heads of 32: vLLM's attention on CPUs has no smaller ones. Of the others' none is D / H.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": MAX_MODEL_LEN,
    },
}
"""Fields of config.json of every other family that the learner trains."""


def save_version(
    directory: Path,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    family: dict[str, Any] = QWEN2,
) -> Path:
    """A version: config, weights, probe. Random weights large enough to make peaked outputs."""
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "eos_token_id": END_TOKEN,
        "pad_token_id": 0,
        "bos_token_id": None,
        **family,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # which start as zeros and ones
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    write_probe(directory)
    return directory


def weight_groups(version: Path) -> list[str]:
    """Ends of its tensors' names, one for those of all layers."""
    parts = [name.split(".") for name in load_file(version / "model.safetensors")]
    return sorted({".".join(["", *each[-2:]] if len(each) > 2 else each) for each in parts})


def perturbed_version(
    source: Path,
    directory: Path,
    group: str = "",
    *,
    scale: float = 0.2,
    rows: slice = ALL_ROWS,
    probe: bool = True,
    share: float = 1.0,
    seed: int = 7,
) -> Path:
    """A copy of a version with one group of weights changed in every layer.

    Args:
        source: the version.
        directory: made.
        group: the end of the tensors' names.
        scale: of the relative change.
        rows: those that change.
        probe: whether probe.json is of the changed weights, else it stays that of the source.
        share: of the elements that change, here and there; with 0 the last one alone does.
        seed: of the change.
    """
    directory.mkdir(parents=True)
    for name in ("config.json", "probe.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    changed = [name for name in tensors if name.endswith(group)]
    assert changed
    for name in changed:
        wide = tensors[name].float()
        noise = torch.randn(wide.shape, generator=generator)
        chosen = torch.rand(wide.shape, generator=generator) < share
        chosen.view(-1)[-1] = True  # the last rank's last one too
        wide[rows] += (scale * wide.abs().mean() * noise * chosen)[rows]
        tensors[name] = wide.to(tensors[name].dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if probe:
        write_probe(directory)
    return directory


def write_probe(directory: Path) -> None:
    reference = Reference(directory)
    generator = np.random.default_rng(3)
    sequences = [generator.integers(2, VOCABULARY, 24).tolist() for _ in range(3)]
    found = [
        {"tokens": s, "logprobs": reference.logprobs(s[:1], s[1:])[0].tolist()} for s in sequences
    ]
    (directory / "probe.json").write_text(json.dumps({"sequences": found}))


class Reference:
    """transformers in float32 over a version's bits."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def forward(self, prompt: list[int], output: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """What produced the output: states f32 [n, D] after the last norm, logits f32 [n, V]."""
        tokens = torch.tensor([[*prompt, *output]])
        hidden = self.model.model(tokens).last_hidden_state
        rows = slice(len(prompt) - 1, len(prompt) + len(output) - 1)
        return hidden[0, rows].numpy(), self.model.lm_head(hidden)[0, rows].numpy()

    def logprobs(
        self, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """f32 [n] of log_softmax(logits) at the output, and the hidden states f32 [n, D]."""
        hidden, logits = self.forward(list(prompt), list(output))
        every = torch.from_numpy(logits).double().log_softmax(-1)
        chosen = every[torch.arange(len(output)), torch.tensor(list(output))]
        return chosen.float().numpy(), hidden


def cpu_pool(dtype: str = "float32", tensor: int = 1, **fields: object) -> SamplerPool:
    return SamplerPool.model_validate(
        {
            "name": "cpu",
            "hardware": {"kind": "cpu"},
            "parallel": {"tensor": tensor},
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_new_tokens": MAX_NEW_TOKENS,
            **fields,
        }
    )


@contextmanager
def running_engine(
    version: Path, pool: SamplerPool | None = None, *, probe: bool = True, **options: object
) -> Iterator[Engine]:
    """An engine that holds a version as number 0, with options of vLLM's."""
    with closing(Engine(pool or cpu_pool(), options=options, probe=probe)) as engine:
        engine.load(version, 0)
        yield engine


def hold_engines() -> None:
    """A process that starts engines on a version, says so, and waits to be killed.

    Its arguments are the version, and ranks of each engine as "tensor,data".
    """
    engines = []
    for kind in sys.argv[2:]:
        tensor, data = map(int, kind.split(","))
        engines.append(Engine(cpu_pool(parallel={"tensor": tensor, "data": data})))
        engines[-1].load(Path(sys.argv[1]), 0)
    print("started", flush=True)
    threading.Event().wait()


def batch(
    groups: int = 4, size: int = 4, *, temperature: float = 1.0, seeded: bool = True, seed: int = 5
) -> list[SampleRequest]:
    """`groups` prompts of different lengths, `size` samples of each, each with its own noise."""
    generator = np.random.default_rng(seed)
    requests = []
    for group in range(groups):
        prompt = generator.integers(2, VOCABULARY, 34 + 5 * (group % 4)).tolist()
        for sample in range(size):
            key = noise_key(seed.to_bytes(1) * 32, group, sample) if seeded else None
            requests.append(SampleRequest(prompt, MAX_NEW_TOKENS, END_TOKEN, temperature, key))
    return requests


def call_workers(engine: Engine, method: str, **arguments: str) -> list[Any]:
    """One answer of each of vLLM's workers."""
    return engine._loop.run(engine._client.core.rpc(method, **arguments))


def sample(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sampled]:
    return engine.submit(requests).result(WAIT_S)


def tokens_of(engine: Engine, requests: Sequence[SampleRequest]) -> list[list[int]]:
    return [result.output_tokens.tolist() for result in sample(engine, requests)]


def differences(
    version: Path, requests: Sequence[SampleRequest], sampled: Sequence[Sampled]
) -> np.ndarray:
    """|engine's log-prob - transformers'| of each output token under a version."""
    reference = Reference(version)
    return np.concatenate(
        [
            np.abs(
                result.logprobs
                - reference.logprobs(request.prompt_tokens, result.output_tokens.tolist())[0]
            )
            for request, result in zip(requests, sampled, strict=True)
        ]
    )


def assert_samples(
    engine: Engine, version: Path, requests: Sequence[SampleRequest] | None = None
) -> list[Sampled]:
    """What an engine samples is of a version, as transformers says; returns it."""
    requests = batch(2, 2) if requests is None else requests
    sampled = sample(engine, requests)
    assert differences(version, requests, sampled).mean() < 1e-5
    return sampled


def assert_follows(engine: Engine, version: Path, *, limit: float = 1e-5) -> None:
    """A load makes an engine sample from a version, and from no part of the one before.

    The prompts are the same each time: keys and values cached under old weights would show.

    Args:
        engine: holds another version.
        version: loaded as number 1.
        limit: of the mean |engine's log-prob - transformers'|.
    """
    requests = batch(2, 2)
    old = sample(engine, requests)

    engine.load(version, 1)

    assert differences(version, requests, sample(engine, requests)).mean() < limit
    # Else the test would prove nothing:
    assert differences(version, requests, old).mean() > 10 * limit


def assert_takes_over(engine: Engine, base: Path, folder: Path) -> None:
    """A patched engine samples from the new version; one that was not patched does not pass for it,
    and a version of other tensors is neither patched, not even in part, nor taken for loaded."""
    engine.load(base, 0)
    newer = perturbed_version(base, folder / "v1", share=0.02, scale=3.0)
    with pytest.raises(UserError, match="version 1"):
        engine.check(newer, 1)

    # `load` compares bytes and probe; once, again and back
    further = perturbed_version(newer, folder / "v2", share=0.5, scale=1.0)
    for number, version in ((1, newer), (2, further), (0, base)):
        assert engine.load(version, number).patched
        assert_samples(engine, version)

    tensors = load_file(newer / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, newer / "model.safetensors", metadata={"format": "pt"})
    folders = {"base_dir": str(base), "weights_dir": str(newer)}
    assert not all(call_workers(engine, "patch_weights", **folders))
    assert_samples(engine, base)
    with pytest.raises(UserError, match=r"or none, in .* tensors: .*"):
        engine.check(newer, 1)
