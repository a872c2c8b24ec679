"""Whether what a program printed or returned is what was expected."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

_MAX_NUMBER_CHARS = 400


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Line by line, blanks at the ends of lines and of the whole left out.

    Lines also match where all their words are numbers of the same values (1.0 and 1.00), which
    may differ by `tolerance`, relative or absolute.
    """
    ours, theirs = (text.strip().splitlines() for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        a.strip() == b.strip() or _same_numbers(a.split(), b.split(), tolerance)
        for a, b in zip(ours, theirs, strict=True)
    )


def same_value(returned: Any, expected: Any, tolerance: float) -> bool:
    """Plain data, tuples as lists; an expected list of one may stand for its element (APPS).

    Expected data comes from JSON, so keys of its objects are compared as texts.
    """
    ours, theirs = _as_json(returned), _as_json(expected)
    if _equal(ours, theirs, tolerance):
        return True
    return isinstance(theirs, list) and len(theirs) == 1 and _equal(ours, theirs[0], tolerance)


def _same_numbers(ours: list[str], theirs: list[str], tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a == b:
            continue
        if max(len(a), len(b)) > _MAX_NUMBER_CHARS:
            return False
        try:
            left, right = Decimal(a), Decimal(b)
            if left == right:
                continue
            if not tolerance or not math.isclose(
                float(left), float(right), rel_tol=tolerance, abs_tol=tolerance
            ):
                return False
        except (InvalidOperation, OverflowError):
            return False
    return True


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


def _equal(ours: Any, theirs: Any, tolerance: float) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(
            _equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            _equal(ours[key], theirs[key], tolerance) for key in theirs
        )
    if tolerance and isinstance(ours, float) and isinstance(theirs, (int, float)):
        return math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance)
    return bool(ours == theirs)
