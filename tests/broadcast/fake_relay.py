"""A plain file server over a store, which lies where its script says so.

fake = FakeRelay(store)
fake.answer("/chunks/", flipped)              # every path that contains it; the last one wins
fake.answer(digest, only(1, cut_off))         # the first time, and truly after that
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DRIP_S = 0.05
"""Between two bytes of a drip."""


@dataclass(frozen=True)
class Request:
    """What an answer gets: it writes to the wire whatever it likes."""

    path: str
    truth: bytes | None
    """The file that an honest server would send; None where it has none."""
    write: Callable[[bytes], None]
    hang_up: Callable[[], None]
    """The connection ends after this answer."""
    stopping: threading.Event


Answer = Callable[[Request], None]


class FakeRelay:
    """A plain server of the files of a folder, as any bucket or CDN, but for what `answer` says."""

    def __init__(self, folder: Path) -> None:
        self.paths: list[str] = []
        """Paths asked for, in order."""
        self.heads: list[bytes] = []
        """Heads of these requests."""
        self._folder = folder
        self._script: list[tuple[str, Answer]] = [("", honest)]
        self._stopping = threading.Event()
        self._server = Scripted(self._play)
        self.url = self._server.url

    def answer(self, part: str, answer: Answer) -> None:
        """From now on, paths that contain `part` are answered so."""
        self._script.append((part, answer))

    def asked(self, part: str = "/chunks/") -> int:
        """How often paths that contain `part` were asked for."""
        return sum(part in path for path in list(self.paths))

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop()

    def _play(self, peer: Peer) -> None:
        ended: list[bool] = []
        while not ended and (request := peer.read_request()):
            path = request.split(b" ", 2)[1].decode()
            self.paths.append(path)
            self.heads.append(request)
            file = self._folder / path.partition("?")[0].lstrip("/")
            truth = file.read_bytes() if file.is_file() else None
            chosen = [answer for part, answer in self._script if part in path][-1]
            chosen(Request(path, truth, peer.send, lambda: ended.append(True), self._stopping))


def head(status: str, length: int | None, *more: str) -> bytes:
    """The head of an answer; without a length the body ends with the connection."""
    lines = [f"HTTP/1.1 {status}", *more]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def honest(request: Request) -> None:
    if request.truth is None:
        request.write(head("404 Not Found", 0))
    else:
        request.write(head("200 OK", len(request.truth)) + request.truth)


def instead(body: bytes) -> Answer:
    """Other bytes than the truth, well formed."""
    return lambda request: request.write(head("200 OK", len(body)) + body)


def only(times: int, answer: Answer, then: Answer = honest) -> Answer:
    """An answer to the first so many requests, and another to the rest."""
    left = iter(range(times))
    return lambda request: (answer if next(left, None) is not None else then)(request)


def held_until(event: threading.Event, then: Answer = honest) -> Answer:
    """An answer that waits for an event (or the end of the test)."""

    def wait(request: Request) -> None:
        while not event.wait(0.02) and not request.stopping.is_set():
            pass
        then(request)

    return wait


def not_there(request: Request) -> None:
    request.write(head("404 Not Found", 0))


def flipped(request: Request) -> None:
    """One bit is another."""
    data = bytearray(request.truth or b"?")
    data[len(data) // 2] ^= 1
    instead(bytes(data))(request)


def truncated(request: Request) -> None:
    """The last byte is missing, and the length says so."""
    instead((request.truth or b"?")[:-1])(request)


def padded(request: Request) -> None:
    """A byte too many, and the length says so."""
    instead((request.truth or b"") + b"\0")(request)


def cut_off(request: Request) -> None:
    """The connection breaks halfway through the body."""
    data = request.truth or b"??"
    request.write(head("200 OK", len(data)) + data[: len(data) // 2])
    request.hang_up()


def overflowing(request: Request) -> None:
    """More bytes than the length says: the start of an answer that nobody asked for."""
    data = request.truth or b"?"
    request.write(head("200 OK", len(data)) + data + head("200 OK", 1) + b"!")


def server_error(request: Request) -> None:
    request.write(head("500 Internal Server Error", 0))


def huge_head(request: Request) -> None:
    """20 MB of headers before the truth."""
    data = request.truth or b"?"
    line = "X-Padding: " + "x" * 8000
    request.write(head("200 OK", len(data), *[line] * 2500) + data)


def garbage(request: Request) -> None:
    """Not HTTP at all."""
    request.write(b"\x16\x03\x01 this is no answer\r\n\r\n" * 10)
    request.hang_up()


def with_length(length: str) -> Answer:
    """The truth under another Content-Length."""

    def claim(request: Request) -> None:
        request.write(head("200 OK", None, f"Content-Length: {length}") + (request.truth or b"?"))
        request.hang_up()

    claim.__name__ = f"length_{length or 'empty'}"
    return claim


ZIPPED = gzip.compress(bytes(20_000_000))


def zipped(request: Request) -> None:
    """20 MB of zeros that nobody asked for, packed small."""
    request.write(head("200 OK", len(ZIPPED), "Content-Encoding: gzip") + ZIPPED)


def odd_chunks(request: Request) -> None:
    """HTTP's own chunks, of a size below nothing."""
    request.write(head("200 OK", None, "Transfer-Encoding: chunked") + b"-5\r\nhello\r\n0\r\n\r\n")
    request.hang_up()


def endless_continue(request: Request) -> None:
    """`go on` for ever, and never an answer."""
    while not request.stopping.is_set():
        request.write(head("100 Continue", None) * 100)


def silent(request: Request) -> None:
    """Takes the request and says nothing."""
    request.stopping.wait()
    request.hang_up()


def endless_head(request: Request) -> None:
    """Headers, a byte at a time, without an end."""
    request.write(b"HTTP/1.1 200 OK\r\nX: ")
    _drip(request)


def endless_drip(request: Request) -> None:
    """The promised length, a byte at a time: days for a chunk."""
    request.write(head("200 OK", max(len(request.truth or b""), 900)))
    _drip(request)


def endless_body(request: Request) -> None:
    """As fast as can be, without a length, without an end."""
    request.write(head("200 OK", None))
    while not request.stopping.is_set():
        request.write(b"x" * 65536)


def endless_chunks(request: Request) -> None:
    """The same in HTTP's own chunks."""
    request.write(head("200 OK", None, "Transfer-Encoding: chunked"))
    while not request.stopping.is_set():
        request.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def _drip(request: Request) -> None:
    while not request.stopping.wait(DRIP_S):
        request.write(b"x")
    request.hang_up()


BYTE_S = 0.02
"""Between two bytes of a script that sends slowly."""


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
                if self._stopping.wait(BYTE_S):
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
