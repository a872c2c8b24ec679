r"""The signs of formulas: Unicode, LaTeX and plain text become tokens of one kind; and their tree.

`√3/2`, `\\frac{\\sqrt{3}}{2}` and `sqrt(3)/2` differ behind this module only in their brackets.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

FUNCTIONS = frozenset({
    "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "ln", "log", "lg", "exp", "abs", "floor", "ceil",
})  # fmt: skip
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNITS = {
    "time": "s sec second 1; min minute 60; h hr hour 3600; day 86400; week 604800",
    "length": "mm millimeter 10; cm centimeter 100; m meter metre 10000; km kilometer 10000000;"
    " in inch inches 254; ft foot feet 3048; yd yard 9144; mi mile 16093440",
    "mass": "mg 1; g gram 1000; kg kilogram 1000000",
    "weight": "oz ounce 1; lb lbs pound 16",
    "money": "cent ¢ 1; $ dollar 100",
    "€": "€ euro 1",
    "£": "£ 1",
    "¥": "¥ yen 1",
}
UNITS = {
    name: (kind, int(row.split()[-1]))
    for kind, rows in _UNITS.items()
    for row in rows.split(";")
    for word in row.split()[:-1]
    for name in ((word,) if len(word) < 3 else (word, word + "s"))
}
"""Units by name: what they measure, and their size in its smallest unit."""
CURRENCIES = "$€£¥₹₽₩¢"
SYMBOLS = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "rho", "sigma",
    "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Omega", "Phi", "pi", "infty",
    "emptyset", "varnothing", "ell",
})  # fmt: skip
_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=",
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "lvert": "|", "rvert": "|", "vert": "|",
    "circ": "°", "degree": "°", "langle": "(", "rangle": ")", "varnothing": "emptyset",
    "inf": "infty", "infinity": "infty", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "dbinom": "binom", "tbinom": "binom", "colon": ":",
}  # fmt: skip
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014", "-"),
        **dict.fromkeys("\u22c5\u00b7\u2219", r"\cdot "), **dict.fromkeys("\u2009\u202f", r"\,"),
        **dict.fromkeys("\u2044\u2215\u00f7", "/"), **dict.fromkeys("\u2032\u2019", "'"),
        "\u00d7": r"\times ", "\u221a": r"\sqrt ", "\u221b": r"\sqrt[3]", "\u221e": r"\infty ",
        "\u2264": "<=", "\u2265": ">=", "\u2260": "!=", "\u222a": r"\cup ", "\u2208": r"\in ",
        "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u2248": r"\approx ", "\u00b0": r"\degree ",
        "\u2026": r"\ldots ", "\u2205": r"\emptyset ", "\u200b": "", "\ufeff": "",
    }
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-()n0123456789")
_FONT = re.compile(
    r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mathbb|mbox|operatorname|boldsymbol)"
    r"\s*\{([^{}]*)\}"
)
_SIZE = re.compile(r"\\(?:left|right|bigl?r?|Bigl?r?|biggl?r?|Biggl?r?|displaystyle)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:(?:,\\!|\{,\}|\\[,!])\d{3})+(?!\d)")
_NUMBER = r"(?:(?:{}\d+)(?:\.\d+|\.(?=\\(?:overline|bar)(?![A-Za-z])))?|\.\d+)"
_REPEATING = r"(?:\\(?:overline|bar)\s*(?:\{\s*\d+\s*\}|\d))?(?:[eE][-+]?\d{1,7}(?![\w.]))?"
_REST = (
    r"|\\(?P<command>[A-Za-z]+)|(?P<escaped>\\[\\{}%|" + CURRENCIES + r"])|(?P<word>[A-Za-z]+)"
    r"|(?P<mark>\*\*|<=|>=|!=|[-+*/^_=<>()\[\]{}|,;:!%&'¢" + CURRENCIES + r"])"
)
_TOKEN, _TOKEN_IN_BRACKETS = (
    re.compile(rf"\s*(?:(?P<number>{_NUMBER.format(group)}{_REPEATING}){_REST})")
    for group in (r"\d{1,3}(?:,\d{3})+(?!\d)|", "")
)


class Unreadable(Exception):
    """A text that is no formula, or one over the limits; the message says why."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    spaced: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a formula: an operation (`+ * ^ neg inverse` or a function), "number", "symbol",
    "list", "tuple" (`name` its brackets), "matrix" (`name` its columns), "relation", "quantity"
    (`name` the units of the parts), "percent", "degree" or "based" (`name` digits and base)."""

    kind: str
    parts: tuple[Node, ...] = ()
    name: str = ""
    """Of a number with a decimal point: as it was written."""
    value: Fraction = Fraction(0)

    def every(self) -> Iterator[Node]:
        """This part and all parts of it."""
        yield self
        for part in self.parts:
            yield from part.every()


def is_name(node: Node) -> bool:
    """Whether this names what follows: x, AB, f(x), a_1."""
    if node.kind == "symbol":
        return node.name not in ("pi", "e", "i", "infty")
    if node.kind != "*" or node.parts[0].kind != "symbol":
        return False
    if node.parts[-1].name.startswith("angle"):
        return True
    upper = all(part.kind == "symbol" and part.name.isupper() for part in node.parts)
    return upper or node.parts[0].name in ("f", "g", "h", "P", "p")


def plain(text: str) -> str:
    r"""A text without fonts, sizes and thousands separators, its Unicode signs as LaTeX:
    `\textbf{2}√3` is `2 \sqrt 3`. Blanks that separate stay."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: f"_{{{m[0].translate(_RAISED)}}}", text)
    text = "".join(map(_letter, text)).translate(_SIGNS)
    text = re.sub(r"\.{3,}", r"\\ldots ", unicodedata.normalize("NFKC", text))
    for _ in range(4):
        text = _FONT.sub(r" \1 ", text)
    text = _THOUSANDS.sub(lambda m: re.sub(r"[^\d]", "", m[0]), _SIZE.sub("", text))
    return re.sub(r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\s", " ", text)


def _letter(char: str) -> str:
    if "¼" <= char <= "¾" or "⅐" <= char <= "⅞":
        above, _, below = unicodedata.normalize("NFKC", char).partition("\u2044")
        return rf"\frac{{{above}}}{{{below}}}"
    if "α" <= char <= "ω":
        return f"\\{unicodedata.name(char).split()[-1].lower()} "
    return char


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a plain text.

    Raises:
        Unreadable: at the first character that belongs to none.
    """
    position, depth = 0, 0
    text = text.rstrip()
    while position < len(text):
        found = (_TOKEN_IN_BRACKETS if depth else _TOKEN).match(text, position)
        if found is None:
            raise Unreadable(f"{text[position : position + 10].strip()!r} is not understood")
        kind = found.lastgroup or ""
        start, position = found.end() - len(found[0].lstrip()), found.end()
        word = found[kind]
        if kind == "escaped":
            kind, word = "mark", word if word[1] in "{}\\" else word[1]
        if kind == "command" or word in ("inf", "infinity", "arcsin", "arccos", "arctan"):
            word = _SAME.get(word, word)
            kind = "command" if word.isalpha() else "mark"
        depth += (word in ("(", "[", "\\{")) - (word in (")", "]", "\\}"))
        yield Token(kind, word, start > found.start(), start, position)
