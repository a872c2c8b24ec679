"""What goes over the two pipes between the decoder and its parent."""

from __future__ import annotations

import struct

REQUEST = struct.Struct("<QQQ")
"""Bytes of the file that follows, rows allowed, bytes allowed."""
ANSWER = struct.Struct("<BQ")
"""What follows (below), and its bytes."""
READY, COLUMNS, MALFORMED = 0, 1, 2
"""Nothing: the process has started. A packed table. Why the file is none, in UTF-8."""
MAX_WORDS = 1000
"""Bytes of a reason."""
BYTES_A_S = 4 << 20
"""Of a file, that a second of processor time is allowed for; honest ones take a tenth of it."""
MEMORY_OF_FILE = 8
"""Memory that decoding may take, in multiples of the bytes allowed: the file, the columns as Arrow
has them in batches and joined, checked, packed, and what allocators leave unused."""
MEMORY = 128 << 20
"""And of itself, whatever the file."""
