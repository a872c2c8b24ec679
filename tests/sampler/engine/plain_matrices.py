"""vLLM on CPUs with matrices left as they are loaded, as on GPUs: each can be read back there."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops

from sampler.engine.requests import LoadReport
from sampler.engine.worker_extension import SamplerExtension

# Read when a layer's weights were loaded; each rank imports its extension before that.
_custom_ops._supports_onednn = False


class PlainMatricesExtension(SamplerExtension):
    """A `worker_extension_cls` for processes of their own."""

    def compare_with_a_norm_in_fp8(self, weights_dir: str) -> LoadReport:
        """vLLM quantises on GPUs only; here a norm is what its online fp8 leaves of a matrix."""
        norm: Any = self.model_runner.get_model().model.norm
        kept = norm.weight
        norm.weight = torch.nn.Parameter(kept.to(torch.float8_e4m3fn), requires_grad=False)
        try:
            return self.compare_weights(weights_dir)
        finally:
            norm.weight = kept
