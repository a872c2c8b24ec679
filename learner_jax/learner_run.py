"""What the parts of a learner's process share: the run, its mesh and its processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from learner_jax.distributed import Peers
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec


@dataclass(frozen=True)
class LearnerRun:
    """One run, as each process of its learner sees it."""

    folder: Path
    """The run directory."""
    spec: RunSpec
    """As resolved."""
    config: ModelConfig
    """The model's shape."""
    mesh: Mesh
    fingerprint: dict[str, Any]
    """Of this program (`learner_jax.fingerprint`)."""
    peers: Peers
    """The processes of the learner."""
    log: logging.Logger
