"""JSON lines over pipes, with limits on size and time."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_PORTION = 1 << 16


class ChannelClosed(Exception):
    """The other side ended, or sent something that is not a message."""


class NoMessage(ChannelClosed):
    """The other side sent something that is not a message; it may still run."""


class Overdue(Exception):
    """The deadline passed before a message was received or sent."""


class Channel:
    """One side of a conversation with another process.

    Args:
        read_fd, write_fd: pipes; they are made non-blocking.
        max_bytes: longest line that is accepted.
    """

    def __init__(self, read_fd: int, write_fd: int, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._read_fd, self._write_fd, self._max_bytes = read_fd, write_fd, max_bytes
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._buffer = bytearray()
        self._searched = 0

    def send(self, message: Any, deadline: float) -> None:
        """Write one line of JSON. Raises the errors of `send_line`."""
        self.send_line(json.dumps(message), deadline)

    def send_line(self, line: str, deadline: float) -> None:
        """Write a line that is JSON already.

        Raises:
            ChannelClosed: the other side has ended.
            Overdue: not sent by `deadline` (`time.monotonic`).
        """
        data = memoryview(line.encode() + b"\n")
        while data:
            self._wait(self._write_fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write_fd, data[:_PORTION]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelClosed(f"cannot write: {error.strerror}") from error

    def receive(self, deadline: float) -> Any:
        """Read one line.

        Raises:
            ChannelClosed: the other side ended; `NoMessage`: it sent a line that is too long or
                is not JSON.
            Overdue: no whole line by `deadline` (`time.monotonic`).
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self._max_bytes:
                raise NoMessage(f"a message of more than {self._max_bytes} bytes")
            self._wait(self._read_fd, select.POLLIN, deadline)
            try:
                portion = os.read(self._read_fd, _PORTION)
            except BlockingIOError:
                continue
            if not portion:
                raise ChannelClosed("ended")
            self._buffer += portion
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NoMessage("a message that is no JSON") from error

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise Overdue
