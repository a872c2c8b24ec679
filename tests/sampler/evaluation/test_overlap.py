"""Contamination: which problems of an evaluation stand in the training problems."""

from __future__ import annotations

from sampler.evaluation.overlap import WORDS, Overlap, overlaps

LONG = "If a train leaves the station at nine and travels at sixty miles an hour how far is it"
"""Of more than `WORDS` words."""


def test_equal_problems_are_found_whatever_their_case_and_signs() -> None:
    asked = [("a", "What is 2 + 2?"), ("b", "What is 3 + 3?")]
    trained = [("t0", "Something else"), ("t1", "what is 2, 2")]
    assert overlaps(asked, trained) == [Overlap("a", True, "t1")]


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none() -> None:
    words = LONG.split()
    assert len(words) > WORDS
    asked = [("a", f"{LONG} by noon")]
    part = " ".join(words[2 : 2 + WORDS])
    assert overlaps(asked, [("t", f"Say: {part}!")]) == [Overlap("a", False, "t")]
    shorter = " ".join(words[2 : 1 + WORDS])
    assert overlaps(asked, [("t", f"Say: {shorter}!")]) == []


def test_an_exact_one_outweighs_a_part_and_order_is_that_of_the_suite() -> None:
    asked = [("a", LONG), ("b", "Short one")]
    trained = [("part", f"{LONG} then"), ("b2", "short one"), ("same", LONG)]
    assert overlaps(asked, trained) == [Overlap("a", True, "same"), Overlap("b", True, "b2")]
