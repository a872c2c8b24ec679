"""Shape of the model that a spec names: from the spec, a local config.json, or a shipped config.

`named/` holds the config.json of known repositories, with the fields that determine the weights and
the computation. So commands know the shape before any file of the model is downloaded.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from runspec.core.files import expand_user
from runspec.core.models.config import CONFIG_NAME, ModelConfig
from runspec.core.models.family import load_config, parse_config
from runspec.core.spec.schema import RunSpec

_FOLDER = resources.files("runspec.core.models") / "named"


def model_config(spec: RunSpec, folder: Path = Path()) -> ModelConfig | None:
    """Return the shape of the spec's model; None if it is not known on this machine.

    Args:
        spec: names the model.
        folder: the base of a relative `model.hf` directory.

    Raises:
        UserError: a local config.json cannot be read, or its family is not supported.
    """
    shape, hf = spec.model.shape, spec.model.hf
    if shape is not None:
        fields: dict[str, Any] = shape.model_dump(mode="json", exclude_none=True)
        fields.setdefault("head_dim", shape.hidden_size // shape.num_attention_heads)
        # No window unless said: transformers assumes one for some families.
        fields |= {"max_position_embeddings": spec.model.max_context, "sliding_window": None}
        return parse_config(fields, place="model.shape")
    if hf is None:
        return None
    with suppress(OSError):  # the name of a repository may be no valid path
        directory = folder / expand_user(Path(hf))
        if (directory / CONFIG_NAME).is_file():
            return load_config(directory)
    return named_config(hf)


@cache
def named_config(hf: str) -> ModelConfig | None:
    """Return the shape of a model that ships with runspec; None for any other."""
    shape = named_model(hf)
    return None if shape is None else parse_config(shape, place=f"{hf}/config.json")


def model_names() -> list[str]:
    """Return the models whose shape ships with runspec, as `model.hf` names them."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return sorted(name[: -len(".json")].replace("--", "/") for name in files)


def named_model(name: str) -> dict[str, Any] | None:
    """Return the config.json of a model such as `Qwen/QwQ-32B`; None if it does not ship."""
    if name not in model_names():
        return None
    config: dict[str, Any] = json.loads((_FOLDER / f"{name.replace('/', '--')}.json").read_text())
    return config
