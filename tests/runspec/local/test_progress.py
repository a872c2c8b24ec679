"""How far a run is, by its files and by its coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from runspec.core.files import write_atomic
from runspec.local.fleet import Progress, Published, Sampled, Trained
from runspec.local.progress import RunProgress, StageProgress, coordinator_status
from tests.runspec.local.fake_run import small_spec

NOBODY = "http://127.0.0.1:9"


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server whose every answer is `body`; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_files_become_events_as_they_appear(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, small_spec("small", 2), NOBODY)
    metrics = tmp_path / "metrics.jsonl"
    assert progress.poll() == []

    metrics.write_text('{"step": 0}\n')
    assert progress.poll() == [Progress()]
    assert progress.poll() == []

    write_atomic(tmp_path / "rollouts" / "step_1" / "batch.json", b"{}")
    assert progress.poll() == [Sampled()]

    metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert progress.poll() == [Progress(), Trained(), Sampled()]
    assert [row["step"] for row in progress.rows] == [0, 1]

    write_atomic(tmp_path / "store/origin/small/versions/2/manifest.json", b"{}")
    assert progress.poll() == [Trained(), Sampled(), Published()]


def test_a_stage_is_done_once_its_product_is_there(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    progress = StageProgress(tmp_path / "product", log)
    assert (progress.poll(), progress.note) == ([], "")
    log.write_text("update 10\n2026-01-01 10:00:00,000 I update 20\n")
    (tmp_path / "product").touch()
    assert Trained() in progress.poll()
    assert progress.note == "update 20"


def test_the_coordinator_is_asked(tmp_path: Path) -> None:
    with answering(b'{"waiting_for": "3 groups"}') as url:
        assert coordinator_status(url) == {"waiting_for": "3 groups"}
