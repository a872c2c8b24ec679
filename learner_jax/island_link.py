"""How an island of a run finds the others: names, addresses and files, from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
