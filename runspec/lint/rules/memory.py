"""What fits into the memory of devices, and which numbers survive rounding."""

from __future__ import annotations
