"""A process that starts engines, says so, and waits to be killed.

Called with a version, and ranks of each engine as "tensor,data".
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sampler.engine.processes import restart_with_libraries


def main() -> None:
    from sampler.engine.engine import Engine
    from tests.sampler.engine.conftest import cpu_pool

    version, kinds = Path(sys.argv[1]), sys.argv[2:]
    engines = []
    for kind in kinds:
        tensor, data = (int(ranks) for ranks in kind.split(","))
        engines.append(Engine(cpu_pool(parallel={"tensor": tensor, "data": data})))
        engines[-1].load(version, 0)
    print("started", flush=True)
    time.sleep(600)


if __name__ == "__main__":  # which vLLM's processes import
    restart_with_libraries()
    main()
