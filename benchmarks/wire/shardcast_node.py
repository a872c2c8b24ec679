"""The published `shardcast` as a process of a benchmark; run where that package can be imported.

    shardcast_node origin DIR PORT FILE     serves DIR; at a line, broadcasts FILE
    shardcast_node relay DIR PORT URL       its middle node, looking for news every second
    shardcast_node client DIR URL ...       says `ready`; at a line, downloads v1

Knows nothing of this repository: its environment has the standard library and that package only.
"""

import json
import resource
import sys
import time
import urllib.request
from pathlib import Path

LOOK_EVERY_S = 1
"""30 by default, which would hide everything else."""


def origin(directory: str, port: str, file: str) -> None:
    from shardcast.origin_server import OriginServer

    server = OriginServer(directory, int(port))
    # The client measures a server by a file of this name, which it must have.
    Path(directory, "data1.bin").write_bytes(b"x" * 1000)
    print("ready", flush=True)
    sys.stdin.readline()
    server.broadcast(file)
    print(time.monotonic(), flush=True)
    sys.stdin.readline()


def relay(directory: str, port: str, url: str) -> None:
    from shardcast.middle_node import MiddleNode

    Path(directory).mkdir()
    Path(directory, "data1.bin").write_bytes(b"x" * 1000)
    MiddleNode([url], directory, int(port), check_interval=LOOK_EVERY_S)
    print("ready", flush=True)
    sys.stdin.readline()


def client(directory: str, *urls: str) -> None:
    from shardcast.client_node import ClientNode

    node = ClientNode(list(urls), directory)
    print("ready", flush=True)
    sys.stdin.readline()
    heard, used = time.monotonic(), cpu_s()
    # Where one of its servers has not heard of a version yet, it may never find the end of it.
    while not all(b"v1" in text_of(f"{url}/distribution.txt") for url in urls):
        time.sleep(0.05)
    path = node.download_version("v1")
    if path is None:
        raise SystemExit("its download failed")
    done = {"heard": heard, "had": time.monotonic(), "cpu_s": cpu_s() - used}
    print(json.dumps({**done, "bytes": Path(path).stat().st_size}), flush=True)


def text_of(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return b""  # not there yet


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    {"origin": origin, "relay": relay, "client": client}[sys.argv[1]](*sys.argv[2:])
