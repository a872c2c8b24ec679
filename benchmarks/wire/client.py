"""A client as a sampler uses it: `client RUN ROOT_KEY OUT DEADLINE_S URL ...`, in its own process.

Fetches the newest version, says `ready`, waits for the announcement of a newer one, fetches that,
and prints when it heard of it, when it had all that had to come (deltas are applied from then on)
and when it had the version (seconds of the monotonic clock, which all processes of a machine
share), and what it used of the processor meanwhile.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from broadcast.assemble import delta_applier
from broadcast.client import WeightsClient


class _Applying(logging.Handler):
    """When the client began to apply deltas for the last time."""

    since: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if ": applying " in record.getMessage():
            self.since = time.monotonic()


def main() -> None:
    run, root, out, deadline_s, *urls = sys.argv[1:]
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(message)s")
    applying = _Applying()
    logging.getLogger("broadcast").addHandler(applying)
    with WeightsClient(urls, run=run, root_public_key=root, cache_dir=Path(out)) as client:
        first = client.latest(None, float(deadline_s))
        assert first is not None
        client.fetch(first.version, manifest_digest=None, deadline_s=float(deadline_s))
        delta_applier()  # imported once in a client's life, which is not what is measured
        print("ready", flush=True)
        newest = client.latest(first.version, float(deadline_s))
        heard, used = time.monotonic(), time.process_time()
        if newest is None:
            raise SystemExit(f"nothing newer within {deadline_s} s")
        path = client.fetch(
            newest.version, manifest_digest=newest.manifest_digest, deadline_s=float(deadline_s)
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        had = time.monotonic()
        done = {"heard": heard, "had": had, "cpu_s": time.process_time() - used, "bytes": size}
        done["arrived"] = had if applying.since is None else applying.since
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
