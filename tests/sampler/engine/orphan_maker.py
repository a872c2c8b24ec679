"""A process that starts an engine, names the processes of it, and waits to be killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sampler.engine.engine import Engine
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.processes import descendants


def main() -> None:
    weights_dir, tensor, data = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    engine = Engine(cpu_pool(parallel={"tensor": tensor, "data": data}))
    engine.load(weights_dir, 0)
    print(*descendants(), flush=True)
    time.sleep(600)


if __name__ == "__main__":  # which vLLM's processes import
    main()
