"""Messages between `runspec serve --follow` and vLLM's server: one JSON object a line, on a socket.

The server is the child of the command, and the socket is one of an unnamed pair. So both ends trust
each other. The server sends a `Reply` once it can answer. From then on each `Move` gets one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "RUNSPEC_FOLLOW"
"""Environment variable with the server's `Settings`."""


@dataclass(frozen=True)
class Settings:
    """What the server is told at its start."""

    descriptor: int
    """Of its end of the socket."""
    name: str
    """Of the run."""
    version: int
    """The version that it loads at its start."""
    hold_s: float
    """Seconds that new requests wait at most until those under way have ended."""


@dataclass(frozen=True)
class Move:
    """Asks the server to load another version."""

    version: int
    folder: str
    """Hugging Face directory whose files were checked."""


@dataclass(frozen=True)
class Reply:
    """Says which version the server answers with now."""

    version: int
    running: int = 0
    """Requests that did not end within `hold_s`; if it is not 0, the server did not move."""
    error: str = ""
    """Why the engine holds no version; nothing is answered any more."""


def encode(message: Settings | Move | Reply) -> bytes:
    """Return a message as a line."""
    return json.dumps(asdict(message)).encode() + b"\n"
