r"""Reads a formula by a bounded grammar: LaTeX, plain text and Unicode become one tree.

No text is evaluated as code, and what the grammar does not know is refused as a whole, so that no
part of a text (`3` of `(-∞, 3)`, `56` of `5 or 6`) is taken for all of it.

    whole     item {(","|";"|"and"|"or"|"\cup") item}             a list, in any order
    item      [name "="] quantity {("="|"<"|"\in"|"\approx"|...) quantity}
    quantity  sum [unit] {number unit}
    sum       product {("+"|"-"|"\pm") product}
    product   power {["*"|"/"|"\cdot"|...] power | "%" | "million"}
    power     atom {"!"|"°"} ["^" power]
    atom      number | mixed number | symbol | function | "(" whole ")" | "|" sum "|" | matrix
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from sampler.tasks.rewards import notation
from sampler.tasks.rewards.notation import Node, Token, Unreadable, is_name, plain, tokens

MAX_CHARS = 1024
MAX_DIGITS = 400
MAX_DEPTH = 40
MAX_ITEMS = 32
MAX_EXPONENT = 30_000
"""Largest power of ten of a number in E notation."""
_PARTS = re.compile(
    r"(?P<whole>[\d,.]+)(?:\\[a-z]+[\s{]*(?P<again>\d+)[\s}]*)?(?:[eE](?P<power>[-+]?\d+))?"
)
_ATOMS = frozenset({"frac", "binom", "lfloor", "lceil", "begin", "angle", "triangle"})
_COMMANDS = _ATOMS | notation.SYMBOLS | notation.FUNCTIONS
_SIGN = {"-": "neg"}
_RELATIONS = ("=", "<", ">", "<=", ">=", "!=", "approx", "in", "equiv")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def parse(text: str) -> Node:
    """Read a whole text as one formula.

    Raises:
        Unreadable: it is none, or over the limits.
    """
    text = re.sub(r"(?<!\.)[.,;:]$", "", plain(text).strip()).strip()
    if len(text) > MAX_CHARS:
        raise Unreadable(f"{len(text)} characters")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    reader = _Reader([*tokens(text)])
    node = reader.whole()
    if reader.position < len(reader.tokens):
        raise Unreadable(f"{reader.tokens[reader.position].text!r} is not understood")
    return node


class _Reader:
    """Recursive descent over the tokens of one text."""

    def __init__(self, given: list[Token]) -> None:
        self.tokens = given
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> Token:
        place = self.position + ahead
        return self.tokens[place] if place < len(self.tokens) else Token("end", "", False, 0, 0)

    def next(self) -> Token:
        token = self.peek()
        self.position += 1
        return token

    def take(self, *texts: str) -> str:
        """The next token if it is one of these, else an empty text."""
        if self.peek().text in texts and self.peek().kind != "number":
            return self.next().text
        return ""

    def want(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"{text!r} is missing")

    def nested(self, read: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        node = read()
        self.depth -= 1
        return node

    def whole(self) -> Node:
        items = [self.item()]
        while self.take(",", ";", "and", "or", "cup", "union"):
            self.take("and", "or")
            items.append(self.item())
        if len(items) > MAX_ITEMS:
            raise Unreadable(f"{len(items)} items")
        return _joined("list", items)

    def item(self) -> Node:
        """A value, with its units, or a relation between several."""
        ahead = 0
        while self.peek(ahead).kind == "word" and self.peek(ahead).text not in notation.FUNCTIONS:
            ahead += 1
        if ahead and self.peek(ahead).text == "=" and len(self.peek(ahead - 1).text) > 2:
            self.position += ahead + 1  # a name in words: Area = 12
        members, relations = [], []
        if self.peek().text in ("<=", ">=", "<", ">"):
            members.append(Node("symbol", name="?"))
        else:
            members.append(self.quantity())
        while self.peek().kind != "word" and (relation := self.take(*_RELATIONS)):
            relations.append(relation)
            members.append(self.quantity())
        return _related(members, relations)

    def quantity(self) -> Node:
        """A sum with its unit, or several: 5 cm, $5, 1 hour 30 minutes."""
        values, units = [], []
        while True:
            sign = self.take("-") if self.peek(1).text in notation.CURRENCIES else ""
            unit = self.take(*notation.CURRENCIES)
            value = self.sum()
            values.append(Node("neg", (value,)) if sign else value)
            words = self.unit()
            units.append(unit or words)
            if not units[-1] or self.peek().kind != "number":
                break
        if len(values) > 1:
            kinds = {notation.UNITS[unit][0] if unit in notation.UNITS else "" for unit in units}
            if len(kinds) > 1 or "" in kinds:
                raise Unreadable("numbers of which one has no unit")
        elif not units[0]:
            return values[0].parts[0] if values[0].kind == "degree" else values[0]
        return Node("quantity", tuple(values), " ".join(units))

    def unit(self) -> str:
        """The words behind a value; "of" some are not looked at, as `square units` or `km/h`."""
        words: list[str] = []
        before = self.tokens[self.position - 1]
        if before.kind == "word" and before.text != "pi":
            return ""
        while True:
            token = self.peek()
            word = token.kind == "word" and token.text not in ("and", "or", "union")
            per = words and token.text == "/" and self.peek(1).kind == "word"
            if word or per or (token.text and token.text in notation.CURRENCIES):
                words.append(self.next().text)
            elif words and token.text == "^":
                self.next()
                self.group()
                words.append("^")
            else:
                return words[0] if len(words) == 1 else "".join(words)

    def sum(self) -> Node:
        terms = [self.product()]
        while sign := self.take("+", "-", "pm", "mp"):
            term = self.product()
            terms.append(term if sign == "+" else Node(_SIGN.get(sign, sign), (term,)))
        return _joined("+", terms)

    def product(self) -> Node:
        factors = [self.signed()]
        while True:
            if sign := self.take("*", "/", ":"):
                factor = self.signed()
                factors.append(factor if sign == "*" else Node("inverse", (factor,)))
            elif self.take("%"):  # of all before it: 1/2 % is a half of a percent
                factors = [Node("percent", (_joined("*", factors),))]
            elif self.peek().text in notation.SCALES:
                scale = Fraction(10) ** notation.SCALES[self.next().text]
                factors.append(Node("number", value=scale))
            elif self.begins_factor():
                factors.append(self.power())
            else:
                return _joined("*", factors)

    def signed(self) -> Node:
        sign = self.take("-", "+", "pm", "mp")
        node = self.nested(self.power)
        return node if sign in ("", "+") else Node(_SIGN.get(sign, sign), (node,))

    def begins_factor(self) -> bool:
        """Whether what follows multiplies without a sign: 2x, 3(x+1), 2\\sqrt{3}."""
        token, last = self.peek(), self.tokens[self.position - 1]
        if token.kind == "number":
            return last.text in (")", "}") and last.kind == "mark"
        if token.kind == "word":
            if token.text in notation.FUNCTIONS or token.text == "pi":
                return True
            if len(token.text) > 2 or token.text == "or":
                return False
            ended = last.kind == "number" or last.text in ("}", ")")
            attached = last.kind == "number" and token.text[1:] != ""
            return not (token.text in notation.UNITS and ((token.spaced and ended) or attached))
        if token.kind == "command":
            return token.text in _COMMANDS
        return token.text in ("(", "{") or (token.text == "|" and not self.bars)

    def power(self) -> Node:
        node, start = self.atom(), self.position
        while True:
            if self.position - start > 8:
                raise Unreadable("a row of signs")
            ahead = [self.peek(i).text for i in range(4)]
            if ahead[:2] == ["^", "°"]:
                self.position += 1
            elif ahead == ["^", "{", "°", "}"]:
                self.position += 4
                node = Node("degree", (node,))
            elif self.take("°"):
                node = Node("degree", (node,))
            elif self.take("!"):
                node = Node("factorial", (node,))
            elif self.take("^", "*" * 2):
                return Node("^", (node, self.signed()))
            else:
                return node

    def atom(self) -> Node:
        token = self.next()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "word":
            return (
                self.function(token.text)
                if token.text in notation.FUNCTIONS
                else self.symbols(token)
            )
        if token.kind == "command" and token.text in notation.FUNCTIONS:
            return self.function(token.text)
        if token.kind == "command" and token.text in notation.SYMBOLS:
            return self.subscripted(token.text)
        match token.text:
            case "frac":
                above = self.group(single=True)
                return Node("*", (above, Node("inverse", (self.group(single=True),))))
            case "binom":
                return Node("binom", (self.group(), self.group()))
            case "lfloor" | "lceil":
                inner = self.sum()
                self.want("r" + token.text[1:])
                return Node("floor" if token.text == "lfloor" else "ceil", (inner,))
            case "begin":
                return self.matrix()
            case "angle" | "triangle":
                return Node("symbol", name=f"{token.text} {self.next().text}")
            case "|" if not self.bars:
                self.bars += 1
                inner = self.sum()
                self.want("|")
                self.bars -= 1
                return Node("abs", (inner,))
            case "(" | "[" | "{" | "\\{":
                return self.bracketed(token.text)
        raise Unreadable(f"{token.text!r} is not understood" if token.text else "it ends too early")

    def bracketed(self, opened: str) -> Node:
        bars, self.bars = self.bars, 0
        inner = None if self.peek().text == "\\}" else self.whole()
        self.bars = bars
        ends = {"(": (")", "]"), "[": ("]", ")"), "{": ("}",), "\\{": ("\\}",)}[opened]
        if not (closed := self.take(*ends)):
            raise Unreadable(f"{opened!r} is not closed")
        if inner is None:
            return Node("symbol", name="emptyset")
        if inner.kind == "list" and opened in "([":
            return Node("tuple", inner.parts, opened + closed)
        if opened + closed in ("(]", "[)"):
            raise Unreadable(f"{opened!r} is not closed")
        return inner

    def group(self, single: bool = False) -> Node:
        """The argument of a command: in braces or brackets, else one token, or its one digit."""
        token = self.peek()
        if single and token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            rest = Token("number", token.text[1:], False, token.start + 1, token.end)
            self.tokens[self.position] = rest
            return Node("number", value=Fraction(int(token.text[0])))
        sign = self.take("-")
        node = self.nested(self.atom)
        return Node("neg", (node,)) if sign else node

    def function(self, name: str) -> Node:
        """A function with its argument: \\sin^2 x, \\log_2 8, \\sqrt[3]{8}, exp(2)."""
        power = base = None
        if name == "sqrt" and self.take("["):
            base = self.sum()
            self.want("]")
        while sign := self.take("^", "_"):
            if sign == "_":
                base = self.group()
            else:
                power = self.group()
        if name == "sqrt" or self.peek().text in ("(", "{", "["):
            argument = self.group()
        else:
            argument = self.nested(self.power)
            while self.peek().text not in notation.FUNCTIONS and self.peek().text not in ("(", "|"):
                if not self.begins_factor():
                    break
                argument = Node("*", (argument, self.power()))
        if power == Node("neg", (Node("number", value=Fraction(1)),)):
            name, power = "a" + name, None
        node = Node(name, (argument,) if base is None else (argument, base))
        return node if power is None else Node("^", (node, power))

    def symbols(self, token: Token) -> Node:
        """A letter, or a few that are multiplied."""
        if token.text in ("pi", *notation.SYMBOLS):
            return self.subscripted(token.text)
        if len(token.text) > 2:
            raise Unreadable(f"{token.text!r} is a word")
        node = self.subscripted(token.text[-1])
        if len(token.text) == 1:
            return node
        return Node("*", (Node("symbol", name=token.text[0]), node))

    def subscripted(self, name: str) -> Node:
        if self.take("_"):
            start = self.position
            self.group()
            name += "_" + "".join(t.text for t in self.tokens[start : self.position]).strip("{}")
        while self.take("'"):
            name += "'"
        return Node("symbol", name=name)

    def number(self, token: Token) -> Node:
        found = _PARTS.fullmatch(token.text)
        assert found is not None  # the tokens are cut by the same pattern
        whole, repeating, power = found["whole"], found["again"], found["power"]
        digits = whole.replace(",", "")
        if len(digits) > MAX_DIGITS or abs(int(power or 0)) > MAX_EXPONENT:
            raise Unreadable("a number too large to read")
        if self.take("_"):
            base = self.group()
            if base.kind != "number" or base.value > 100:
                raise Unreadable("a base that is no number")
            return Node("based", name=f"{digits} {base.value}")
        value = Fraction(digits.rstrip("."))
        if repeating:
            places = len(digits.partition(".")[2])
            value += Fraction(int(repeating), (10 ** len(repeating) - 1) * 10**places)
        value *= Fraction(10) ** int(power or 0)
        mixed = self.proper_fraction() if digits.isdigit() and not (power or repeating) else None
        if mixed is not None:
            return Node("number", value=value + mixed)
        written = "." in digits and not (repeating or power)
        return Node("number", value=value, name=digits if written else "")

    def proper_fraction(self) -> Fraction | None:
        """The fraction of a mixed number: the 1/2 of `3 1/2` and of `3\\frac12`."""
        match [self.peek(i).text for i in range(7)]:
            case [above, "/", below, *_] if self.peek().kind == "number":
                length = 3
            case ["frac", "{", above, "}", "{", below, "}"]:
                length = 7
            case ["frac", both, *_] if len(both) == 2 and both.isdigit():
                above, below, length = both[0], both[1], 2
            case _:
                return None
        if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
            return None
        self.position += length
        return Fraction(int(above), int(below))

    def matrix(self) -> Node:
        self.want("{")
        name = self.next().text
        self.want("}")
        if not name.endswith("matrix"):
            raise Unreadable(f"an environment {name}")
        rows: list[list[Node]] = [[]]
        while True:
            rows[-1].append(self.sum())
            if self.take("\\\\") and self.peek().text != "end":
                rows.append([])
            elif not self.take("&"):
                break
        if self.next().text != "end" or len({len(row) for row in rows}) != 1:
            raise Unreadable("a matrix whose rows differ")
        self.position += 3
        return Node("matrix", tuple(each for row in rows for each in row), str(len(rows[0])))


def _joined(kind: str, parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Node(kind, tuple(parts))


def _related(members: list[Node], relations: list[str]) -> Node:
    """What a chain of relations says: a value (x = 5), an interval (x > 3), or the relation."""
    if "approx" in relations:
        place = relations.index("approx")
        exact = members[: place + 1]
        if len(exact) > 1 or not is_name(exact[0]):
            members, relations = exact, relations[:place]
        else:
            members, relations = members[1:2], []
    if not relations:
        return members[0]
    if relations == ["in"] and is_name(members[0]):
        return members[1]
    first, last = members[0], members[-1]
    if set(relations) == {"="}:
        letters = any(node.kind == "symbol" for node in first.every())
        if not letters or len(members) > 2:
            return last
        return Node("relation", (last, first) if is_name(last) else (first, last), "=")
    if relations[0] in (">", ">="):
        members.reverse()
        relations = [_FLIPPED.get(relation, "") for relation in reversed(relations)]
        first, last = members[0], members[-1]
    if not set(relations) <= {"<", "<="}:
        if relations == ["!="]:
            return Node("relation", (first, last), "!=")
        raise Unreadable("relations that differ")
    opened, closed = ("(" if relations[0] == "<" else "["), (")" if relations[-1] == "<" else "]")
    infinite = Node("symbol", name="infty")
    if len(members) == 3 and members[1].kind == "symbol":
        return Node("tuple", (first, last), opened + closed)
    if len(members) == 2 and first.kind == "symbol":
        return Node("tuple", (Node("neg", (infinite,)), last), "(" + closed)
    if len(members) == 2 and last.kind == "symbol":
        return Node("tuple", (first, infinite), opened + ")")
    if len(members) == 2:
        return Node("relation", (first, last), relations[0])
    raise Unreadable("a chain of relations")
