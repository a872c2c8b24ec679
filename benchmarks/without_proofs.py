"""Our sampling without proofs: what `benchmarks.sampler_proofs` measures them against."""

from __future__ import annotations

import numpy as np
import torch

from sampler.engine.recorder import Selected, TokenRecorder
from sampler.engine.worker_extension import SamplerExtension
from verify.toploc import CHUNK_ROWS, TOP_K


class WithoutProofs(TokenRecorder):
    """Keeps tokens, log-probs and versions, and gives nothing for hidden states."""

    def _keep_states(self, slots: np.ndarray, positions: np.ndarray, hidden: torch.Tensor) -> None:
        pass

    def _chunks(self, slots: np.ndarray, lengths: np.ndarray) -> list[tuple[Selected, int]]:
        nothing = Selected(
            torch.zeros((1, TOP_K), dtype=torch.int32), torch.zeros((1, TOP_K), dtype=torch.int16)
        )
        return [(nothing, 0)] * int((-(-lengths // CHUNK_ROWS)).sum())


class WithoutProofsExtension(SamplerExtension):
    """A `worker_extension_cls`."""

    recorder_kind = WithoutProofs
