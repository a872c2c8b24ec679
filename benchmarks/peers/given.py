"""The arrays and settings on which TRL, Tunix and `learner_jax` are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VECTORS = Path(__file__).parents[2] / "tests/learner_jax/parity/vectors.json"
MAX_NEW_TOKENS = 9
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
K3 = {"beta": 0.3, "use_bias_correction_kl": False}
"""Leaves out the factor r_t on the KL term: TRL has it by default, our formula has none."""
TRL_LOSSES: dict[str, dict[str, Any]] = {
    "sequence": {"loss_type": "grpo", **CLIP},
    "sequence, delta": {"loss_type": "grpo", "delta": 4.0, **CLIP},
    "sequence, k3": {"loss_type": "grpo", **K3, **CLIP},
    "sequence, k3 times r": {
        "loss_type": "grpo",
        "beta": 0.3,
        "use_bias_correction_kl": True,
        **CLIP,
    },
    "token": {"loss_type": "bnpo", **CLIP},
    "token, entropy": {"loss_type": "bnpo", "entropy_coef": 0.2, **CLIP},
    "token, as DAPO": {"loss_type": "dapo", "delta": 4.0, **K3, **CLIP},
    "constant": {"loss_type": "dr_grpo", **K3, **CLIP},
    "token, CISPO": {"loss_type": "cispo", "epsilon_high": 2.5, **K3},
    "sequence, GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIP},
    "token, GSPO": {
        "loss_type": "dapo",
        "importance_sampling_level": "sequence",
        "delta": 1.5,
        **K3,
        **CLIP,
    },
}
TUNIX = {**CLIP, "beta": 0.0, "kl_loss_mode": "low_var_kl"}
TUNIX_LOSSES: dict[str, dict[str, Any]] = {
    "sequence": {**TUNIX, "loss_agg_mode": "sequence-mean-token-mean"},
    "sequence, delta": {**TUNIX, "loss_agg_mode": "sequence-mean-token-mean", "epsilon_c": 4.0},
    "sequence, k3": {**TUNIX, "loss_agg_mode": "sequence-mean-token-mean", "beta": 0.3},
    "token": {**TUNIX, "loss_agg_mode": "token-mean"},
    "token, as DAPO": {**TUNIX, "loss_agg_mode": "token-mean", "epsilon_c": 4.0, "beta": 0.3},
    "constant": {**TUNIX, "loss_agg_mode": "sequence-mean-token-scale", "beta": 0.3},
    "sequence, GSPO": {
        **TUNIX,
        "loss_agg_mode": "sequence-mean-token-mean",
        "loss_algo": "gspo-token",
    },
}


def make_given() -> dict[str, Any]:
    """Sequences of different lengths whose ratios reach every bound, rewards, a head."""
    rng = np.random.default_rng(7)
    sequences, longest, width, vocab = 6, MAX_NEW_TOKENS, 8, 19
    lengths = [*rng.integers(2, longest, sequences - 1).tolist(), longest]
    logprobs = -rng.exponential(2.0, (sequences, longest))
    arrays = {
        "logprobs": logprobs,
        "entropy": rng.uniform(0.1, 2.5, logprobs.shape),
        "old": logprobs + rng.normal(size=logprobs.shape),
        "ref": logprobs + rng.normal(size=logprobs.shape),
        "advantages": rng.normal(size=sequences),
        "mask": (np.arange(longest) < np.array(lengths)[:, None]).astype(int),
        "rewards": rng.integers(0, 3, (3, 4)) + rng.normal(size=(3, 4)).round(2),
        "hidden": rng.normal(size=(2, 5, width)),
        "head": rng.normal(size=(width, vocab)),
        "targets": rng.integers(0, vocab, (2, 5)),
        "a": rng.normal(size=(2, 5)),
        "b": rng.normal(size=(2, 5)),
    }
    exact = {name: np.round(values, 6).tolist() for name, values in arrays.items()}
    return {
        **exact,
        "max_new_tokens": MAX_NEW_TOKENS,
        "temperatures": [1.0, 0.6],
        "trl_losses": TRL_LOSSES,
        "tunix_losses": TUNIX_LOSSES,
    }


def write_vectors(found: dict[str, Any]) -> None:
    """Keeps what the peers computed, for machines that have no peers."""
    VECTORS.write_text(json.dumps(found, separators=(",", ":")) + "\n")
