"""Shipped specs with a few values changed, and their model's shape."""

from __future__ import annotations

from runspec.core.models.config import ModelConfig
from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec
from tests.runspec.core.spec.spec_files import SPECS, load


def shipped(*overrides: str, profile: str | None = None) -> tuple[RunSpec, ModelConfig]:
    """`specs/target_long.yaml` and its shape."""
    spec = load(SPECS / "target_long.yaml", *overrides, profile=profile).spec
    assert spec is not None
    config = model_config(spec)
    assert config is not None
    return spec, config
