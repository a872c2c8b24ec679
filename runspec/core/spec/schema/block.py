"""The base of every map of the spec."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from runspec.core.spec.fields import ChangeClass

FloatType = Literal["float32", "bfloat16"]


class Block(BaseModel):
    """A map of the spec: frozen, strict about types, closed to unknown keys.

    Every field has a docstring under it, which `runspec explain` and the JSON Schema show.
    """

    # Built with RunSpec, once: importing is what a cold `runspec lint` spends most time on. For the
    # same reason docstrings are read from the source when they are asked for (`field_docs`).
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )

    CHANGE: ClassVar[ChangeClass] = "newrun"
    """Change class of its fields that do not name their own."""
