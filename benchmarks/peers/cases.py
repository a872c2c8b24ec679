"""The batches on which learners are compared: a model's shape, and tokens of given lengths."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

GROUP_SIZE = 4
LR, BETAS, CLIP_NORM, EPSILON = 1e-4, (0.9, 0.95), 1.0, 0.2
SHAPES: dict[str, dict[str, Any]] = {
    "9M": {
        "vocab_size": 12288,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "125M": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""Qwen2 with a tied head; 9,048,832 and 126,011,136 parameters."""


@dataclass(frozen=True)
class Case:
    """A batch of one optimizer update."""

    name: str
    shape: str
    sequences: int
    tokens: int
    """Of the longest sequence; a prompt is an eighth of that."""
    ragged: bool
    packing: tuple[int, int]
    """tokens and rows of ours, as the spec would say."""
    remat: str

    @property
    def prompt(self) -> int:
        return self.tokens // 8

    def model(self) -> dict[str, Any]:
        extra = {"tie_word_embeddings": True, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
        return {**SHAPES[self.shape], **extra, "max_position_embeddings": self.tokens}

    def lengths(self) -> np.ndarray:
        """Prompt and output together: full, or log-normal with mean half the longest."""
        if not self.ragged:
            return np.full(self.sequences, self.tokens)
        rng = np.random.default_rng(5)
        draws = rng.lognormal(0.0, 0.5, self.sequences)
        scale, shortest = 1.0, self.prompt + 4
        for _ in range(50):  # what is cut off at the longest comes back by a larger scale
            lengths = np.clip(draws * scale * self.tokens, shortest, self.tokens)
            scale *= self.tokens / 2 / lengths.mean()
        return lengths.round().astype(int)

    def matmul_flops(self) -> float:
        """FLOPs that one update cannot do without: 8 a parameter of a matrix and real token (2 the
        old log-probs, 6 forward and backward), the head at output tokens only, causal attention.
        """
        s, lengths = SHAPES[self.shape], self.lengths().astype(float)
        d, f, h = s["hidden_size"], s["intermediate_size"], 64
        heads = s["num_attention_heads"] + s["num_key_value_heads"]
        layers = s["num_hidden_layers"] * (2 * d * h * heads + 3 * d * f)
        outputs = lengths.sum() - self.sequences * self.prompt
        attended = s["num_hidden_layers"] * d * (lengths * (lengths + 1)).sum()
        return 8 * (layers * lengths.sum() + s["vocab_size"] * d * outputs) + 8 * attended


CASES = [
    Case("small", "9M", 64, 256, False, (256, 8), "dots"),
    Case("small ragged", "9M", 64, 256, True, (256, 6), "dots"),
    Case("large", "125M", 16, 512, False, (512, 4), "dots"),
    Case("large ragged", "125M", 16, 512, True, (512, 4), "dots"),
]


def write_case(case: Case, folder: Path) -> None:
    """`case.json` with all settings, `batch.npz` with the batch padded as the peers want it."""
    rng = np.random.default_rng(11)
    outputs = case.lengths() - case.prompt
    longest, vocab = int(outputs.max()), SHAPES[case.shape]["vocab_size"]
    mask = np.arange(longest) < outputs[:, None]
    np.savez(
        folder / "batch.npz",
        prompt=rng.integers(2, vocab, (case.sequences, case.prompt)).astype(np.int32),
        # 0 is padding, to Tunix wherever it stands, and 1 the end.
        completion=np.where(mask, rng.integers(2, vocab, mask.shape), 0).astype(np.int32),
        mask=mask.astype(np.int32),
        advantages=rng.normal(size=case.sequences).astype(np.float32),
    )
    settings = {
        "lr": LR,
        "betas": BETAS,
        "clip_norm": CLIP_NORM,
        "epsilon": EPSILON,
        "group_size": GROUP_SIZE,
        "model": case.model(),
        "case": asdict(case),
    }
    (folder / "case.json").write_text(json.dumps(settings))
