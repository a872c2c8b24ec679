"""The model's shape, from what is at hand: the spec, a local config.json, or a named shape."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from runspec.core.models.config import CONFIG_NAME, ModelConfig, load_config, parse_config
from runspec.core.models.named_models import named_model
from runspec.core.spec.schema import RunSpec


def model_config(spec: RunSpec, folder: Path = Path()) -> ModelConfig | None:
    """The shape of the spec's model; None where nothing here knows it.

    Args:
        spec: names the model.
        folder: where a relative `model.hf` directory starts from.

    Raises:
        UserError: a local config.json that cannot be read, or a model that is no decoder of ours.
    """
    shape, hf = spec.model.shape, spec.model.hf
    if shape is not None:
        fields: dict[str, Any] = shape.model_dump(mode="json", exclude_none=True)
        fields |= {"max_position_embeddings": spec.model.max_context, "sliding_window": None}
        return parse_config(fields, place="model.shape")
    if hf is None:
        return None
    with suppress(OSError):  # a name that can be no path
        if (folder / hf / CONFIG_NAME).is_file():
            return load_config(folder / hf)
    return named_config(hf)


@cache
def named_config(hf: str) -> ModelConfig | None:
    """The shape of a model that ships with runspec; None for any other."""
    shape = named_model(hf)
    return None if shape is None else parse_config(shape, place=f"{hf}/config.json")
