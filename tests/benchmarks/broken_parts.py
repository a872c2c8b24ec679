"""Parts of `make accelerator` that go wrong: `--variant wrong` and `--variant hangs`."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.accelerator.rows import Row, Settings, serve


def hangs(settings: Settings) -> Iterator[Row]:
    yield Row("before it hangs", "1")
    while True:
        time.sleep(60.0)


def wrong(settings: Settings) -> Iterator[Row]:
    """Attention with a kernel that is 1 % off."""
    from benchmarks.accelerator.attention import measure
    from learner_jax.attention import xla

    right = xla.attend

    def attend(*arguments: Any) -> Any:
        return right(*arguments) * 1.01

    xla.attend = attend
    yield from measure(settings)


if __name__ == "__main__":
    serve(hangs if "--variant=hangs" in sys.argv else wrong)
