"""ASGI middleware of vLLM's OpenAI-compatible server: moves it to other versions of a run.

`runspec serve --follow` checks the files of a version and sends a `Move`. Invariants:

- An answer comes from one version. During a move new requests wait, those under way end first, and
  the engine is idle and its caches are empty before its weights change.
- A client that sends its request slowly, or does not read its answer, delays no move for long: a
  request counts as under way when its whole body is here, and each piece of an answer has a
  deadline.
- Nothing is answered after a load that failed or whose weights differ from the files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.errors import one_line
from runspec.core.process import FOLLOW_VARIABLE, Move, Reply, Settings, encode
from sampler.engine.requests import merge, require_same_bytes

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 32 * 1024 * 1024
BODY_S = 60.0
"""Seconds for the whole body of a request to arrive."""
SEND_S = 60.0
"""Seconds for a client to take a piece of its answer."""
LOAD_S = 600.0
"""Seconds for the engine to read all weights of a version and compare them with the files."""
_READS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that generate nothing; they never wait."""
_log = logging.getLogger(__name__)


class VersionSwitch:
    """The middleware; vLLM makes it once, with `--middleware`."""

    def __init__(self, app: App) -> None:
        self._app, self._running = app, 0
        self._opened, self._idle = asyncio.Event(), asyncio.Event()
        self._opened.set()
        self._idle.set()
        self._settings = Settings(**json.loads(os.environ[FOLLOW_VARIABLE]))
        self._version = self._settings.version

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._opened.clear()  # until the first version was compared with its files
            moves = asyncio.create_task(self._follow(scope["app"].state))
            try:
                await self._app(scope, receive, send)
            finally:
                moves.cancel()
        elif scope["type"] != "http" or scope["method"] in _READS:
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request once its body is here and no move is under way."""
        body = await read_body(receive)
        if isinstance(body, tuple):  # answered with OpenAI's error body
            status, message = body
            found = {"message": message, "type": "BadRequestError", "param": None, "code": status}
            content = json.dumps({"error": found}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", str(len(content)).encode()))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": content})
        if not isinstance(body, bytes):
            return
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return left.pop() if left else await receive()

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        while not self._opened.is_set():  # it may be cleared again before this task goes on
            await self._opened.wait()
        self._running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive_again, send_in_time)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _follow(self, state: Any) -> None:
        """Carry out the moves that arrive on the socket, then end the server.

        Args:
            state: of vLLM's application.
        """
        own = socket.socket(fileno=self._settings.descriptor)
        reader, writer = await asyncio.open_unix_connection(sock=own)
        try:
            await self._compare(state.engine_client, self._version, state.args.model)
            self._rename(state.openai_serving_models)
            self._opened.set()
            writer.write(encode(Reply(self._version)))
            with suppress(ConnectionError):  # the command was killed
                while line := await reader.readline():
                    running = await self._move(state, Move(**json.loads(line)))
                    writer.write(encode(Reply(self._version, running)))
        except Exception as failure:  # noqa: BLE001 - the command reports it
            self._opened.clear()
            _log.exception("the engine holds no version that may be served")
            why = f"{type(failure).__name__}: {one_line(str(failure), 500)}"
            writer.write(encode(Reply(self._version, error=why)))
        finally:
            writer.close()
        signal.raise_signal(signal.SIGTERM)

    async def _move(self, state: Any, move: Move) -> int:
        """Load another version once nothing is under way, and go on answering.

        Returns:
            Number of requests that did not end in time; if it is not 0, the version stays.
        """
        engine = state.engine_client
        self._opened.clear()
        try:
            async with asyncio.timeout(self._settings.hold_s):
                await self._idle.wait()
                # The engine may still hold requests whose clients have gone.
                await engine.pause_generation(mode="wait", clear_cache=True)
        except TimeoutError:
            running = max(1, self._running)
            await engine.resume_generation()
            self._opened.set()
            return running
        async with asyncio.timeout(LOAD_S):
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": move.folder})
            await engine.collective_rpc("repack_tied_head")
            await self._compare(engine, move.version, move.folder)
            await engine.resume_generation()
        self._version = move.version
        self._rename(state.openai_serving_models)
        self._opened.set()
        return 0

    async def _compare(self, engine: Any, version: int, folder: str) -> None:
        """Compare the weights in the engine with a version's files; raises UserError."""
        replies = await engine.collective_rpc("compare_weights", kwargs={"weights_dir": folder})
        require_same_bytes(merge(replies), Path(folder), version)

    def _rename(self, models: Any) -> None:
        """Call the model by its version, in answers too, and by the name of the run."""
        name, first = self._settings.name, models.base_model_paths[0]
        names = [replace(first, name=each) for each in (f"{name}@v{self._version}", name)]
        models.base_model_paths = models.registry.base_model_paths = names


async def read_body(receive: Receive) -> bytes | tuple[int, str] | None:
    """Return the body of a request; None if its client has gone; status and message of the answer
    if it has over `MAX_BODY_BYTES`, or is not complete after `BODY_S`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    return 413, f"the body has over {MAX_BODY_BYTES} bytes"
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return 408, f"the body did not arrive within {BODY_S:g} s"
