"""Tiny random Qwen2 models as published versions, and what transformers says of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCABULARY, HIDDEN, LAYERS, END_TOKEN = 192, 64, 3, 1
MAX_MODEL_LEN, MAX_NEW_TOKENS = 96, 40
ALL_ROWS = slice(None)
WEIGHT_GROUPS = [
    "embed_tokens.weight",
    "input_layernorm.weight",
    "q_proj.weight",
    "q_proj.bias",
    "k_proj.weight",
    "k_proj.bias",
    "v_proj.weight",
    "v_proj.bias",
    "o_proj.weight",
    "post_attention_layernorm.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
    "model.norm.weight",
]


def save_version(
    directory: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """A version: config, weights, probe. Random weights large enough to make peaked outputs."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=tied,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # which start as zeros and ones
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    write_probe(directory)
    return directory


def perturbed_version(
    source: Path,
    directory: Path,
    group: str,
    *,
    scale: float = 0.2,
    rows: slice = ALL_ROWS,
    probe: bool = True,
) -> Path:
    """A copy of a version with one group of weights changed in every layer.

    Args:
        source: the version.
        directory: made.
        group: the end of the tensors' names.
        scale: of the relative change.
        rows: those that change.
        probe: whether probe.json is of the changed weights, else it stays that of the source.
    """
    directory.mkdir()
    for name in ("config.json", "probe.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = [name for name in tensors if name.endswith(group)]
    assert changed
    for name in changed:
        wide = tensors[name].float()
        noise = torch.randn(wide.shape, generator=generator)[rows]
        wide[rows] += scale * wide.abs().mean() * noise
        tensors[name] = wide.to(tensors[name].dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if probe:
        write_probe(directory)
    return directory


def write_probe(directory: Path) -> None:
    reference = Reference(directory)
    generator = np.random.default_rng(3)
    sequences = [generator.integers(2, VOCABULARY, 24).tolist() for _ in range(3)]
    (directory / "probe.json").write_text(
        json.dumps(
            {
                "sequences": [
                    {"tokens": s, "logprobs": reference.logprobs(s[:1], s[1:])[0].tolist()}
                    for s in sequences
                ]
            }
        )
    )


class Reference:
    """transformers in float32 over a version's bits."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def forward(self, prompt: list[int], output: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """What produced the output: states f32 [n, D] after the last norm, logits f32 [n, V]."""
        tokens = torch.tensor([[*prompt, *output]])
        hidden = self._model.model(tokens).last_hidden_state
        rows = slice(len(prompt) - 1, len(prompt) + len(output) - 1)
        return hidden[0, rows].numpy(), self._model.lm_head(hidden)[0, rows].numpy()

    def logprobs(
        self, prompt: list[int], output: list[int], temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """f32 [n] of log_softmax(logits / T) at the output, and the hidden states f32 [n, D]."""
        hidden, logits = self.forward(prompt, output)
        scaled = torch.from_numpy(logits).double() / temperature
        chosen = scaled.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]
        return chosen.float().numpy(), hidden

    def outputs(self, texts: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
        """f32 [n] of the n output tokens of each (prompt, output), at temperature 1."""
        return [self.logprobs(prompt, output)[0] for prompt, output in texts]
