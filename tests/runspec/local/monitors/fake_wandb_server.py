"""Fake server of Weights & Biases: as much of one as a session of ours needs, for one run.

Names of requests and answers are those of the client, wandb 0.31. It keeps lines of history by
their offsets, and tells a client that resumes how many there are and what the last one says.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeWandbServer:
    """What it has: `lines` are rows of history as JSON, `files` the names of uploaded ones."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.lines: list[str] = []
        self.files: set[str] = set()
        self._begun = False

    def stream(self, sent: dict[str, Any]) -> dict[str, Any]:
        if part := (sent.get("files") or {}).get("wandb-history.jsonl"):
            at, lines = part["offset"], part["content"]
            assert at <= len(self.lines), f"lines {len(self.lines)} to {at} are missing"
            self.lines[at : at + len(lines)] = lines
        return {"limits": {}}

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": "runspec", "entity": {"id": "e", "name": "me"}}
        if operation == "RunResumeStatus":
            return {"model": {**project, "bucket": self._resumed() if self._begun else None}}
        if operation == "UpsertBucket":
            new, self._begun = not self._begun, True
            name = variables.get("name") or "run"
            bucket = {"id": "r", "name": name, "displayName": name, "config": "{}"}
            return {"upsertBucket": {"bucket": {**bucket, "project": project}, "inserted": new}}
        if operation == "CreateRunFiles":
            self.files.update(variables["files"])
            files = [{"name": name, "uploadUrl": f"{self.url}/up"} for name in variables["files"]]
            made = {"runID": "r", "uploadHeaders": [], "files": files}
            return {"createRunFiles": made}
        return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}"}}

    def _resumed(self) -> dict[str, Any]:
        return {
            "id": "r",
            "name": "run",
            "displayName": "run",
            "tags": [],
            "runtime": 0,
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(self.lines),
            "summaryMetrics": "{}",
            "config": "{}",
            "wandbConfig": '{"t": 1}',
            "historyTail": json.dumps(self.lines[-1:]),
            "eventsTail": "[]",
        }


@contextmanager
def fake_wandb_server() -> Iterator[FakeWandbServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            asked = json.loads(data)
            if self.path.endswith("/file_stream"):
                self._reply(fake.stream(asked))
            else:
                name, variables = asked.get("operationName") or "", asked.get("variables") or {}
                self._reply({"data": fake.answer(name, variables)})

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._reply({})

        def _reply(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake = FakeWandbServer(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield fake
        finally:
            server.shutdown()
