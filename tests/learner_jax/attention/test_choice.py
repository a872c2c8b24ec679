"""Which kernel runs where, for devices as they describe themselves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.attention import _kernel, cudnn, packed_attention, splash, xla
from learner_jax.execution import Execution
from runspec.core.errors import UserError
from runspec.core.spec import schema

CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU: Any = SimpleNamespace(platform="tpu", device_kind="TPU v5p")
AMD: Any = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X")
H200: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
A100: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
BF16, F32, F64 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float32, jnp.float64))


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "shards", "expected"),
    [
        (CPU, BF16, 128, 1, xla.attend),
        (TPU, BF16, 128, 2, splash.attend),
        (TPU, F32, 64, 1, splash.attend),
        (TPU, F64, 64, 1, xla.attend),
        (AMD, BF16, 128, 1, xla.attend),
        (H200, BF16, 128, 1, cudnn.packed),
        (A100, BF16, 128, 1, cudnn.bucketed),
        (H200, F32, 128, 1, xla.attend),
        (H200, BF16, 100, 1, xla.attend),
        (H200, BF16, 128, 2, xla.attend),  # context parallelism
    ],
)
def test_auto_takes_the_fastest_kernel_that_can(
    device: Any, dtype: np.dtype, head_size: int, shards: int, expected: Any
) -> None:
    found = _kernel("auto", device, dtype, head_size, shards)
    assert (found.keywords["rows"] if isinstance(found, partial) else found) is expected


def test_a_jax_whose_private_function_nobody_read_takes_the_public_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    assert cudnn.rows_for(H200) is cudnn.bucketed


@pytest.mark.parametrize(
    ("name", "device", "dtype", "shards", "message"),
    [
        ("splash", CPU, BF16, 1, "splash attention runs on TPUs, and here are cpu devices"),
        ("splash", TPU, F64, 1, "not in float64"),
        ("cudnn", AMD, BF16, 1, "runs on NVIDIA GPUs, and here are AMD"),
        ("cudnn", H200, F32, 1, "in bfloat16 or float16, not in float32"),
        ("cudnn", H200, BF16, 4, "learner.mesh.context cuts them in 4"),
    ],
)
def test_a_named_kernel_that_cannot_run_is_refused(
    name: schema.Attention, device: Any, dtype: np.dtype, shards: int, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        _kernel(name, device, dtype, 128, shards)
    assert refusal.value.place == "learner.attention"
    assert refusal.value.remedy


def test_the_device_is_that_of_the_mesh_or_of_this_process() -> None:
    q = jnp.ones((1, 8, 2, 8))
    ids = jnp.ones((1, 8), jnp.int32)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    for execution in (
        Execution(jnp.float32, attention="splash"),
        Execution(jnp.float32, attention="splash", mesh=mesh),
    ):
        with pytest.raises(UserError, match="here are cpu devices"):
            packed_attention(q, q, q, ids, execution)
