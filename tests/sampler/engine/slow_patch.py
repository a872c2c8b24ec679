"""A worker extension whose patches take longer than a test's watch waits for a sign of life."""

from __future__ import annotations

import time

from sampler.engine.worker_extension import SamplerExtension

PATCH_S = 11.0


class SlowPatchExtension(SamplerExtension):
    """A `worker_extension_cls`; its rank runs in the core, which answers nothing meanwhile."""

    def patch_weights(self, base_dir: str, weights_dir: str) -> bool:
        time.sleep(PATCH_S)
        return super().patch_weights(base_dir, weights_dir)
