"""JAX under test: eight virtual CPU devices. The flags count only before the first JAX import."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tests compile much and compute little: LLVM's optimiser would be half of their time.
        "--xla_backend_optimization_level=0",
    ]
)
