"""A calculator of exact fractions, and problems whose answer is a number."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from sampler.tasks.environments.tools import ToolCall, ToolEnvironment, schema
from verify.plugins import Problem

MAX_CHARS, MAX_DIGITS = 200, 400
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(ToolEnvironment):
    """The tool `calc`: + - * / and brackets. The answer is compared as a fraction with
    `verification_info.ground_truth`."""

    tools = (
        schema(
            "calc", "Computes exactly.", expression="numbers, + - * / and brackets, like 3*(4+5)"
        ),
    )
    max_tokens_per_turn, max_observation_tokens = 256, 64

    def use(self, problem: Problem, call: ToolCall) -> str:
        try:
            return shown(evaluate(str(call.arguments.get("expression", ""))))
        except ValueError as error:
            return f"error: {error}"

    def judge(self, problem: Problem, answer: str) -> float:
        truth = evaluate(str(problem.verification["ground_truth"]))
        try:
            return float(evaluate(answer.split("=")[-1].strip().rstrip(".")) == truth)
        except ValueError:
            return 0.0

    def example(self, problem: Problem) -> list[str] | None:
        expression = problem.verification.get("expression")
        if expression is None:
            return None
        return [f"calc({expression})", str(problem.verification["ground_truth"])]


def evaluate(text: str) -> Fraction:
    """Return the value of an expression.

    Raises:
        ValueError: it is none, divides by zero, or grows beyond `MAX_DIGITS` digits.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"over {MAX_CHARS} characters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def _value(node: Any) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(Fraction(node.value))
    if isinstance(node, ast.Constant) and type(node.value) is float:
        return _bounded(Fraction(repr(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _bounded(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("numbers, + - * / and brackets alone")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:  # as of 1e300 * 1e300
        raise ValueError(f"over {MAX_DIGITS} digits")
    return value


def shown(value: Fraction) -> str:
    """Return a fraction as an integer, or as `p/q`."""
    return str(value)
