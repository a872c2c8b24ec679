"""A version's way down a tree whose every edge carries 200 Mb/s; prints JSON.

    python -m benchmarks.broadcast_tree --mebibytes 512

1 origin, 3 relays, 8 clients (3, 3 and 2 to a relay), all of them processes; every edge is a link
of its own with the stated rate in each direction (`tests/throttle.py`).

The limit: no client can have the version before size / rate, 21.5 s for 512 MiB. A relay passes on
whole chunks that it has checked, so the last byte reaches a client when its last chunk has crossed
two edges: at least size / rate + chunk / rate, 22.1 s with chunks of 16 MiB, 1.03 of the limit.
With k chunks in flight on an edge they share its rate, the first is whole after k chunk / rate,
and a client stands idle until then: k of 8 costs a quarter of the limit, 2 a sixteenth: 1.06.
Asked for: 1.25 of size / rate for the last client.

`ratio` is the last client's time, from the end of `publish` to the checked version under its name,
over size / rate. `plain` is a quarter of the size over one such link, sent with sendfile, and what
it carries over what it should: how true the links are. (One that was idle first passes the bytes
of 0.1 s at once, half a per cent of 21.5 s.) `cores` is what the tree and its links used of the
processors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.wire.processes import Started, Tree, cpu_seconds
from benchmarks.wire.weights import write_weights

DEALT = (3, 3, 2)
"""Clients of each relay."""
DEADLINE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--megabits", type=float, default=200.0, help="a second, of each edge")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    size, rate = options.mebibytes * 2**20, options.megabits * 1e6
    limit_s = size * 8 / rate
    plain = measure_link(options.folder, size // 4, rate)
    say(f"a link carries {plain:.3f} of its rate; {limit_s:.1f} s are the limit of a run")
    runs = [measure_tree(options.folder, size, rate) for _ in range(options.repeats)]
    found = {
        "benchmark": "broadcast_tree",
        "bytes": size,
        "bits_per_s": rate,
        "limit_s": round(limit_s, 2),
        "plain": round(plain, 3),
        "ratio": round(statistics.median(run["last_s"] for run in runs) / limit_s, 3),
        "runs": runs,
    }
    print(json.dumps(found))


def measure_link(parent: Path, size: int, rate: float) -> float:
    """The share of its rate that one link gives to one plain connection."""
    with Tree(parent) as tree:
        path = write_weights(tree.folder / "plain", size) / "model.safetensors"
        server = tree.start("-m", "benchmarks.wire.sendfile", "serve", path)
        (url,), _ = tree.links(rate, f"http://127.0.0.1:{server.line()}")
        port = url.rpartition(":")[2]
        receiver = tree.start("-m", "benchmarks.wire.sendfile", "receive", port, tree.folder / "r")
        receiver.line()
        receiver.go()
        done = receiver.result(DEADLINE_S)
        return done["bytes"] * 8 / rate / (done["had"] - done["heard"])


def measure_tree(parent: Path, size: int, rate: float) -> dict[str, Any]:
    """One version through one tree, everybody waiting for it."""
    with Tree(parent) as tree:
        directory = write_weights(tree.folder / "v1", size)
        origin_url, origin = tree.origin()
        upper, carrier = tree.links(rate, *[origin_url] * len(DEALT))
        relays = [tree.relay(url) for url in upper]
        behind = [url for (url, _), count in zip(relays, DEALT, strict=True) for _ in range(count)]
        lower, other = tree.links(rate, *behind)
        # Started one after the other: on few cores their imports would take from each other.
        clients = [tree.client(url, deadline_s=DEADLINE_S) for url in lower]
        servers = [origin, carrier, other, *(relay for _, relay in relays)]
        used, carried = sum(map(_cpu, servers)), _cpu(carrier) + _cpu(other)
        say(f"{len(clients)} clients wait")
        published = tree.publish(1, directory)
        done = []
        for number, client in enumerate(clients, start=1):
            done.append(client.result(DEADLINE_S))
            say(f"client {number}: {done[-1]['had'] - published:.2f} s")
        took = max(client["had"] for client in done) - published
        cores = (sum(map(_cpu, servers)) - used + sum(c["cpu_s"] for c in done)) / took
        return {
            "last_s": round(took, 2),
            "first_s": round(min(client["had"] for client in done) - published, 2),
            "cores": round(cores, 2),
            "links_cores": round((_cpu(carrier) + _cpu(other) - carried) / took, 2),
        }


def _cpu(started: Started) -> float:
    return cpu_seconds(started.process.pid)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
