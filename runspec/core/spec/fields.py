"""What a field of the schema says of itself beside its type: unit, change class, whose it is.

Written into annotations (`Annotated[Count, Unit("tokens")]`); pydantic keeps what it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ChangeClass = Literal["hot", "rolling", "restart", "newrun"]

CHANGE_CLASSES: dict[ChangeClass, str] = {
    "hot": "taken over while every role goes on",
    "rolling": "the roles that read it are started again one by one; the learner goes on",
    "restart": "the run stops, and goes on from its newest checkpoint with the new value",
    "newrun": "it changes what is learned, or what the run stands on: it takes another run once a "
    "step is trained",
}
"""Mildest first; a change is as severe as its severest field."""


@dataclass(frozen=True)
class Unit:
    """What a number counts."""

    name: str


@dataclass(frozen=True)
class Change:
    """What changing the field does to a run that exists."""

    kind: ChangeClass


@dataclass(frozen=True)
class Site:
    """The field says where and with what, not what is learned: a `kind: Placement` file may set it.

    On a field that holds a block or a list of blocks, all of it.
    """


HOT, ROLLING, RESTART, NEWRUN = (Change(kind) for kind in CHANGE_CLASSES)
SITE = Site()
