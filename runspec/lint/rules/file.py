"""What the loader itself finds: YAML, keys, types, layers, variables. Only their pages are here."""

from __future__ import annotations
