"""A worker extension that shows what the read-back says of a parameter in fp8."""

from __future__ import annotations

from typing import Any

import torch

from sampler.engine.requests import LoadReport
from sampler.engine.worker_extension import SamplerExtension


class QuantisedExtension(SamplerExtension):
    """vLLM quantises on GPUs only; here a norm is what its online fp8 leaves of a matrix there."""

    def compare_with_a_norm_in_fp8(self, weights_dir: str) -> LoadReport:
        norm: Any = self.model_runner.get_model().model.norm
        kept = norm.weight
        norm.weight = torch.nn.Parameter(kept.to(torch.float8_e4m3fn), requires_grad=False)
        try:
            return self.compare_weights(weights_dir)
        finally:
            norm.weight = kept
