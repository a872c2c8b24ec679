"""Calls in a policy's message, and the exact arithmetic behind the calculator."""

from __future__ import annotations

import random
from fractions import Fraction

import bm25s
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler.tasks.environments.calculator import Calculator, evaluate
from sampler.tasks.environments.search import Search, ranked
from sampler.tasks.environments.tools import Malformed, ToolCall, call_in
from verify.plugins import Problem

TOOLS = {"calc": "expression", "search": "query"}
CALL = ToolCall("calc", {"expression": "2*3"})
HERMES = '<tool_call>\n{"name": "calc", "arguments": {"expression": "2*3"}}\n</tool_call>'
PARAMETERS = '{"name": "calc", "parameters": {"expression": "2*3"}}'


@pytest.mark.parametrize("message", [HERMES, f"I ask.\n{HERMES}", PARAMETERS, " calc(2*3)\n"])
def test_a_call_is_read_in_each_form(message):
    assert call_in(message, TOOLS) == CALL


@pytest.mark.parametrize("message", ["", "6", "the calc(2*3) is 6", "other(2)", "[1]", "x {}"])
def test_what_is_no_call_is_an_answer(message):
    assert call_in(message, TOOLS) is None


@given(st.text(max_size=60) | st.from_regex(r"[<>{}\"a-z_/:()]{0,40}"))
def test_any_text_is_a_call_an_answer_or_malformed(message):
    try:
        found = call_in(message, TOOLS)
    except Malformed as error:
        assert str(error)
    else:
        assert found is None or found.name in TOOLS


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_the_calculator_is_exact(expression):
    assert evaluate(expression) == eval(expression)  # of Python's own integers


@pytest.mark.parametrize(
    ("text", "value"), [("1/3+1/6", Fraction(1, 2)), ("-0.1*3", Fraction(-3, 10)), (" 2 ", 2)]
)
def test_fractions_and_decimals_are_exact_too(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "1/0", "2**9", "a", "1e999", "f(1)", "1 if 1 else 2", "True", "'1'", "1j", "1\x00"),
        *("9" * 201, "1e300*1e300", "(" * 90 + "1" + ")" * 90 + "]"),
    ],
)
def test_what_is_no_bounded_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(text)


def test_an_episode_calls_then_answers_and_is_graded_by_the_answer_alone():
    problem = Problem("p", "calculator", "2*3=?", {"ground_truth": "6", "expression": "2*3"})
    calculator = Calculator.__new__(Calculator)
    state, opening = calculator.start(problem, 1)
    assert opening == [{"role": "user", "content": "2*3=?"}]
    state, seen, over = calculator.step(problem, state, "calc(2*3)")
    assert (seen, over) == ([{"role": "tool", "content": "6"}], False)
    _, seen, over = calculator.step(problem, state, "calc(1/0)")
    assert seen[0]["content"] == "error: division by zero" and not over
    for answer, reward in [("6", 1.0), ("2*3=6.", 1.0), ("7", 0.0), ("six", 0.0)]:
        after, seen, over = calculator.step(problem, state, answer)
        assert (seen, over) == ([], True)
        assert calculator.grade(problem, after, []) == reward
    assert calculator.grade(problem, state, []).reason == "no answer"


def test_documents_are_ranked_as_by_bm25s():
    """Its scores are floats; documents whose scores are equal to four digits keep their order."""

    def words(texts):
        return bm25s.tokenize(
            texts, stopwords=None, token_pattern=r"\w+", return_ids=False, show_progress=False
        )

    chance, vocabulary = random.Random(1), [f"w{number}" for number in range(60)]
    for _ in range(20):
        documents = tuple(
            " ".join(chance.choices(vocabulary, k=chance.randint(3, 40))) for _ in range(20)
        )
        query = " ".join(chance.choices(vocabulary, k=3))
        oracle = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        oracle.index(words([*documents]), show_progress=False)
        scores = [round(float(score), 4) for score in oracle.get_scores(words([query])[0])]
        theirs = sorted(range(20), key=lambda number: -scores[number])
        assert ranked(documents, query) == [number for number in theirs if scores[number] > 0]


def test_a_search_shows_documents_and_the_answer_may_be_spelled_as_for_squad():
    documents = ["Oslo is the capital of Norway.", "Rome lies on the Tiber."]
    verification = {"documents": documents, "ground_truth": ["Rome", "Roma"]}
    problem = Problem("p", "search", "Which city lies on the Tiber?", verification)
    search = Search.__new__(Search)
    for query, shown in [("tiber, TIBER", "[2] Rome lies on the Tiber."), ("sea", "nothing")]:
        assert search.use(problem, ToolCall("search", {"query": query})) == shown
    assert search.use(problem, ToolCall("search", {})) == "nothing"
    assert [search.judge(problem, x) for x in ("The Rome!", "roma", "Oslo")] == [1.0, 1.0, 0.0]
