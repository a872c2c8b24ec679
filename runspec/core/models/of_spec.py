"""The model's shape, from what is at hand: the spec, a local config.json, or a named shape."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.models.config import MAX_BYTES, ModelConfig, parse_config
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
    local = folder / hf / "config.json"
    try:
        if not local.is_file():
            return _named(hf)
        data = parse_object(read_bounded(local, MAX_BYTES), max_bytes=MAX_BYTES)
    except (OSError, MalformedJson) as error:
        raise UserError(f"no model config: {error}", place=str(local)) from error
    return parse_config(data, place=str(local))


@cache
def _named(hf: str) -> ModelConfig | None:
    shape = named_model(hf)
    return None if shape is None else parse_config(shape, place=f"{hf}/config.json")
