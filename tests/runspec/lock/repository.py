"""Models in directories and in a Hugging Face cache, and a server that speaks for the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "76543210fedcba9876543210fedcba9876543210"


def write_model(
    folder: Path, *, template: str = "{{ messages }}", weights: bytes = b"1234"
) -> Path:
    """A model's directory with one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_weights(folder / "model.safetensors", weights)
    return folder


def write_weights(path: Path, weights: bytes, name: str = "a") -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, len(weights)]}
    header = json.dumps({name: tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + weights)


def cache(home: Path, repository: str = "models--some--model", commit: str = COMMIT) -> Path:
    """The folder of a commit in a cache whose `main` it is."""
    folder = home / "hub" / repository
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub's API does; what is not in `answers` is a 404."""

    server: HubServer

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        answer = self.server.answers.get(urlsplit(self.path).path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        for piece in answer or ():
            self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.answers: dict[str, list[bytes] | Iterator[bytes]] = {}
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has heard enough closes the connection."""


@contextmanager
def hub() -> Iterator[HubServer]:
    """A running server."""
    server = HubServer()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=5)
        server.server_close()
