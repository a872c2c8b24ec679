"""Compares formulas by their values: rationals exactly, others at two precisions.

A formula with letters equals another if both have the same value wherever they are evaluated, as
in the lemma of Schwartz and Zippel. Two irrational values are equal if their difference shrinks
with the precision: a difference that stays is one, however small it is.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import comb, factorial
from typing import Any

import mpmath

from sampler.tasks.rewards.notation import UNITS, Node, Unreadable, is_name

MAX_BITS = 131_072
"""Of a numerator or denominator."""
MAX_WORK = 24 * MAX_BITS
"""Bits of all results of one evaluation."""
MAX_ARGUMENT = 1_000_000
"""Of functions whose cost grows with it."""
POINTS = 5
"""Where formulas with letters are evaluated; the letters are negative at the last two."""
_CONTEXTS = (mpmath.mp.clone(), mpmath.mp.clone())
_CONTEXTS[0].dps, _CONTEXTS[1].dps = 40, 80
_DIGITS = 6
"""Significant digits from which a decimal may stand for a value that it rounds."""
_LONG_DIGITS = 10
"""Significant digits from which a decimal may be a value that does not end."""
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc"}
_BY_NAME = _TRIGONOMETRIC | {"asin", "acos", "atan", "sinh", "cosh", "tanh", "exp"}
Value = Any
"""A Fraction, or a number of mpmath."""


def equal(ours: Node, theirs: Node) -> bool:
    """Whether two formulas say the same: lists in any order, tuples and matrices in theirs.

    Raises:
        Unreadable: a value cannot be computed, or is too large to.
    """
    named = [
        node.kind == "relation" and node.name == "=" and is_name(node.parts[0])
        for node in (ours, theirs)
    ]
    if all(named) and equal(ours.parts[1], theirs.parts[1]):
        return True
    if named[0] and theirs.kind != "relation":
        ours = ours.parts[1]
    if named[1] and ours.kind != "relation":
        theirs = theirs.parts[1]
    ours, theirs = _expanded(ours), _expanded(theirs)
    kinds = {ours.kind, theirs.kind}
    if "quantity" in kinds:
        return _same_quantities(ours, theirs)
    if kinds & {"list", "tuple", "matrix", "based", "relation"}:
        if len(kinds) > 1 or ours.name != theirs.name or len(ours.parts) != len(theirs.parts):
            return False
        if ours.kind == "list":
            left = list(theirs.parts)
            for item in ours.parts:
                match = next((k for k, other in enumerate(left) if equal(item, other)), None)
                if match is None:
                    return False
                del left[match]
            return True
        if ours.kind == "relation":
            return _same_relation(ours, theirs)
        return all(map(equal, ours.parts, theirs.parts))
    if ours.kind == theirs.kind == "percent":
        return same_value(ours.parts[0], theirs.parts[0])
    faces = [node.parts[0] for node in (ours, theirs) if node.kind == "percent"]
    if faces and same_value(faces[0], theirs if ours.kind == "percent" else ours):
        return True
    return same_value(ours, theirs)


def _expanded(node: Node) -> Node:
    """A formula with ± as the list of its two."""
    if all(part.kind not in ("pm", "mp") for part in node.every()):
        return node
    if node.kind in ("list", "tuple", "relation", "quantity"):
        return node
    return Node("list", (_signed(node, 1), _signed(node, -1)))


def _signed(node: Node, sign: int) -> Node:
    parts = tuple(_signed(part, sign) for part in node.parts)
    if node.kind in ("pm", "mp"):
        return Node("neg", parts) if (node.kind == "pm") == (sign < 0) else parts[0]
    return replace(node, parts=parts)


def _same_quantities(ours: Node, theirs: Node) -> bool:
    """With units of one kind as amounts; else a unit is not looked at."""
    (kind, amount), (other, theirs_amount) = _amount(ours), _amount(theirs)
    if kind and other:
        return kind == other and equal(amount, theirs_amount)
    if len(ours.name.split()) > 1 or len(theirs.name.split()) > 1:
        return False
    return equal(*(node.parts[0] if node.kind == "quantity" else node for node in (ours, theirs)))


def _amount(node: Node) -> tuple[str, Node]:
    if node.kind != "quantity":
        return "", node
    names = node.name.split()
    kinds = {UNITS[name][0] for name in names if name in UNITS}
    if len(kinds) != 1 or not all(name in UNITS for name in names):
        return "", node
    terms = (
        Node("*", (part, Node("number", value=Fraction(UNITS[name][1]))))
        for part, name in zip(node.parts, names, strict=True)
    )
    return kinds.pop(), Node("+", tuple(terms))


def _same_relation(ours: Node, theirs: Node) -> bool:
    """Whether the differences of both sides are each other's multiple, as 2x = 4 and x = 2."""
    relation = ours.name
    ours, theirs = (
        Node("+", (side.parts[0], Node("neg", side.parts[1:]))) for side in (ours, theirs)
    )
    try:
        at_zero = [Evaluation(_CONTEXTS[1], 0).of(node) for node in (ours, theirs)]
    except ZeroDivisionError:
        return False
    if not all(isinstance(value, Fraction) and value for value in at_zero):
        return False
    ratio = at_zero[0] / at_zero[1]
    if relation in ("<", "<=") and ratio < 0:
        return False
    return same_value(ours, Node("*", (Node("number", value=ratio), theirs)))


def same_value(ours: Node, theirs: Node) -> bool:
    """Whether two expressions have the same value.

    A decimal of six digits or more also stands for a value without end that it rounds or cuts off.

    Raises:
        Unreadable: a value cannot be computed, or is too large to.
    """
    letters = any(
        node.kind == "symbol" and node.name not in ("pi", "e", "i")
        for side in (ours, theirs)
        for node in side.every()
    )
    valid = 0
    for point in range(POINTS if letters else 1):
        try:
            pairs = [[Evaluation(mp, point).of(n) for n in (ours, theirs)] for mp in _CONTEXTS]
        except ZeroDivisionError:
            continue
        if point >= POINTS - 2 and any(
            not isinstance(value, Fraction) and mpmath.im(value) != 0 for value in pairs[1]
        ):
            continue
        valid += 1
        if (
            not _close(*pairs)
            and not _rounds(ours, theirs, pairs)
            and not _rounds(theirs, ours, [pair[::-1] for pair in pairs])
        ):
            return False
    return valid > 0


def _close(coarse: list[Value], fine: list[Value]) -> bool:
    if all(isinstance(value, Fraction) for value in fine):
        return bool(fine[0] == fine[1])
    distances = []
    for context, pair in zip(_CONTEXTS, (coarse, fine), strict=True):
        a, b = (_real(context, value) for value in pair)
        distances.append(abs(a - b))
        scale = max(abs(a), abs(b))
    return bool(distances[1] <= scale * 1e-70 or distances[1] <= distances[0] * 1e-30)


def _rounds(decimal: Node, value: Node, pairs: list[list[Value]]) -> bool:
    """Whether a written decimal is a value, which has no end, to all its digits."""
    while decimal.kind == "neg":
        decimal = decimal.parts[0]
    digits, other = decimal.name, value
    while other.kind == "neg":
        other = other.parts[0]
    if "." not in digits or len(digits.replace(".", "").lstrip("0")) < _DIGITS:
        return False
    if (
        other.kind == "number"
        and other.name
        and len(other.name.replace(".", "").lstrip("0")) < _LONG_DIGITS
    ):
        return False
    mp = _CONTEXTS[1]
    ours, theirs = (_real(mp, each) for each in pairs[1])
    unit = mp.mpf(10) ** -len(digits.partition(".")[2])
    if isinstance(theirs, mp.mpc) or ours * theirs <= 0:
        return False
    excess = (abs(theirs) - abs(ours)) / unit
    if not -0.5 <= excess < 1:
        return False
    exact = pairs[1][1]
    if other.name or not isinstance(exact, Fraction):
        return True
    # A decimal cannot write 1/3 in full: its denominator has other primes than 2 and 5.
    return 10 ** exact.denominator.bit_length() % exact.denominator != 0


def _real(context: Any, value: Value) -> Any:
    """As a number of a context."""
    if isinstance(value, Fraction):
        return context.mpf(value.numerator) / value.denominator
    return value


class Evaluation:
    """Values of formulas in one precision, with letters at one point, and a limit of the work."""

    def __init__(self, context: Any, point: int) -> None:
        self.mp = context
        self.point = point
        self.work = 0

    def of(self, node: Node) -> Value:
        """The value of an expression.

        Raises:
            Unreadable: it is none (an interval in a sum), or too large to compute.
            ZeroDivisionError: it has none at this point.
        """
        value = self._of(node)
        if isinstance(value, Fraction):
            self._counted(value)
        elif not self.mp.isfinite(value):
            raise ZeroDivisionError
        return value

    def _of(self, node: Node) -> Value:
        if node.kind == "number":
            return node.value
        if node.kind == "symbol":
            return self._symbol(node.name)
        if node.kind == "degree" or (
            node.kind in _TRIGONOMETRIC and node.parts[0].kind == "degree"
        ):
            inner = node.parts[0] if node.kind == "degree" else node.parts[0].parts[0]
            angle = self._as_real(self.of(inner)) * self.mp.pi / 180
            return angle if node.kind == "degree" else getattr(self.mp, node.kind)(angle)
        values = [self.of(part) for part in node.parts]
        match node.kind, values:
            case "+", _:
                return self._joined(values, operator.add)
            case "*", _:
                return self._joined(values, operator.mul)
            case "inverse", [a]:
                return 1 / a
            case "neg", [a]:
                return -a
            case "abs", [a]:
                return abs(a)
            case "percent", [a]:
                return a / 100
            case "^", [a, b]:
                return self._power(a, b)
            case "factorial" | "binom" | "floor" | "ceil", _:
                return self._whole(node.kind, values)
            case "sqrt", [a, *root]:
                return self._root(a, root[0] if root else Fraction(2))
            case "ln" | "log" | "lg", [a, *base]:
                return self._logarithm(node.kind, a, base)
            case name, [a] if name in _BY_NAME:
                x = self._as_real(a)
                if abs(x) > MAX_ARGUMENT:
                    raise Unreadable("an argument too large to compute")
                return getattr(self.mp, name)(x)
        raise Unreadable(f"a {node.kind} is no number")

    def _symbol(self, name: str) -> Value:
        if name in ("pi", "e"):
            return +getattr(self.mp, name)
        if name == "i":
            return self.mp.mpc(0, 1)
        seed = zlib.crc32(f"{self.point} {name}".encode())
        value = Fraction(seed % 1999 + 200, seed // 1999 % 97 + 701)
        return -value if self.point >= POINTS - 2 else value

    def _as_real(self, value: Value) -> Any:
        return _real(self.mp, value)

    def _joined(self, values: list[Value], operation: Callable[[Any, Any], Any]) -> Value:
        """A sum or a product: first of the rationals, then with the others."""
        exact = [value for value in values if isinstance(value, Fraction)]
        others = [value for value in values if not isinstance(value, Fraction)]
        total = exact[0] if exact else others.pop()
        for value in exact[1:]:
            total = self._counted(operation(total, value))
        for value in others:
            total = operation(self._as_real(total), value)
        return total

    def _counted(self, value: Fraction) -> Fraction:
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        self.work += bits
        if bits > MAX_BITS or self.work > MAX_WORK:
            raise Unreadable("a number too large to compute")
        return value

    def _power(self, a: Value, b: Value) -> Value:
        if isinstance(b, Fraction) and b.denominator == 1 and isinstance(a, Fraction):
            bits = max(a.numerator.bit_length(), a.denominator.bit_length())
            if abs(b) * (bits if abs(a) != 1 else 0) > MAX_BITS:
                raise Unreadable("a power too large to compute")
            return a ** (int(b) % 2 if abs(a) == 1 else int(b))
        x, y = self._as_real(a), self._as_real(b)
        if x == 0:
            if self.mp.re(y) <= 0:
                raise ZeroDivisionError
            return Fraction(0)
        if abs(y * self.mp.log(x)) > MAX_ARGUMENT:
            raise Unreadable("a power too large to compute")
        return self.mp.power(x, y)

    def _root(self, a: Value, degree: Value) -> Value:
        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree <= 100:
            return self._power(a, 1 / degree)
        x, n = self._as_real(a), int(degree)
        if n % 2 and not isinstance(x, self.mp.mpc) and x < 0:
            return -self.mp.root(-x, n)
        return self.mp.root(x, n)

    def _logarithm(self, name: str, a: Value, base: list[Value]) -> Value:
        if name == "lg":
            base = [Fraction(10)]
        x = self._as_real(a)
        if x == 0:
            raise ZeroDivisionError
        return self.mp.log(x) / (self.mp.log(self._as_real(base[0])) if base else 1)

    def _whole(self, name: str, values: list[Value]) -> Value:
        """Functions of whole numbers, and those that make them."""
        if name in ("floor", "ceil"):
            x = values[0] if isinstance(values[0], Fraction) else self.mp.re(values[0])
            if abs(x) > 10**30:
                raise Unreadable("an argument too large to compute")
            return Fraction(int(self.mp.floor(x) if name == "floor" else self.mp.ceil(x)))
        if not all(isinstance(v, Fraction) and v.denominator == 1 for v in values):
            raise Unreadable("a factorial of no whole number")
        n, k = int(values[0]), int(values[-1])
        if not 0 <= k <= n <= 8000:
            raise Unreadable("a factorial too large to compute")
        return Fraction(factorial(n) if name == "factorial" else comb(n, k))
