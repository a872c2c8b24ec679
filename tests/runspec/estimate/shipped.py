"""Shipped specs with a few values changed, and their model's shape."""

from __future__ import annotations

from pathlib import Path

from runspec.core.models.config import ModelConfig
from runspec.core.models.of_spec import model_config
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec

SPECS = Path(__file__).parents[3] / "specs"


def shipped(*overrides: str, profile: str | None = None) -> tuple[RunSpec, ModelConfig]:
    """`specs/target_long.yaml` and its shape."""
    files = SpecFiles(SPECS / "target_long.yaml", profile=profile, overrides=list(overrides))
    spec = check_spec(files).spec
    assert spec is not None
    config = model_config(spec)
    assert config is not None
    return spec, config
