"""Scalar types of the spec: durations, sizes, rates, names, environment variables, public keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import ip_network
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from runspec.core.spec.fields import Unit

_NUMBER = r"[0-9]{1,32}(?:\.[0-9]{1,40})?"
_QUANTITY = re.compile(rf"({_NUMBER}) ?([A-Za-z/]{{1,6}})")


class UnitError(ValueError):
    """An amount without a unit, or with one that it cannot have."""


@dataclass(frozen=True)
class Quantity:
    """A kind of amount that is written with a unit."""

    kind: str
    examples: str
    units: Mapping[str, float]
    last: str
    """The unit of amounts that are a whole number of none."""

    @property
    def pattern(self) -> str:
        """What an amount looks like, as editors check it."""
        return f"^{_NUMBER} ?({'|'.join(self.units)})$"

    def parse(self, value: Any) -> float:
        """The amount in the unit of size 1.

        Raises:
            ValueError: a bare number (its unit would be a guess), nothing at all, or other text.
        """
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2] not in self.units:
            raise UnitError(f"a {self.kind} with a unit was expected, like {self.examples}")
        amount = float(Decimal(match[1]) * Decimal(repr(self.units[match[2]])))
        if amount == 0.0:
            raise ValueError(f"a {self.kind} above zero was expected")
        return amount

    def format(self, amount: float) -> str:
        """The shortest text that `parse` reads back exactly.

        In the largest unit of which `amount` is a whole number; else all digits in `last`.
        """
        for unit, size in sorted(self.units.items(), key=lambda item: -item[1]):
            if amount >= size and amount % size == 0:
                return f"{amount / size:.0f}{unit}"
        # In decimals, which divide by a power of ten exactly; and never as 1e-7.
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
    """An address, or a range of them whose host bits are zero."""
    ip_network(value)
    return value


_network = AfterValidator(_check_network)


def _written(quantity: Quantity) -> BeforeValidator:
    text = Annotated[str, Field(pattern=quantity.pattern)]
    return BeforeValidator(quantity.parse, json_schema_input_type=text)


Duration = Annotated[
    float,
    _written(DURATION),
    PlainSerializer(DURATION.format),
    Unit("seconds, written with a unit"),
]
Size = Annotated[
    float, _written(SIZE), PlainSerializer(SIZE.format), Unit("bytes, written with a unit")
]
Rate = Annotated[
    float, _written(RATE), PlainSerializer(RATE.format), Unit("bits a second, written with a unit")
]
NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
NAME_WORDS = "1 to 63 characters of a-z, 0-9, - and _, of which the first is a letter or digit"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
StorageQuantity = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$")]
DatabaseUrl = Annotated[
    str, Field(pattern=r"^postgresql://([^:@/]+@)?[^@]*/[^/@?]+(\?host=[^&]+)?$")
]
AddressRange = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$"), _network]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Reached = Annotated[float, Field(ge=1e-6, le=1.0), Unit("of the peak")]
Positive = Annotated[float, Field(gt=0.0)]
Speed = Annotated[float, Field(ge=1e6, le=1e24)]
"""Of hardware, FLOP/s or bytes/s."""
NonNegative = Annotated[float, Field(ge=0.0)]
Nats = Annotated[NonNegative, Unit("nats")]
Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Tokens = Annotated[Count, Unit("tokens")]
Updates = Annotated[Count, Unit("optimizer updates")]
Steps = Annotated[Count, Unit("rollout steps")]
Rollouts = Annotated[Count, Unit("rollouts")]
Groups = Annotated[Count, Unit("groups")]
Devices = Annotated[Count, Unit("devices")]
Processes = Annotated[int, Field(gt=0, le=10_000), Unit("processes")]
ProcessesOrNone = Annotated[int, Field(ge=0, le=10_000), Unit("processes")]
"""Bounded, for every one of them gets a name."""
