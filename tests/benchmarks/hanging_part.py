"""A part that prints one row and then hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.accelerator.rows import Row, Settings, serve


def measure(settings: Settings) -> Iterator[Row]:
    yield Row("before it hangs", "1")
    time.sleep(600.0)


if __name__ == "__main__":
    serve(measure)
