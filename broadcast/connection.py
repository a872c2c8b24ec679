"""One connection to a server, over which chunks come one after the other, each into its file.

A thread works on it with blocking calls; the event loop alone opens, ends and closes it. So a
deadline needs no timeouts in the thread: `end` shuts the socket down, and whatever the thread was
waiting for (a handshake, a header, the next byte) returns at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from broadcast.http1 import MAX_HEAD_BYTES, Address, Head, parse_head
from broadcast.manifest import Chunk
from broadcast.names import look_up
from broadcast.transport import Fault, Lie, refusal

_CONNECT_S = 5.0
_BUFFER_BYTES = 1024 * 1024


class Stale(Fault):
    """The server closed the connection before it answered, as it may after an idle while."""


@dataclass
class Transfer:
    """One chunk on its way into a file that exists."""

    chunk: Chunk
    into: Path
    offset: int
    received: int = 0
    """Bytes of the body so far; the thread counts, anyone may look."""


class Connection:
    """An open socket to a server, and the way to get chunks over it."""

    def __init__(self, address: Address, sock: socket.socket) -> None:
        self.address = address
        self._socket = sock
        self._ended = False
        self._shaken = not isinstance(sock, ssl.SSLSocket)

    def bring(self, request: bytes, transfer: Transfer) -> bool:
        """Sends a request and writes the chunk that comes; in a thread.

        Returns:
            Whether the connection can be used for another one.

        Raises:
            Stale: closed before the first byte of an answer.
            NotThere, Busy, Lie, Fault: what came instead of the chunk.
            OSError: the file cannot be written.
        """
        head, first = self._answer(request)
        _check(head, transfer.chunk)
        size = transfer.chunk.size
        hasher = blake3()
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, size)))
        held = min(len(first), size)
        buffer[:held] = first[:held]
        descriptor = os.open(transfer.into, os.O_WRONLY)
        try:
            while transfer.received < size:
                piece = buffer[: min(len(buffer), size - transfer.received)]
                self._fill(piece, held, transfer)
                held = 0
                hasher.update(piece)
                if self._ended:  # from now on these bytes of the file are another attempt's
                    raise Fault("given up")
                _write(descriptor, piece, transfer.offset + transfer.received)
                transfer.received += len(piece)
        finally:
            os.close(descriptor)
        if hasher.hexdigest() != transfer.chunk.blake3:
            raise Lie(f"{size} bytes that are not the chunk's")
        return head.keeps_alive and len(first) <= size

    def is_idle(self) -> bool:
        """Whether it is still open and silent; an answer to nothing is as good as closed."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def end(self) -> None:
        """Makes the thread that is working on it stop at once."""
        self._ended = True
        with suppress(OSError):  # not SSLSocket's own, which takes the TLS state from the thread
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Once no thread works on it."""
        self._socket.close()

    def _answer(self, request: bytes) -> tuple[Head, bytes]:
        """The head of the answer, and what of the body came with it."""
        data = b""
        try:
            if isinstance(self._socket, ssl.SSLSocket) and not self._shaken:
                self._socket.do_handshake()
                self._shaken = True
            self._socket.sendall(request)
            while (end := data.find(b"\r\n\r\n")) < 0:
                if len(data) >= MAX_HEAD_BYTES:
                    raise Fault(f"more than {MAX_HEAD_BYTES} bytes of headers")
                piece = self._socket.recv(MAX_HEAD_BYTES)
                if not piece:
                    raise Stale("closed the connection") if not data else _cut("the headers")
                data += piece
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Stale(_said(error)) if not data else Fault(_said(error)) from error
        except OSError as error:
            raise Fault(_said(error)) from error
        return parse_head(data[:end]), data[end + 4 :]

    def _fill(self, piece: memoryview, held: int, transfer: Transfer) -> None:
        # TLS gives at most one record of 16 KiB at a time and knows no flags.
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        while held < len(piece):
            try:
                count = self._socket.recv_into(piece[held:], 0, flags)
            except OSError as error:
                raise Fault(_said(error)) from error
            if count == 0:
                raise _cut(f"byte {transfer.received + held} of {transfer.chunk.size}")
            held += count


async def connect(address: Address, tls: ssl.SSLContext) -> Connection:
    """A connection to one of a host's addresses.

    Raises:
        Fault: none of them took it in time.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await look_up(address.host, address.port)
    except (OSError, UnicodeError) as error:
        raise Fault(_said(error)) from error
    failures = []
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_CONNECT_S / len(found)):
                await loop.sock_connect(sock, target)
            sock.setblocking(True)
            if address.secure:
                sock = tls.wrap_socket(
                    sock, server_hostname=address.host, do_handshake_on_connect=False
                )
        except OSError as error:
            failures.append(_said(error))
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            return Connection(address, sock)
    raise Fault(f"cannot connect: {'; '.join(failures)}")


def _check(head: Head, chunk: Chunk) -> None:
    if head.status != 200:
        raise refusal(head.status, head.retry_after)
    if head.length is None:
        raise Fault("does not tell the length of its answer")
    if head.length != chunk.size:
        raise Lie(f"{head.length} bytes that are not the chunk's {chunk.size}")


def _write(descriptor: int, piece: memoryview, offset: int) -> None:
    while piece:
        written = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[written:], offset + written


def _cut(where: str) -> Fault:
    return Fault(f"closed the connection at {where}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
