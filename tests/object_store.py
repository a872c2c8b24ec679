"""An S3 server on this machine: moto's, which keeps objects in its own memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.harness import free_port
from tests.waiting import eventually

BUCKET = "runs"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Starts a server with an empty bucket; yields the environment of its clients."""
    port = free_port()
    serve = "from moto.server import main; main()"
    command = [sys.executable, "-c", serve, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _answers(port), "the S3 server")
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")):
            pass
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
