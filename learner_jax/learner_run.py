"""One run as each process of its learner sees it, and how an island of it finds the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from learner_jax.distributed import Peers
from learner_jax.metrics import Rows
from runspec.core.files import Folder
from runspec.core.models import ModelConfig
from runspec.core.process import root_public_key
from runspec.core.run_files import corpus_cache, outer_folder, params_folder, state_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import island_names, island_spec


@dataclass(frozen=True)
class IslandLink:
    """One island of a run."""

    name: str
    """Its name in `learner.islands.members`."""
    coordinator: str = ""
    """URL of the coordinator. This and what follows is known to process 0 of the island alone."""
    key: Path = Path()
    """File of the key that signs its shares; roles.json names the public half."""
    share_url: str = ""
    """URL at which the other islands reach its server of shares."""
    share_store: Path = Path()
    """Folder that this server serves."""
    weights: tuple[str, ...] = ()
    """URLs of relays and origin, from which an island elsewhere gets version 0."""
    root_public_key: str | None = None
    """The pinned root key; None in the run directory, which has it."""


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
    """Fingerprint of this program (`learner_jax.versions`)."""
    peers: Peers
    """The processes of the learner."""
    log: logging.Logger
    link: IslandLink | None = None
    """Which island of the run this program is; None for a run with one learner."""
    rows: Rows = field(default_factory=Rows)
    """Takes each row of metrics.jsonl, in process 0."""

    @property
    def island(self) -> str | None:
        """Name of this island."""
        return None if self.link is None else self.link.name

    @cached_property
    def own(self) -> RunSpec:
        """The spec by which this program trains: `spec`, or an island's part of it."""
        return self.spec if self.link is None else island_spec(self.spec, self.link.name)

    @property
    def trunk(self) -> bool:
        """Whether this program's folder is the run directory: it writes the versions."""
        return self.island is None or self.island == island_names(self.spec)[0]

    @property
    def params(self) -> Folder:
        """Folder of the parameters of versions, until they are published."""
        return params_folder(self.folder, self.spec, self._apart)

    @property
    def states(self) -> Folder:
        """Folder of this learner's full states."""
        return state_folder(self.folder, self.spec, self._apart)

    @property
    def corpus_cache(self) -> Path:
        """Cache of tokenized documents, which the run's islands on one machine share."""
        return corpus_cache(self.folder if self.trunk else outer_folder(self.folder))

    @property
    def _apart(self) -> str | None:
        """Name of an island that does not share the run's folders."""
        return None if self.trunk else self.island

    def root_public_key(self) -> str:
        """The public key that the run's roles are signed with."""
        given = None if self.link is None else self.link.root_public_key
        return given or root_public_key(self.folder, self.spec)
