"""Reward for mathematics: compares the answer with the truths, as numbers or by math-verify.

math-verify passes parts of its input to sympy's parser, which evaluates code. So `score` must run
in a grader process (`isolated`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from sampler.tasks.interfaces import Score, TaskTerm
from verify.plugins import Problem

MAX_TRUTH_CHARS = 4096
MAX_TRUTHS = 64
MAX_EXPRESSION_CHARS = 1024
"""Longest boxed answer that is read."""
MAX_TAIL_CHARS = 2048
"""Characters at the end of an answer that are searched if nothing is boxed."""
MAX_EXPONENT = 100_000
STEP_S = 3
"""Longest time for one parse and for one comparison inside math-verify, in whole seconds."""
_TRUTH_KEYS = ("ground_truth", "answer")

_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<whole>\d{1,3}(?:,\d{3})+|\d+)?(?P<decimals>\.\d*)?)"
    r"(?:[eE](?P<power>[-+]?\d{1,3}))?(?:/(?P<below>\d+))?(?P<percent>%?)"
)
_DECORATION = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{[^{}]*\}|\\[,;!: ]|\\?\$|[€£¥₹₽₩°]|\*\*|~"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\*?\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_MIXED = re.compile(r"([-+]?)\s*(\d{1,50})\s+(\d{1,50})/(\d{1,50})")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_POWER = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?(\d+)(?:\s*[})]*\s*(?:\^|\*\*)\s*[{(]*\s*-?(\d+))?")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
_KNOWN_WORDS = frozenset({"sqrt", "sin", "cos", "tan", "log", "exp", "inf", "cup", "union", "and"})
_REPEATING = re.compile(
    r"(?<![\d.])(\d{1,3}(?:,\d{3})+|\d{0,50})\.(\d{0,50})"
    r"\\(?:overline|bar)\s*(?:\{\s*(\d{1,50})\s*\}|(\d))"
)
_STATED = re.compile(r"\b(?:answer|option|choice)\b[\s*]*(?:is\b|:)[\s*:]*([^\n]{1,80})$", re.I)


class MathReward(TaskTerm):
    """1 for an answer that equals one of the truths, else 0.

    The verification is `{"ground_truth": truth}`, a text, a number or a list of them, of which one
    must be met; `#### 42` at the end of a worked solution (GSM8K) is read as 42. The result of an
    answer is its last `\\boxed{}`, else the text after its last `####`, else the letter or the
    words at the end of its last line after "answer is", else its last number or formula.
    """

    repeatable: ClassVar[bool] = False
    limits_blame_answer: ClassVar[bool] = True

    def prepare(self) -> None:
        """Import math-verify and sympy."""
        import math_verify

        logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)

    def score(self, problem: Problem, answer: str) -> Score:
        """Grade the text after `</think>`.

        Raises:
            ValueError: the verification names no truth, or one that is over the limits.
        """
        truths = [improper(exact(truth)) for truth in truths_of(problem.verification)]
        read = candidates(answer)
        if not read:
            return Score(0.0, "no answer")
        if len(read[0]) > MAX_EXPRESSION_CHARS:
            return Score(0.0, f"an answer of {len(read[0])} characters is not read")
        found = [improper(exact(candidate)) for candidate in read]
        reason = f"answered {found[0][:80]!r}"
        for truth in truths:
            for candidate in found:
                if same_text(candidate, truth):
                    return Score(1.0)
                if too_large(candidate):
                    reason = f"answered {candidate[:80]!r}, a power too large to evaluate"
                elif not too_large(truth) and same_value(candidate, truth):
                    return Score(1.0)
        return Score(0.0, reason)


def truths_of(verification: Mapping[str, Any]) -> list[str]:
    """Return the truths of a problem, each within the limits.

    Raises:
        ValueError: there is none, or it is malformed; the message names the field.
    """
    key = next((key for key in _TRUTH_KEYS if key in verification), None)
    if key is None:
        raise ValueError("verification_info has no ground_truth")
    given = verification[key]
    truths = given if isinstance(given, list) else [given]
    if not 1 <= len(truths) <= MAX_TRUTHS:
        raise ValueError(f"verification_info.{key} has {len(truths)} truths")
    texts = []
    for truth in truths:
        if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
            raise ValueError(f"verification_info.{key} is {type(truth).__name__}, not a text")
        if isinstance(truth, float) and not math.isfinite(truth):
            raise ValueError(f"verification_info.{key} is {truth}")
        text = str(truth).rpartition("####")[2].strip()
        if not 0 < len(text) <= MAX_TRUTH_CHARS:
            raise ValueError(f"verification_info.{key} has {len(text)} characters")
        boxes = boxed(text)
        texts.append(boxes[-1].strip() if boxes else text)
    return texts


def candidates(answer: str) -> list[str]:
    """Return the possible results of an answer: one, or two if several are boxed."""
    boxes = [content.strip() for content in boxed(answer)]
    if boxes:
        together = [", ".join(boxes)] if 1 < len(boxes) <= 8 else []
        return [boxes[-1], *together]
    _, marked, after = answer.rpartition("####")
    if marked:
        lines = after.strip().splitlines()
        return [lines[0].strip()] if lines else []
    tail = answer.strip()[-MAX_TAIL_CHARS:]
    stated = _STATED.search(tail)
    if stated is not None and _word(stated[1]):
        return [stated[1]]
    return [tail[:MAX_EXPRESSION_CHARS] if _is_formula(tail) else tail[-MAX_EXPRESSION_CHARS:]] * (
        tail != ""
    )


def boxed(text: str) -> list[str]:
    """Return the contents of `\\boxed{...}` and `\\fbox{...}` with balanced braces, outermost ones
    in order."""
    found = []
    position = 0
    while match := re.compile(r"\\f?boxed?\s*\{").search(text, position):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            break
        found.append(text[match.end() : end - 1])
        position = end
    return found


def same_text(answer: str, truth: str) -> bool:
    """Whether two formulas differ only by blanks and dollar signs, or two words only by case and
    font."""
    return _bare(answer) == _bare(truth) != "" or _word(answer) == _word(truth) != ""


def too_large(text: str) -> bool:
    """Whether a power of plain numbers would take for ever: 9^9^9^9."""
    for exponent, above in _POWER.findall(text):
        power = int(exponent[:9])
        if above and power > 1:
            power **= min(int(above[:9]), 64)
        if power > MAX_EXPONENT:
            return True
    return False


def exact(text: str) -> str:
    """Write repeating decimals in a text as fractions: `0.1\\overline{6}` as `\\frac{1}{6}`."""
    return _REPEATING.sub(_as_fraction, text)


def improper(text: str) -> str:
    """Write a mixed number as one fraction, `1\\frac{1}{2}` and `1 1/2` as 3/2; leave other
    texts."""
    match = _MIXED.fullmatch(_undecorated(text))
    if match is None or not 0 < int(match[3]) < int(match[4]):
        return text
    return f"{match[1]}{int(match[2]) * int(match[4]) + int(match[3])}/{match[4]}"


def number(text: str) -> tuple[Fraction, bool] | None:
    """Parse a plain number, and whether it is a percentage: `-1,234.5`, `3/4`, `$18`, `18\\%`,
    `2e-3`."""
    bare = _undecorated(text)
    match = _NUMBER.fullmatch(re.sub(r"(?<=[-+])\s+|\s+(?=%)", "", bare))
    if match is None or not (match["whole"] or (match["decimals"] or ".") != "."):
        return None
    if len(bare) > 100 or (match["below"] and int(match["below"]) == 0):
        return None
    digits = (match["whole"] or "0").replace(",", "") + (match["decimals"] or "").rstrip(".")
    value = Fraction(digits) * Fraction(10) ** int(match["power"] or 0) / int(match["below"] or 1)
    return (-value if match["sign"] == "-" else value), bool(match["percent"])


def same_value(answer: str, truth: str) -> bool:
    """Whether two formulas are equal: numbers exactly, and a percentage also as its share."""
    ours, theirs = number(answer), number(truth)
    if ours is not None and theirs is not None:
        if ours[0] == theirs[0]:
            return True
        whole = ours[0].denominator == theirs[0].denominator == 1
        if whole and not ours[1] and not theirs[1]:
            return False
    from math_verify import verify

    parsed = _parsed(truth)
    return bool(parsed) and bool(
        verify(list(parsed), list(_parsed(answer)), timeout_seconds=STEP_S)
    )


@lru_cache(256)
def _parsed(text: str) -> tuple[Any, ...]:
    """Parse a formula, or the last one of a text, with sympy; empty if there is none."""
    from math_verify import parse

    if _is_formula(text):
        inner = text.strip().rstrip(".").strip("$").strip()
        if found := parse(f"$\\boxed{{{inner}}}$", parsing_timeout=STEP_S):
            return tuple(found)
    return tuple(parse(text, parsing_timeout=STEP_S))


def _is_formula(text: str) -> bool:
    """Whether a text is mathematics from end to end, not a sentence with some in it."""
    plain = _DECORATION.sub("", _ENVIRONMENT.sub("", text))
    words = {word.lower() for word in _WORD.findall(plain)}
    return "\n" not in plain.strip() and not words - _KNOWN_WORDS


def _undecorated(text: str) -> str:
    fraction = _FRACTION.sub(
        lambda found: f" {found[1] or found[2]}/{found[3] or found[4]} ", _DECORATION.sub("", text)
    )
    return fraction.replace("\\%", "%").strip().rstrip(".")


def _as_fraction(found: re.Match[str]) -> str:
    whole, once, again = found[1].replace(",", ""), found[2], found[3] or found[4]
    value = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
    value += Fraction(f"{whole or 0}.{once}".rstrip("."))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _word(text: str) -> str:
    bare = _bare(_WRAPPED.sub(r"\1", text)).strip("*")
    bare = re.sub(r"^\(([A-Za-z])\)$", r"\1", bare)
    if not bare.isalpha():
        return ""
    return bare.casefold() if len(bare) > 1 else bare


def _bare(text: str) -> str:
    text = re.sub(r"(?<=\d)\s+(?=\d)(?!\d{3}(?!\d))", "|", text)  # 1 000 is a number, 1 2 is not
    return re.sub(r"\\(?:left|right|[,;!: ])|[\s$]", "", text).rstrip(".")
