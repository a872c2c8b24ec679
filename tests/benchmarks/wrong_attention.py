"""The part `attention` with a kernel that is 1 % off."""

from __future__ import annotations

from typing import Any

from benchmarks.accelerator.attention import measure
from benchmarks.accelerator.rows import serve
from learner_jax.attention import xla

_right = xla.attend


def _wrong(*arguments: Any) -> Any:
    return _right(*arguments) * 1.01


if __name__ == "__main__":
    xla.attend = _wrong
    serve(measure)
