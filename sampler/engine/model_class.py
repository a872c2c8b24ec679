"""A model's class, looked at here: vLLM would start a process for it that imports all of vLLM.

It does so to keep CUDA out of a process that may fork, and keeps the answer in a file of the user's
cache; so it is the first engine on a machine, of each family, that takes twice the imports to
start. On CPUs there is no CUDA to keep out.
"""

from __future__ import annotations

import json
from pathlib import Path


def look_at_class(weights_dir: Path) -> None:
    """Tells vLLM's registry the class that config.json names; one that it lacks it will refuse."""
    from vllm.model_executor.models.registry import ModelRegistry

    config = json.loads((weights_dir / "config.json").read_text())
    for name in config.get("architectures") or ():
        registered = ModelRegistry.models.get(name)
        if registered is not None:
            ModelRegistry.register_model(name, registered.load_model_cls())
