"""A client as a sampler uses it: `client RUN ROOT_KEY OUT DEADLINE_S URL ...`, in its own process.

Fetches version 0, says `ready`, waits for the announcement of a newer version, fetches that, and
prints when it heard of it and when it had it (seconds of the monotonic clock, which all processes
of a machine share), and what it used of the processor meanwhile.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from pathlib import Path

from broadcast.client import WeightsClient


def main() -> None:
    run, root, out, deadline_s, *urls = sys.argv[1:]
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(message)s")
    with WeightsClient(urls, run=run, root_public_key=root, cache_dir=Path(out)) as client:
        first = client.latest(None, float(deadline_s))
        assert first is not None
        client.fetch(first.version, manifest_digest=None, deadline_s=float(deadline_s))
        print("ready", flush=True)
        newest = client.latest(first.version, float(deadline_s))
        heard, used = time.monotonic(), _cpu_s()
        if newest is None:
            raise SystemExit(f"nothing newer within {deadline_s} s")
        path = client.fetch(
            newest.version, manifest_digest=newest.manifest_digest, deadline_s=float(deadline_s)
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        done = {"heard": heard, "had": time.monotonic(), "cpu_s": _cpu_s() - used, "bytes": size}
        print(json.dumps(done), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
