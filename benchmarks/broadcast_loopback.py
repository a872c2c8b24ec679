"""1 GiB over loopback and tmpfs, every role a process of its own; prints JSON.

    python -m benchmarks.broadcast_loopback --repeats 3

Topologies: origin to one client; one relay to two clients; two relays to two clients. A time is
from the end of `publish` until the last client has the checked version under its final name.
Beside them, in the same run and folder: a plain server (os.sendfile, a thread a connection) to
one and to two receivers (recv_into, write), a copy of the file, BLAKE3 of it, and, where
`make shardcast` was run, the published package's own origin, middle node and client (reported
only; its middle node looks for news every second here, every 30 by default).

The limit. On c cores that do nothing else a GB costs S seconds of a core to send (sendfile), R to
receive and write, H to hash. Whoever receives checks, and the origin proves once what it serves:

    origin to one client       1 send   1 received and checked    (    S + R + H + H) / c
    one relay to two clients   3 sends  3 received and checked    (3 (S + R + H) + H) / c
    two relays to two clients  4 sends  4 received and checked    (4 (S + R + H) + H) / c

seconds a GB, or the slowest single thread if that is more. S + R and H are measured in the same
run (`cpu_s_per_gb` of sendfile_one and blake3), and `limits` are these formulas with them, in
GB/s. S + R of 0.5 and H of 0.23 give 2.1, 0.83 and 0.64 GB/s on two cores, twice that on four.
Asked for: 1, 0.5 and 0.7 GB/s, and half of what the plain server does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from benchmarks.runs import ROOT
from benchmarks.wire.processes import NoAnswer, Processes, Started, Tree, cpu_seconds
from benchmarks.wire.weights import write_weights

SHARDCAST = ROOT / ".venv" / "shardcast"
NODE = ROOT / "benchmarks" / "wire" / "shardcast_node.py"
TOPOLOGIES = {"one_client": (0, 1), "one_relay_two_clients": (1, 2), "two_relays_two": (2, 2)}
"""Relays and clients."""
TRANSFERS = {"one_client": 1, "one_relay_two_clients": 3, "two_relays_two": 4}
DEADLINE_S = 120.0

Row = dict[str, float]
"""gb_per_s of the last receiver; cpu_s_per_gb, the seconds of cores that all processes used for a
GB; servers_cpu_s_per_gb, those of them that origin and relays used."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    size = options.mebibytes * 2**20
    with Processes(options.folder) as files:
        weights = write_weights(files.folder / "weights", size)
        cases = measurements(options.folder, weights)
        rows: dict[str, list[Row]] = {name: [] for name in cases}
        for number in range(options.repeats):
            for name, measure in cases.items():
                try:
                    rows[name].append(measure())
                except NoAnswer as error:
                    if not name.startswith("shardcast"):
                        raise
                    say(f"{name} failed: {error}")
                else:
                    say(f"{number + 1}: {name} {rows[name][-1]}")
    print(json.dumps(report(size, rows)))


def measurements(parent: Path, weights: Path) -> dict[str, Callable[[], Row]]:
    """What is measured in each round, by name."""
    file = weights / "model.safetensors"
    cases: dict[str, Callable[[], Row]] = {
        "copy": lambda: measure_copy(parent, file),
        "blake3": lambda: measure_blake3(file),
        "sendfile_one": lambda: measure_sendfile(parent, file, 1),
        "sendfile_two": lambda: measure_sendfile(parent, file, 2),
    }
    for name, (relays, clients) in TOPOLOGIES.items():
        cases[name] = lambda r=relays, c=clients: measure_tree(parent, weights, r, c)
        if SHARDCAST.is_dir():
            cases[f"shardcast_{name}"] = lambda r=relays, c=clients: measure_shardcast(
                parent, file, r, c
            )
    return cases


def report(size: int, rows: dict[str, list[Row]]) -> dict[str, object]:
    def median(field: str) -> Row:
        return {n: statistics.median(r[field] for r in of) for n, of in rows.items() if of}

    rate, cpu = median("gb_per_s"), median("cpu_s_per_gb")
    cores = len(os.sched_getaffinity(0))
    checked, proof = cpu["sendfile_one"] + cpu["blake3"], cpu["blake3"]
    plain = {"one_client": "sendfile_one"}
    return {
        "benchmark": "broadcast_loopback",
        "bytes": size,
        "cores": cores,
        "gb_per_s": rounded(rate),
        "cpu_s_per_gb": rounded(cpu),
        "servers_cpu_s_per_gb": rounded(median("servers_cpu_s_per_gb")),
        "limits": rounded({n: cores / (k * checked + proof) for n, k in TRANSFERS.items()}),
        "of_sendfile": rounded(
            {name: rate[name] / rate[plain.get(name, "sendfile_two")] for name in TOPOLOGIES}
        ),
        "over_shardcast": rounded(
            {n: rate[n] / rate[f"shardcast_{n}"] for n in TOPOLOGIES if f"shardcast_{n}" in rate}
        ),
        "runs": {name: [row["gb_per_s"] for row in of] for name, of in rows.items()},
    }


def measure_tree(parent: Path, weights: Path, relays: int, clients: int) -> Row:
    with Tree(parent) as tree:
        url, origin = tree.origin()
        servers, urls = [origin], [url]
        if relays:
            started = [tree.relay(url) for _ in range(relays)]
            urls = [its for its, _ in started]
            servers += [relay for _, relay in started]
        readers = [tree.client(*urls, deadline_s=DEADLINE_S) for _ in range(clients)]
        used = sum(map(cpu_of, servers))
        began = tree.publish(1, weights)
        return row(readers, began, lambda: sum(map(cpu_of, servers)) - used)


def measure_sendfile(parent: Path, file: Path, receivers: int) -> Row:
    with Processes(parent) as processes:
        module = ("-m", "benchmarks.wire.sendfile")
        server = processes.start(*module, "serve", file)
        port = server.line()
        outs = [processes.folder / f"out-{number}" for number in range(receivers)]
        readers = [processes.start(*module, "receive", port, out) for out in outs]
        for reader in readers:
            reader.line()
        used = cpu_of(server)
        began = time.monotonic()
        for reader in readers:
            reader.go()
        return row(readers, began, lambda: cpu_of(server) - used)


def measure_shardcast(parent: Path, file: Path, relays: int, clients: int) -> Row:
    with Processes(parent) as processes:

        def start(number: int, *arguments: object) -> Started:
            # A copy of the package each: its client writes beside its own source.
            copy = processes.folder / f"package-{number}"
            shutil.copytree(SHARDCAST / "shardcast", copy / "shardcast")
            paths = os.pathsep.join(map(str, (copy, SHARDCAST)))
            environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths}
            environment["SHARDCAST_LOG_LEVEL"] = "WARNING"
            node = processes.start("-S", NODE, *arguments, environment=environment)
            assert node.line() == "ready"
            return node

        port = free_port()
        origin = start(0, "origin", processes.folder / "origin", port, file)
        servers, ports = [origin], [port]
        if relays:
            ports = []
            for number in range(relays):
                ports.append(free_port())
                folder = processes.folder / f"middle-{number}"
                upstream = f"http://127.0.0.1:{port}"
                servers.append(start(10 + number, "relay", folder, ports[-1], upstream))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        outs = [processes.folder / f"out-{number}" for number in range(clients)]
        readers = [start(20 + number, "client", out, *urls) for number, out in enumerate(outs)]
        origin.go()
        began = float(origin.line())
        used = sum(map(cpu_of, servers))
        for reader in readers:
            reader.go()
        return row(readers, began, lambda: sum(map(cpu_of, servers)) - used)


def measure_copy(parent: Path, file: Path) -> Row:
    out = parent / f"{file.parent.parent.name}-copy"
    began, used = time.monotonic(), time.process_time()
    shutil.copyfile(file, out)
    took, cpu = time.monotonic() - began, time.process_time() - used
    out.unlink()
    return speeds(file.stat().st_size, took, cpu)


def measure_blake3(file: Path) -> Row:
    began, used = time.monotonic(), time.process_time()
    blake3().update_mmap(file)
    return speeds(file.stat().st_size, time.monotonic() - began, time.process_time() - used)


def row(readers: list[Started], began: float, servers_used: Callable[[], float]) -> Row:
    """The last reader's speed, and what everybody's processors did for it."""
    done = [reader.result(DEADLINE_S) for reader in readers]
    of_readers = sum(reader["cpu_s"] for reader in done)
    took = max(reader["had"] for reader in done) - began
    return speeds(done[0]["bytes"], took, of_readers, servers_used())


def speeds(size: int, seconds: float, cpu_s: float, servers_cpu_s: float = 0.0) -> Row:
    gigabytes = size / 1e9
    return rounded(
        {
            "gb_per_s": gigabytes / seconds,
            "cpu_s_per_gb": (cpu_s + servers_cpu_s) / gigabytes,
            "servers_cpu_s_per_gb": servers_cpu_s / gigabytes,
        }
    )


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def cpu_of(started: Started) -> float:
    return cpu_seconds(started.process.pid)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
