"""vLLM on CPUs with matrices left as they are loaded, as on GPUs: each can be read back there."""

from __future__ import annotations

from vllm import _custom_ops

from sampler.engine.worker_extension import SamplerExtension

# Read when a layer's weights were loaded; each rank imports its extension before that.
_custom_ops._supports_onednn = False


class PlainMatricesExtension(SamplerExtension):
    """A `worker_extension_cls` for processes of their own."""
