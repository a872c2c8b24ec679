"""Scalar types of the spec: durations, sizes, rates, names, environment variables, public keys."""

from __future__ import annotations

import re
from decimal import Decimal
from ipaddress import ip_network
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from runspec.core.spec.fields import Unit

_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
_SIZES |= {"TB": 10**12, "TiB": 2**40}
_RATES = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}
_NUMBER = r"[0-9]{1,32}(?:\.[0-9]{1,40})?"
_QUANTITY = re.compile(rf"({_NUMBER}) ?([A-Za-z/]{{1,6}})")


class UnitError(ValueError):
    """An amount without a unit, or with one that it cannot have."""


def _quantity(value: Any, units: dict[str, Any], kind: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise UnitError(f"a {kind} with a unit was expected, like {examples}")
    amount = float(Decimal(match[1]) * Decimal(repr(units[match[2]])))
    if amount == 0.0:
        raise ValueError(f"a {kind} above zero was expected")
    return amount


def _shortest(amount: float, units: dict[str, Any], last: str) -> str:
    """The largest unit of which `amount` is a whole number; else all digits in `last`."""
    for unit, size in sorted(units.items(), key=lambda item: -item[1]):
        if amount >= size and amount % size == 0:
            return f"{amount / size:.0f}{unit}"
    # In decimals, which divide by a power of ten exactly; and never as 1e-7.
    return f"{Decimal(repr(amount)) / Decimal(repr(units[last])):f}{last}"


def _pattern(units: dict[str, Any]) -> str:
    """What a quantity looks like, as editors check it."""
    return f"^{_NUMBER} ?({'|'.join(units)})$"


def parse_duration(value: Any) -> float:
    """Seconds from `500ms`, `60s`, `90m`, `1.5h` or `2d`.

    Raises:
        ValueError: a bare number (its unit would be a guess), no time at all, or any other text.
    """
    return _quantity(value, _TIMES, "duration", "500ms, 60s, 90m, 1.5h or 2d")


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads back exactly."""
    return _shortest(seconds, _TIMES, "s")


def parse_size(value: Any) -> float:
    """Bytes from `80GB`, `16MiB` or `512B`; decimal and binary units are what they say.

    Raises:
        ValueError: a bare number, none at all, or any other text.
    """
    return _quantity(value, _SIZES, "size", "80GB, 16MiB or 512B")


def format_size(size: float) -> str:
    """The shortest text that `parse_size` reads back exactly."""
    return _shortest(size, _SIZES, "B")


def parse_rate(value: Any) -> float:
    """Bits a second from `590Mbit/s`, `10Gbit/s` or `50MB/s`.

    Raises:
        ValueError: a bare number, none at all, or any other text.
    """
    return _quantity(value, _RATES, "rate", "590Mbit/s, 10Gbit/s or 50MB/s")


def format_rate(bits_s: float) -> str:
    """The shortest text that `parse_rate` reads back exactly."""
    return _shortest(bits_s, _RATES, "kbit/s")


def _check_network(value: str) -> str:
    """An address, or a range of them whose host bits are zero."""
    ip_network(value)
    return value


_network = AfterValidator(_check_network)


def _text(units: dict[str, Any]) -> Any:
    return Annotated[str, Field(pattern=_pattern(units))]


Duration = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=_text(_TIMES)),
    PlainSerializer(format_duration, return_type=str),
    Unit("seconds, written with a unit"),
]
Size = Annotated[
    float,
    BeforeValidator(parse_size, json_schema_input_type=_text(_SIZES)),
    PlainSerializer(format_size, return_type=str),
    Unit("bytes, written with a unit"),
]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate, json_schema_input_type=_text(_RATES)),
    PlainSerializer(format_rate, return_type=str),
    Unit("bits a second, written with a unit"),
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
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
