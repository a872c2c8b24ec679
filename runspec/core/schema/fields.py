"""Building blocks of the schema: base class of its maps, marks on fields, scalar types.

Marks (unit, change class, site) are written into annotations: `Annotated[Count, Unit("tokens")]`.
pydantic keeps metadata that it does not know. Scalar types are durations, sizes, rates, names,
environment variables and public keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import ip_network
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

ChangeClass = Literal["hot", "rolling", "restart", "newrun"]

CHANGE_CLASSES: dict[ChangeClass, str] = {
    "hot": "taken over while every role goes on",
    "rolling": "the roles that read it are started again one by one; the learner goes on",
    "restart": "the run stops, and goes on from its newest checkpoint with the new value",
    "newrun": "it changes what is learned, or what the run stands on: it takes another run once a "
    "step is trained",
}
"""Mildest first; a change is as severe as its severest field."""

FloatType = Literal["float32", "bfloat16"]
_NUMBER = r"[0-9]{1,32}(?:\.[0-9]{1,40})?"
_QUANTITY = re.compile(rf"({_NUMBER}) ?([A-Za-z/]{{1,6}})")


@dataclass(frozen=True)
class Unit:
    """Unit of a number."""

    name: str


@dataclass(frozen=True)
class Change:
    """Effect of changing the field on an existing run."""

    kind: ChangeClass


@dataclass(frozen=True)
class Site:
    """Mark of a field that a `kind: Placement` file may set: where a run works, not what it learns.

    On a field that holds a block or a list of blocks, it covers everything inside.
    """


HOT, ROLLING, RESTART, NEWRUN = (Change(kind) for kind in CHANGE_CLASSES)
SITE = Site()


class Block(BaseModel):
    """Base class of every map of the spec: frozen, strict types, no unknown keys.

    Every field has a docstring under it, which `runspec explain` and the JSON Schema show.
    """

    # Built once, with RunSpec: a cold `runspec lint` spends most of its time on imports. For the
    # same reason docstrings are read from the source on demand (`field_docs`).
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )

    CHANGE: ClassVar[ChangeClass] = "newrun"
    """Change class of its fields that do not name their own."""


class UnitError(ValueError):
    """Error: an amount has no unit, or a unit of another kind."""


@dataclass(frozen=True)
class Quantity:
    """A kind of amount that is written with a unit."""

    kind: str
    examples: str
    units: Mapping[str, float]
    last: str
    """Unit for amounts that are not a whole number of any unit."""

    @property
    def pattern(self) -> str:
        """Return the regular expression of an amount, for editors."""
        return f"^{_NUMBER} ?({'|'.join(self.units)})$"

    def parse(self, value: Any) -> float:
        """Return the amount in the unit of size 1.

        Raises:
            ValueError: a bare number (its unit would be a guess), zero, or other text.
        """
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in self.units:
            raise UnitError(f"a {self.kind} with a unit was expected, like {self.examples}")
        amount = float(Decimal(match[1]) * Decimal(repr(self.units[match[2]])))
        if amount == 0.0:
            raise ValueError(f"a {self.kind} above zero was expected")
        return amount

    def format(self, amount: float) -> str:
        """Return the shortest text that `parse` reads back exactly.

        The unit is the largest of which `amount` is a whole number, else `last`.
        """
        for unit, size in sorted(self.units.items(), key=lambda item: -item[1]):
            if amount >= size and amount % size == 0:
                return f"{amount / size:.0f}{unit}"
        # Decimals divide by a power of ten exactly, and are never written as 1e-7.
        return f"{Decimal(repr(amount)) / Decimal(repr(self.units[self.last])):f}{self.last}"


DURATION = Quantity(
    "duration",
    "500ms, 60s, 90m, 1.5h or 2d",
    {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
    "s",
)
_SIZES = {"B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
SIZE = Quantity("size", "80GB, 16MiB or 512B", _SIZES | {"TB": 10**12, "TiB": 2**40}, "B")
_RATES = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}
RATE = Quantity("rate", "590Mbit/s, 10Gbit/s or 50MB/s", _RATES, "kbit/s")


def _check_network(value: str) -> str:
    """Check an address, or a range of addresses whose host bits are zero."""
    ip_network(value)
    return value


def _written(quantity: Quantity) -> BeforeValidator:
    text = Annotated[str, Field(pattern=quantity.pattern)]
    return BeforeValidator(quantity.parse, json_schema_input_type=text)


_TIME, _BYTES, _BITS_S = (
    Unit(f"{unit}, written with a unit") for unit in ("seconds", "bytes", "bits a second")
)
Duration = Annotated[float, _written(DURATION), PlainSerializer(DURATION.format), _TIME]
Size = Annotated[float, _written(SIZE), PlainSerializer(SIZE.format), _BYTES]
Rate = Annotated[float, _written(RATE), PlainSerializer(RATE.format), _BITS_S]
NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
NAME_WORDS = "1 to 63 characters of a-z, 0-9, - and _, of which the first is a letter or digit"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
StorageQuantity = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$")]
DatabaseUrl = Annotated[
    str, Field(pattern=r"^postgresql://([^:@/]+@)?[^@]*/[^/@?]+(\?host=[^&]+)?$")
]
AddressRange = Annotated[
    str, Field(pattern=r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$"), AfterValidator(_check_network)
]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Reached = Annotated[float, Field(ge=1e-6, le=1.0), Unit("of the peak")]
Positive = Annotated[float, Field(gt=0.0)]
Speed = Annotated[float, Field(ge=1e6, le=1e24)]
"""Speed of hardware, in FLOP/s or bytes/s."""
NonNegative = Annotated[float, Field(ge=0.0)]
Nats = Annotated[NonNegative, Unit("nats")]
Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Tokens = Annotated[Count, Unit("tokens")]
Updates = Annotated[Count, Unit("optimizer updates")]
Steps = Annotated[Count, Unit("steps")]
Rollouts = Annotated[Count, Unit("rollouts")]
Groups = Annotated[Count, Unit("groups")]
Devices = Annotated[Count, Unit("devices")]
Processes = Annotated[int, Field(gt=0, le=10_000), Unit("processes")]
ProcessesOrNone = Annotated[int, Field(ge=0, le=10_000), Unit("processes")]
"""Number of processes; it is bounded because each process gets a name."""
