"""The decoder's process: Parquet on standard input, plain columns on standard output.

`python -m verify.decoder CPU_S TIMES` (seconds for a file, beside what its size allows, and how
often both), started by `verify.decoder.parent` with an environment without secrets. It decodes a
file of its own making, so that all code is loaded, gives up everything that it may (`confine`), and
then answers one file after the other.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from verify.decoder.confine import Limits, confine, die_with_parent, set_signals
from verify.decoder.pack import pack
from verify.decoder.wire import (
    ANSWER,
    BYTES_A_S,
    COLUMNS,
    MALFORMED,
    MAX_WORDS,
    MEMORY,
    MEMORY_OF_FILE,
    READY,
    REQUEST,
)
from verify.formats.submission_columns import NEWER_COLUMNS, SCHEMA
from verify.formats.tables import MalformedTable, decode_table, encode_table

_IN, _OUT, _ERRORS = 0, 1, 2
_PIPE_BYTES = 1 << 20


def main(cpu_s: int, times: int) -> int:
    """Serves until its input ends."""
    die_with_parent()
    set_signals()
    limits = Limits()
    if _answer(encode_table([_example(), _example()], SCHEMA), 2, 1 << 20)[0] != COLUMNS:
        print("the decoder cannot read what it writes", file=sys.stderr)
        return 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), _ERRORS)  # nobody reads it from here on
    confine()
    _send(READY, b"")
    while request := _receive(REQUEST.size):
        size, max_rows, max_bytes = REQUEST.unpack(request)
        allowed_s = times * (cpu_s + size // BYTES_A_S)
        limits.allow(cpu_s=allowed_s, memory=MEMORY + MEMORY_OF_FILE * max_bytes)
        _send(*_answer(_receive(size), max_rows, max_bytes))
    return 0


def _answer(data: bytes | bytearray, max_rows: int, max_bytes: int) -> tuple[int, bytes]:
    try:
        table = decode_table(
            bytes(data),
            SCHEMA,
            max_rows=max_rows,
            max_bytes=max_bytes,
            newer=NEWER_COLUMNS,
            confined=True,
        )
        return COLUMNS, pack(table)
    except MalformedTable as error:
        return MALFORMED, str(error).encode("utf-8", "replace")[:MAX_WORDS]
    except MemoryError:
        return MALFORMED, b"takes more memory than files of this size may"


def _receive(size: int) -> bytearray:
    """So many bytes; none where the input ends."""
    data, at = bytearray(size), 0
    view = memoryview(data)
    while at < size:
        got = os.readv(_IN, [view[at : at + _PIPE_BYTES]])
        if not got:
            return bytearray()
        at += got
    return data


def _send(kind: int, body: bytes) -> None:
    for part in (ANSWER.pack(kind, len(body)), body):
        view = memoryview(part)
        while view:
            view = view[os.write(_OUT, view[:_PIPE_BYTES]) :]


def _example() -> dict[str, Any]:
    """A row with a value in every column."""
    kinds = {"list": [1], "stri": "x", "int3": 1, "floa": 1.0}
    row = {field.name: kinds[str(field.type)[:4]] for field in SCHEMA}
    return {**row, "proofs": [b"x"]}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
