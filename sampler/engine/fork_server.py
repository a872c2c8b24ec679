"""What a fork server does first: it outlives SIGTERM, and ends with the worker."""

from __future__ import annotations

import atexit
import os
import signal

# SIGTERM goes to the worker's whole group, and the worker may still sample.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
atexit.register(os._exit, 0)  # skip the exit handlers of libraries
