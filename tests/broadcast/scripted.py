"""A server of one's own words: each connection is handed to a script, byte by byte."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

DRIP_S = 0.02


class Peer:
    """The other side of one connection."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self._socket = sock
        self._stopping = stopping

    def read_request(self) -> bytes:
        """The head of the next request; empty where the client has gone."""
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            piece = self._socket.recv(4096)
            if not piece:
                return b""
            data += piece
        return data

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self, body: bytes, status: str = "200 OK", *fields: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def drip(self, data: bytes) -> None:
        """One byte after the other, again and again, until the client goes or the test ends."""
        while True:
            for byte in data:
                if self._stopping.wait(DRIP_S):
                    return
                self.send(bytes([byte]))

    def wait_for_the_end(self) -> None:
        """Until the client goes."""
        while self._socket.recv(4096):
            pass


class Scripted:
    """Listens and plays the script to each connection in a thread of its own.

    Args:
        script: plays one connection, which ends when it returns.
        host: a loopback address.
        tls: speak it.
    """

    def __init__(
        self,
        script: Callable[[Peer], None],
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connections = 0
        self.ended = 0
        """Connections whose script has come to its end."""
        self._script = script
        self._tls = tls
        self._stopping = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        self._stopping.set()
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            thread = threading.Thread(target=self._play, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _play(self, sock: socket.socket) -> None:
        # The client goes whenever it has had enough: then so does the script.
        with sock, contextlib.suppress(OSError):
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                self._open.append(sock)
            with sock:
                self._script(Peer(sock, self._stopping))
        self.ended += 1


Serve = Callable[[Callable[[Peer], None]], Scripted]
"""Starts a server that does to each connection what a script says."""
