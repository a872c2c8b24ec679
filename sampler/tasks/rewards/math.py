"""Reward for mathematics: compares the answer with the truths by their values.

Formulas are read by a grammar of their own (`formulas`) and compared by `values`; nothing of an
answer is evaluated as code.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from sampler.tasks.interfaces import Score, TaskTerm
from sampler.tasks.rewards import notation
from sampler.tasks.rewards.formulas import MAX_CHARS, parse
from sampler.tasks.rewards.notation import Node, Token, Unreadable, plain, tokens
from sampler.tasks.rewards.values import equal
from verify.plugins import Problem

MAX_TRUTH_CHARS = 4096
MAX_TRUTHS = 64
MAX_TAIL_CHARS = 2048
"""Characters at the end of an answer that are searched if nothing is boxed."""
_TRUTH_KEYS = ("ground_truth", "answer")

_STATED = re.compile(r"\b(?:answer|option|choice|result)\b[\s*]*(?:is\b|:)[\s*:]*", re.I)
_BULLET = re.compile(r"^\s*(?:[-*•>]|#{1,6}|\d{1,2}[.)])\s+")
_BOLD = re.compile(
    r"(?<![\w)\]}*])(\*{1,3}|__)(?=[^\s*_])((?:[^*]|(?<=[\w)\]}])\*{1,2}(?=[\w({\\]))+?)(?<=[^\s_])\1(?![\w*(])"
)
_ASIDE = re.compile(r"<<[^<>]*>>|(?<!\w)\([^()]*[A-Za-z]{4,}[^()]*\)")
"""Calculations of GSM8K, and remarks in brackets."""
_SHORT_WORDS = re.compile(
    r"(?<![\\\w{])(?:so|it|is|of|to|we|if|be|as|an|on|no|he|my|in)\b(?!\s*[=^_])", re.I
)
_INLINE = re.compile(r"\$([^$]{1,400})\$")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_KNOWN_WORDS = (
    notation.FUNCTIONS | notation.SCALES.keys() | {"pi", "and", "inf", "infinity", "union"}
)
_KNOWN = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(sorted(_KNOWN_WORDS, key=len, reverse=True))})(?![A-Za-z])"
)
_CHOICE = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*(?:is\b|:)?\s*)*"
    r"(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])\s*\)|([A-J])[.:](?=\s|$)|([A-J])$)[.:,]?\s*(.*)",
    re.S | re.I,
)
_OPTION = re.compile(r"\s*(?:option|choice)\s+\(?([A-J])\b\)?[.:,]?\s*(.*)", re.S | re.I)
_NUMBER, _GROUPING = re.compile(r"\d{1,99}(?:\.\d{1,99})?"), re.compile(r"(?<=\d),(?=\d{3})")
_ANOTHER = re.compile(r"\(?\b[A-J]\b\)?|\b(?:or|and|not)\b|^[-+*/^=,!]")


class MathReward(TaskTerm):
    """1 for an answer that equals one of the truths, else 0.

    The verification is `{"ground_truth": truth}`, a text, a number or a list of them, of which one
    must be met; `#### 42` at the end of a worked solution (GSM8K) is read as 42. The result of an
    answer is its last `\\boxed{}`, else the text after its last `####`, else what its last line
    says after "answer is" or at its end, else the last number or formula before.
    """

    repeatable: ClassVar[bool] = False
    limits_blame_answer: ClassVar[bool] = True

    def score(self, problem: Problem, answer: str) -> Score:
        """Grade the text after `</think>`.

        Raises:
            ValueError: the verification names no truth, or one that is over the limits.
        """
        truths = truths_of(problem.verification)
        read = candidates(answer)
        if not read:
            return Score(0.0, "no answer")
        if len(read[0]) > MAX_CHARS:
            return Score(0.0, f"an answer of {len(read[0])} characters is not read")
        reasons = []
        for truth in truths:
            for candidate in read:
                try:
                    if same(candidate, truth):
                        if not undone(candidate, truth, problem.prompt):
                            return Score(1.0)
                        reasons.append(", a calculation of the problem that is left undone")
                except Unreadable as error:
                    reasons.append(f", {error}")
        return Score(0.0, f"answered {read[0][:80]!r}{(reasons or [''])[0]}")


def undone(answer: str, truth: str, asked: str) -> bool:
    """Whether a number was asked for, and the answer is a sum or a product of numbers of the
    problem, as 8 + 30 for 38: a policy that repeats the problem would be right always.

    Args:
        answer, truth: of one value.
        asked: the problem.
    """
    try:
        found, wanted = _read(answer), _read(truth)
    except Unreadable:
        return False
    if _plain(wanted) is None:
        return False
    if found.kind == "relation":
        found = found.parts[-1]
    if found.kind not in ("+", "*"):
        return False
    given = {Fraction(number) for number in _NUMBER.findall(_GROUPING.sub("", asked))}
    return sum(number in given for number in map(_plain, found.parts)) > 1


def _plain(node: Node) -> Fraction | None:
    """The absolute value of a number, None of all else."""
    node = node.parts[0] if node.kind == "neg" else node
    return abs(node.value) if node.kind == "number" else None


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
    lines = [line for line in map(_unmarked, tail.split("\n")) if line]
    if not lines:
        return []
    prose = len(lines) > 1 or _SHORT_WORDS.search(lines[0])
    if not prose and (_readable(lines[0]) or choice(lines[0])[0]):
        return lines
    return [_concluded(lines)[:MAX_CHARS]]


def _unmarked(line: str) -> str:
    """A line without Markdown's marks and the dollars around its formulas."""
    line = _BULLET.sub("", line.replace("`", "")).strip()
    for _ in range(2):
        line = _BOLD.sub(r"\2", line)
    line = re.sub(r"\\[()\[\]]", "$", line)
    return _INLINE.sub(
        lambda found: (
            found[0] if _PROSE.search(_KNOWN.sub(" ", plain(found[1]))) else f" {found[1]} "
        ),
        line,
    ).strip()


def _concluded(lines: list[str]) -> str:
    """What the last of some lines states, else the last formula or number of the last that has
    one."""
    *before, last = lines
    if stated := [*_STATED.finditer(last)]:
        rest = last[stated[0].end() :].strip()
        if len(stated) > 1 or re.match(r"(?:not|either|neither)\b", rest):
            return last
        if _readable(rest) or _word(rest) or choice(rest)[0]:
            return rest
        return (runs(rest) or [rest])[0]
    if choice(last)[0]:
        return last
    if found := runs(last):
        return found[-1]
    for line in reversed(before):
        if (place := _STATED.search(line)) and (found := runs(line[place.end() :])):
            return found[0]
    return next((found[-1] for line in reversed(before) if (found := runs(line))), last)


def runs(line: str) -> list[str]:
    """Return the longest parts of a line that are made of numbers, signs and commands, with a
    number, a command or an equation in each."""
    text = plain(_ASIDE.sub(" ", line))
    found: list[list[Token]] = [[]]
    known = list(_leniently(text))
    for place, token in enumerate(known):
        near = {t.text for t in known[max(0, place - 1) : place + 2] if t is not token}
        letter = token.kind == "word" and len(token.text) == 1
        if letter and (near & set("=<>^_*/+") or (not token.spaced and place and found[-1])):
            found[-1].append(token)
        elif token.kind == "other" and unicodedata.category(token.text) == "Sm":
            found[-1].append(token)  # so that a part of what it belongs to is not read alone
        elif token.kind == "other" or (
            token.kind == "word" and (letter or token.text not in _KNOWN_WORDS | {"or"})
        ):
            if (
                token.text in notation.UNITS.keys() - {"in"}
                and found[-1]
                and found[-1][-1].kind == "number"
            ):
                found[-1].append(token)
            else:
                found.append([])
        else:
            found[-1].append(token)
    made = [text[run[0].start : run[-1].end] for run in map(_trimmed, found) if run]
    # Of an equation with units inside (450 mg + 200 mg = 650 mg) the last side.
    return [run if _readable(run) else run.rpartition("=")[2].strip() or run for run in made]


def _leniently(text: str) -> list[Token]:
    """The tokens of a text; what belongs to none is one of kind "other"."""
    given: list[Token] = []
    offset = 0
    while offset < len(text):
        try:
            for token in tokens(text[offset:]):  # fails behind the last that it gives
                start, end = token.start + offset, token.end + offset
                given.append(replace(token, start=start, end=end))
            break
        except Unreadable:
            offset = given[-1].end if given else 0
            offset += len(text[offset:]) - len(text[offset:].lstrip()) + 1
            given.append(Token("other", text[offset - 1], True, offset - 1, offset))
    return given


def _trimmed(run: list[Token]) -> list[Token]:
    """A run without the signs of the sentence around it; empty where nothing has a value."""
    while run and (run[0].text in (*"=*/^_,;:!%&|)]}'", "and", "or", "\\}", "ldots")):
        run = run[1:]
    while run and (run[-1].text in (*"=+-*/^_,;:&([{", "and", "or", "\\{")):
        run = run[:-1]
    pairs = {")": "(", "]": "["}
    if run and run[-1].text in pairs and not any(t.text in "([" for t in run[:-1]):
        return _trimmed(run[:-1])
    if run and run[0].text in ("(", "[") and not any(t.text in (")", "]") for t in run):
        return _trimmed(run[1:])
    return run if any(t.kind in ("number", "command") or t.text == "=" for t in run) else []


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


def same(answer: str, truth: str) -> bool:
    """Whether two texts are the same word, the same choice, or formulas of the same value.

    Raises:
        Unreadable: one of them is no formula, or too large to compute.
    """
    if _bare(answer) == _bare(truth) != "" or _word(answer) == _word(truth) != "":
        return True
    (ours, our_value), (theirs, their_value) = choice(answer), choice(truth)
    if ours and theirs:
        return ours == theirs
    if ours or theirs:
        value, other = (our_value, truth) if ours else (their_value, answer)
        return bool(value) and equal(_read(value), _read(other))
    return equal(_read(answer), _read(truth))


def choice(text: str) -> tuple[str, str]:
    """Return the letter of a choice and the value beside it, `("B", "12")` of `(B) 12`, or two
    empty texts."""
    bare = plain(_unmarked(text)).strip(" .$*")
    found = _CHOICE.fullmatch(bare) or _OPTION.fullmatch(bare)
    if found is None:
        return "", ""
    *letters, value = found.groups()
    if _ANOTHER.search(value):
        return "", ""
    return next(letter for letter in letters if letter).upper(), value


@lru_cache(256)
def _read(text: str) -> Node:
    return parse(_unmarked(text))


def _readable(text: str) -> bool:
    try:
        return bool(_read(text))
    except Unreadable:
        return False


def _word(text: str) -> str:
    bare = _bare(text).strip("*")
    bare = re.sub(r"^\(([A-Za-z])\)$", r"\1", bare)
    if not bare.isalpha():
        return ""
    return bare.casefold() if len(bare) > 1 else bare


def _bare(text: str) -> str:
    """A text without blanks, but for those between digits, and without fonts and dollars."""
    text = re.sub(r"(?<=\w)\s+(?=\d)|(?<=\d)\s+(?=\w)", "|", plain(text))
    return re.sub(r"(?<!\.)\.$", "", re.sub(r"\s", "", text).strip("$"))
