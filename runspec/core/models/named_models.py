"""Shapes of named models, for what must be known of a model before any of its files is here.

Each is the config.json of the repository, less the fields that say nothing of the weights or of
what they compute.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

_FOLDER = resources.files("runspec.core.models") / "named"


def model_names() -> list[str]:
    """Every model whose shape ships with runspec, as `model.hf` names it."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name[: -len(".json")].replace("--", "/") for name in files)


def named_model(name: str) -> dict[str, Any] | None:
    """The config.json of a model such as `Qwen/QwQ-32B`; None where it does not ship."""
    if name not in model_names():
        return None
    config: dict[str, Any] = json.loads((_FOLDER / f"{name.replace('/', '--')}.json").read_text())
    return config
