"""A worker extension that vLLM cannot take."""

from __future__ import annotations

raise ImportError("as broken as it gets")
