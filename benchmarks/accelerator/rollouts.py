"""Rollouts that `sampling` leaves for the parts that prefill; JAX's process too reads them, so no
torch is imported here."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

FILE = "rollouts.pickle"
GROUP_SIZE = 8
"""Rollouts of one prompt."""


@dataclass(frozen=True)
class Rollouts:
    """R rollouts that the device sampled, of n tokens after prompts of P."""

    prompts: np.ndarray
    """i32 [R, P]."""
    keys: list[tuple[int, int]]
    tokens: list[np.ndarray]
    """i32 [n] each."""
    logprobs: list[np.ndarray]
    """f32 [n] each."""
    proofs: list[list[bytes]]

    def save(self, folder: Path) -> None:
        (folder / FILE).write_bytes(pickle.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Rollouts:
        return cls(**pickle.loads((folder / FILE).read_bytes()))
