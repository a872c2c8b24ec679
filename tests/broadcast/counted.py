"""What tests of the client share: a server that counts, and questions to it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from broadcast.client import WeightsClient

from .conftest import Run
from .fake_relay import FakeRelay, Request, held_until
from .model_versions import ModelVersions


class Counted:
    """A plain server of the run's store that knows how many bytes of chunks it has sent."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.server: FakeRelay = run.static()
        self.url = self.server.url

    def moved(self) -> int:
        """Bytes of chunks asked for since the last call."""
        chunks = [path for path in self.server.paths if "/chunks/" in path]
        self.server.paths.clear()
        return sum((self._run.store / path.lstrip("/")).stat().st_size for path in chunks)


def fetch(client: WeightsClient, version: int, deadline_s: float = 20) -> Path:
    return client.fetch(version, manifest_digest=None, deadline_s=deadline_s)


def small_files(versions: ModelVersions, version: int) -> int:
    """Bytes of the files that hold no tensors."""
    whole = sum(len(data) for data in versions.files(version).values())
    return whole - versions.weights_bytes(version)


def hold_chunks(server: FakeRelay) -> tuple[threading.Event, threading.Event]:
    """Holds every chunk back: (set when one is asked for, to be set to let them go)."""
    asked, go_on = threading.Event(), threading.Event()

    def answer(request: Request) -> None:
        asked.set()
        held_until(go_on)(request)

    server.answer("/chunks/", answer)
    return asked, go_on


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
