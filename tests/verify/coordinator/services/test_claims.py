"""Claims: what a validator that fails takes with it (nothing), and when a file is given up."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from verify.coordinator.services.claims import (
    ASKED_LATELY_S,
    ATTEMPTS,
    CLAIM_TIMEOUT_S,
    LONGEST_CLAIM_S,
    SUSPECT_WAIT_S,
    Claims,
)


def batch(claims: Claims, validator: str, waiting: Iterable[str], now: float = 0.0) -> list[str]:
    """What a validator gets that asks until nothing comes."""
    held: list[str] = []
    while (found := claims.claim(validator, waiting, now)) is not None:
        held.append(found)
    return held


def test_what_a_dead_validator_held_is_offered_again_one_by_one_and_after_the_rest() -> None:
    claims = Claims()
    assert batch(claims, "v", "abc") == ["a", "b", "c"]

    claims.keep("v", [], 1.0)  # a new process, which holds nothing

    assert batch(claims, "v", "abcde") == ["d", "e"]  # no suspect beside others
    for submission in "de":
        claims.settle("v", submission)
    assert batch(claims, "v", "abcf") == ["f"]
    claims.settle("v", "f")
    assert batch(claims, "v", "abc") == ["a"]  # and nothing beside a suspect
    claims.settle("v", "a")
    assert batch(claims, "v", "bcg") == ["g"]


def test_a_file_at_which_working_validators_fail_is_hopeless_after_three_attempts() -> None:
    claims = Claims()
    for attempt in range(ATTEMPTS):
        assert claims.hopeless() == {}
        assert batch(claims, "v", ["poison"], float(attempt)) == ["poison"]
        claims.keep("v", [], attempt + 0.5)
        claims.settle("v", "another")  # the same validator comes to a verdict elsewhere

    ((submission, attempts),) = claims.hopeless().items()
    assert submission == "poison"
    assert [attempt.at for attempt in attempts] == [0.5, 1.5, 2.5]
    assert {attempt.reason for attempt in attempts} == {"the validator's process ended"}
    claims.forget("poison")
    assert claims.hopeless() == {} and claims.suspects == 0


def test_a_validator_that_fails_at_everything_condemns_nothing() -> None:
    claims = Claims()
    for attempt in range(60):
        assert batch(claims, "broken", "abc", float(attempt))
        claims.keep("broken", [], attempt + 0.5)
    assert claims.hopeless() == {}

    # when it is mended, what it failed at is judged
    waiting = set("abc")
    while waiting:
        (submission,) = batch(claims, "broken", sorted(waiting), 70.0)
        claims.settle("broken", submission)
        waiting.remove(submission)


def test_where_only_suspects_are_left_a_validator_shows_that_it_works() -> None:
    claims = Claims()
    for _ in range(ATTEMPTS):
        assert claims.claim("v", ["poison"], 0.0, judged="old") == "poison"
        claims.keep("v", [], 1.0)
        assert claims.claim("v", ["poison"], 2.0, judged="old") == "old"
        claims.keep("v", ["old"], 2.0)
        assert claims.claim("v", ["poison"], 2.0, judged="old") is None  # and nothing beside it
        claims.settle("v", "old")
    assert list(claims.hopeless()) == ["poison"]


def test_a_validator_that_fails_at_what_was_judged_before_is_given_no_suspect() -> None:
    claims = Claims()
    assert claims.claim("broken", ["x"], 0.0, judged="old") == "x"
    for attempt in range(10):
        claims.keep("broken", [], attempt + 1.0)
        assert claims.claim("broken", ["x"], attempt + 1.0, judged="old") == "old"
    assert claims.claim("broken", ["x", "new"], 20.0, judged="old") is None
    claims.keep("broken", [], 21.0)
    assert claims.claim("broken", ["x", "new"], 21.0, judged="old") == "new"
    assert claims.claim("works", ["x"], 22.0, judged="old") == "x"


def test_verdicts_of_others_do_not_speak_for_a_validator_that_fails() -> None:
    claims = Claims()
    for attempt in range(5):
        now = attempt * 2 * ASKED_LATELY_S
        assert batch(claims, "broken", ["x"], now) == ["x"]
        claims.keep("broken", [], now + 1)
        claims.settle("works", f"another {attempt}")
    assert claims.hopeless() == {}


def test_a_suspect_is_left_to_a_validator_that_has_not_failed_at_it() -> None:
    claims = Claims()
    assert batch(claims, "w", [], 0.0) == []  # it asks, and finds nothing
    assert batch(claims, "v", ["x"], 1.0) == ["x"]
    claims.keep("v", [], 2.0)

    assert batch(claims, "v", ["x"], 3.0) == []
    assert claims.next_change(3.0) == ASKED_LATELY_S
    assert batch(claims, "w", ["x"], 4.0) == ["x"]
    claims.keep("w", [], 5.0)

    assert batch(claims, "v", ["x"], 6.0) == ["x"]  # both have failed: nobody is better placed


def test_a_claim_whose_time_has_run_out_has_failed() -> None:
    claims = Claims()
    assert batch(claims, "hangs", ["x"], 0.0) == ["x"]
    assert claims.next_change(1.0) == CLAIM_TIMEOUT_S
    assert batch(claims, "v", ["x"], CLAIM_TIMEOUT_S - 1) == []

    assert batch(claims, "v", ["x"], CLAIM_TIMEOUT_S) == ["x"]

    assert claims.suspects == 1
    claims.settle("hangs", "x")  # it was slow after all: the first verdict counts
    assert claims.suspects == len(claims) == 0


def test_a_claim_lasts_as_long_as_its_validator_says_that_it_lives_but_not_for_ever() -> None:
    claims = Claims()
    assert batch(claims, "long prefill", ["x"], 0.0) == ["x"]
    now = 0.0
    while now < LONGEST_CLAIM_S - CLAIM_TIMEOUT_S:
        claims.prolong("v", now)  # another's word says nothing of it
        claims.prolong("long prefill", now)
        now += 10.0
        assert batch(claims, "v", ["x"], now) == []
    while now < LONGEST_CLAIM_S:
        claims.prolong("long prefill", now)
        now += 10.0

    assert batch(claims, "v", ["x"], LONGEST_CLAIM_S) == ["x"]

    claims = Claims()
    assert batch(claims, "dies", ["x"], 0.0) == ["x"]
    claims.prolong("dies", 100.0)
    assert batch(claims, "v", ["x"], 99.0 + CLAIM_TIMEOUT_S) == []
    assert batch(claims, "v", ["x"], 100.0 + CLAIM_TIMEOUT_S) == ["x"]


def test_suspects_take_turns_with_work_that_never_ends() -> None:
    claims = Claims()
    assert batch(claims, "v", ["x"], 0.0) == ["x"]
    claims.keep("v", [], 1.0)
    late = 1.0 + SUSPECT_WAIT_S

    assert batch(claims, "v", ["x", "b"], late) == ["b"]  # it has judged nothing since
    claims.settle("v", "b")
    assert batch(claims, "v", ["x", "c"], late - 1) == ["c"]  # too early
    claims.settle("v", "c")
    assert batch(claims, "v", ["x", "d"], late) == ["x"]


def test_what_is_given_back_is_no_suspect() -> None:
    claims = Claims()
    assert batch(claims, "v", "ab") == ["a", "b"]
    assert claims.give_back("v", "a") and not claims.give_back("w", "b")
    claims.fail("w", "b", "not its claim", 1.0)
    assert claims.suspects == 0 and batch(claims, "w", "ab") == ["a"]
    claims.fail("v", "b", "ValueError", 1.0)
    assert claims.suspects == 1
    batch(claims, "v", [])  # it can train no more
    assert claims.suspects == 0


def test_what_a_fault_says_may_repeat_a_stranger_and_forges_no_line() -> None:
    claims = Claims()
    for _ in range(ATTEMPTS):
        batch(claims, "v", ["x"])
        claims.fail("v", "x", "ValueError: \x1b[2J\nall is well " + "x" * 1000, 1.0)
        claims.settle("v", "another")
    reason = claims.hopeless()["x"][0].reason
    assert reason.isprintable() and len(reason) == 300 and "all is well" in reason


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    poisons=st.integers(0, 4),
    validators=st.integers(1, 3),
)
def test_poison_ends_three_processes_a_file_and_costs_no_other_file(
    seed: int, poisons: int, validators: int
) -> None:
    """Validators of eight claims at most, which die of poison; honest work goes on coming."""
    rng, claims, now = random.Random(seed), Claims(), 0.0
    poison = {f"poison {n}" for n in range(poisons)}
    waiting = [f"honest {n}" for n in range(20)] + sorted(poison)
    rng.shuffle(waiting)
    deaths, judged, aside = 0, set(), set()
    for round_ in range(60 + 40 * poisons):
        now += rng.random() * 60
        if poison - aside:
            waiting.append(f"later {round_}")
        name = f"validator {rng.randrange(validators)}"
        held: list[str] = []
        while len(held) < 8 and (found := claims.claim(name, waiting, now)) is not None:
            held.append(found)
        if poison & set(held):
            deaths += 1
            claims.keep(name, [], now)
            continue
        for submission in held:
            claims.settle(name, submission)
            waiting.remove(submission)
            judged.add(submission)
        for submission in claims.hopeless():
            claims.forget(submission)
            waiting.remove(submission)
            aside.add(submission)

    assert aside == poison and not waiting and claims.suspects == 0
    assert len(judged) >= 20 and deaths <= (ATTEMPTS + validators - 1) * poisons
