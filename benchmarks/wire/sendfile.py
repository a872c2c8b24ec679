"""The plainest transfer there is: no check, no names, no second try. What others are measured by.

sendfile serve FILE             prints its port; sends the file to whoever sends a byte
sendfile receive PORT OUT       says `ready`; at a line from standard input it begins
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

_BUFFER_BYTES = 1024 * 1024


def serve(path: Path) -> None:
    """A thread a connection, each with one `os.sendfile` after the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send, args=(connection, path), daemon=True).start()


def receive(port: int, out: Path) -> None:
    """Into one buffer, and from there into a file."""
    with socket.create_connection(("127.0.0.1", port)) as connection, out.open("wb", 0) as file:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        print("ready", flush=True)
        sys.stdin.readline()
        heard, used = time.monotonic(), time.process_time()
        connection.sendall(b"!")
        while size := connection.recv_into(buffer):
            file.write(buffer[:size])
    done = {"heard": heard, "had": time.monotonic(), "cpu_s": time.process_time() - used}
    print(json.dumps(done | {"bytes": out.stat().st_size}), flush=True)


def _send(connection: socket.socket, path: Path) -> None:
    with connection, path.open("rb") as file:
        if not connection.recv(1):
            return
        offset, size = 0, path.stat().st_size
        while offset < size:
            offset += os.sendfile(connection.fileno(), file.fileno(), offset, size - offset)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "serve":
        serve(Path(rest[0]))
    else:
        receive(int(rest[0]), Path(rest[1]))


if __name__ == "__main__":
    main()
