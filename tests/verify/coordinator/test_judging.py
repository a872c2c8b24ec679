"""Verdicts: who judges what, what a failing validator takes with it, and verdicts that count."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runspec.core.signed import SigningKey
from tests.verify.coordinator.deployment import Site, verdict
from tests.verify.coordinator.filled import journal_of, started
from tests.verify.coordinator.over_http import claimed, post, sample, status
from verify.coordinator.machine import trust as rules
from verify.coordinator.machine.trust import ATTEMPTS, WORKERS_GAPS, Claims

OLD = lambda: "old"  # noqa: E731 - what was judged before


def batch(claims: Claims, validator: str, waiting: Iterable[str], now: float = 0.0) -> list[str]:
    """What a validator gets that asks until nothing comes."""
    held: list[str] = []
    while (found := claims.claim(validator, waiting, now)) is not None:
        held.append(found)
    return held


def die(claims: Claims, validator: str, now: float = 1.0) -> None:
    """A new process of the validator, which holds nothing."""
    claims.keep(validator, [], now)


def test_what_a_dead_validator_held_is_offered_again_one_by_one_and_after_the_rest() -> None:
    claims = Claims()
    assert batch(claims, "v", "abc") == ["a", "b", "c"]
    die(claims, "v")
    assert batch(claims, "v", "abcde") == ["d", "e"]  # no suspect beside others
    for submission in "de":
        claims.settle("v", submission)
    assert batch(claims, "v", "abcf") == ["f"]
    claims.settle("v", "f")
    assert batch(claims, "v", "abc") == ["a"]  # and nothing beside a suspect
    claims.settle("v", "a")
    assert batch(claims, "v", "bcg") == ["g"]


def test_a_file_is_given_up_after_three_attempts_of_validators_that_work() -> None:
    claims, forged = Claims(), "ValueError: \x1b[2J\nall is well " + "x" * 1000
    for attempt in range(ATTEMPTS):
        assert claims.hopeless() == {}
        assert batch(claims, "v", ["poison"], float(attempt)) == ["poison"]
        if attempt:
            die(claims, "v", attempt + 0.5)
        else:  # what a fault says may repeat a stranger, and forges no line
            claims.fail("v", "poison", forged, 0.5)
        claims.settle("works", "another")  # which says nothing of v
        assert claims.hopeless() == {}
        claims.settle("v", "another")
    ((submission, (first, *others)),) = claims.hopeless().items()
    assert (submission, [attempt.at for attempt in (first, *others)]) == ("poison", [0.5, 1.5, 2.5])
    assert {attempt.reason for attempt in others} == {"the validator's process ended"}
    assert first.reason.isprintable() and len(first.reason) == 300
    claims.forget("poison")
    assert claims.hopeless() == {} and claims.suspects == 0


def test_where_only_suspects_are_left_a_validator_shows_that_it_works() -> None:
    claims = Claims()
    for _ in range(ATTEMPTS):
        assert claims.claim("v", ["poison"], 0.0, judged=OLD) == "poison"
        die(claims, "v")
        assert claims.claim("v", ["poison"], 2.0, judged=OLD) == "old"
        claims.keep("v", ["old"], 2.0)
        assert claims.claim("v", ["poison"], 2.0, judged=OLD) is None  # and nothing beside it
        claims.settle("v", "old")
    assert list(claims.hopeless()) == ["poison"]
    # and one that fails at that too is given no suspect
    claims = Claims()
    assert claims.claim("broken", ["x"], 0.0, judged=OLD) == "x"
    for attempt in range(10):
        die(claims, "broken", attempt + 1.0)
        assert claims.claim("broken", ["x"], attempt + 1.0, judged=OLD) == "old"
    assert claims.claim("broken", ["x", "new"], 20.0, judged=OLD) is None
    die(claims, "broken", 21.0)
    assert claims.claim("broken", ["x", "new"], 21.0, judged=OLD) == "new"
    assert claims.claim("works", ["x"], 22.0, judged=OLD) == "x"


def test_a_suspect_is_left_to_a_validator_that_has_not_failed_at_it() -> None:
    claims = Claims()
    assert batch(claims, "w", [], 0.0) == []  # it asks, and finds nothing
    assert batch(claims, "v", ["x"], 1.0) == ["x"]
    die(claims, "v", 2.0)
    assert batch(claims, "v", ["x"], 3.0) == []
    assert claims.next_change(3.0) == rules.ASKED_LATELY_S
    assert batch(claims, "w", ["x"], 4.0) == ["x"]
    die(claims, "w", 5.0)
    assert batch(claims, "v", ["x"], 6.0) == ["x"]  # both have failed: nobody is better placed


def test_a_claim_lasts_as_long_as_its_validator_says_that_it_lives_but_not_for_ever() -> None:
    claims, silence, longest = Claims(), rules.CLAIM_TIMEOUT_S, rules.LONGEST_CLAIM_S
    assert batch(claims, "dies", ["x"], 0.0) == ["x"]
    claims.prolong("dies", 100.0)
    claims.prolong("v", 200.0)  # another's word says nothing of it
    assert claims.next_change(100.0) == 100.0 + silence
    assert batch(claims, "v", ["x"], 99.0 + silence) == []
    assert batch(claims, "v", ["x"], 100.0 + silence) == ["x"]
    assert claims.suspects == 1
    claims.settle("dies", "x")  # it was slow after all: the first verdict counts
    assert claims.suspects == len(claims) == 0
    assert batch(claims, "long prefill", ["x"], 0.0) == ["x"]
    for now in range(0, int(longest), 10):
        claims.prolong("long prefill", float(now))
        assert batch(claims, "v", ["x"], float(now)) == []
    assert batch(claims, "v", ["x"], longest) == ["x"]


def test_suspects_take_turns_with_work_that_never_ends() -> None:
    claims = Claims()
    assert batch(claims, "v", ["x"], 0.0) == ["x"]
    die(claims, "v")
    late = 1.0 + rules.SUSPECT_WAIT_S
    for now, waiting in ((late, "b"), (late - 1, "c")):  # it judged nothing since; too early
        assert batch(claims, "v", ["x", waiting], now) == [waiting]
        claims.settle("v", waiting)
    assert batch(claims, "v", ["x", "d"], late) == ["x"]


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(1, 3))
def test_poison_ends_three_processes_a_file_and_costs_no_other_file(seed, poisons, validators):
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
            die(claims, name, now)
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


@pytest.mark.parametrize(("async_level", "offered"), [(0, 0), (1, 1)])
def test_what_can_train_no_more_is_not_offered(tmp_path: Path, async_level: int, offered: int):
    # given a step that closed at its deadline without a submission that nobody had judged
    run = started(async_level=async_level)
    run.work("x")
    late = run.submitted("y")
    run.now += 101.0
    assert [close.step for close in run.advance()] == [0]
    # then it is offered only where a later step may still train it
    with closing(journal_of(run, tmp_path)) as journal:
        assert [r.digest for r in journal.state.to_judge] == [late.digest] * offered


# -- Over HTTP -----------------------------------------------------------------------------------


def test_validators_give_back_fail_and_prolong_and_the_first_verdict_counts(site, monkeypatch):
    other, alive = SigningKey.generate(), list[str]()
    site.sign_roles(site.validator, other)
    with site.serving():
        worker = site.worker()
        (first, lease), (second, _) = (sample(site, *worker, note=note) for note in range(2))
        one, two = site.client(site.validator), site.client(other)
        claimed(one), claimed(one)
        monkeypatch.setattr(Claims, "prolong", lambda claims, key, now: alive.append(key))
        one.heartbeat({"busy_s": 0.0, "checked": 0})
        assert alive == [site.validator.public_hex] and two.next_submission(0.0) is None
        one.release_claims([first])
        one.release_claims([second], "ValueError in check bounds")
        assert status(site)["queue"] == {"to_judge": 2, "claimed": 0, "suspects": 1}
        assert claimed(two).submission == first
        two.verdict(*verdict(first, lease, other))
        one.verdict(*verdict(first, lease, site.validator, accepted=False))  # too late to count
        told = status(site)
        assert told["rejected_submissions"] == 0
        assert told["workers"][0]["accepted_rollouts"] == 4


REPEATED = f"duplicates: row 0: 3 runs of tokens of submission {'ab' * 32}, which was judged before"


def test_verdicts_that_do_not_fit_are_refused(site: Site):
    with site.serving():
        key, worker = site.worker()
        digest, lease = sample(site, key, worker)
        validator = site.client(site.validator)

        def made(**changes: Any) -> tuple[bytes, bytes]:
            return verdict(digest, lease, site.validator, **changes)

        right, table = made()
        for signed, body, words in (
            (*verdict(digest, lease, key), "may not sign it"),
            (right, made(task_rewards=(1.0, 1.0))[1], "names another body"),
            (*verdict(digest, replace(lease, step=1), site.validator), "not the submission's"),
            (*made(dropped=(2,)), "dropped_groups"),
            (*made(task_rewards=(float("nan"), 1.0)), "finite"),
            # what would not be the ledger's own words, so that an audit would find fault with it
            (*made(reason="looks good"), "reason"),
            (*made(accepted=False, reason=""), "reason"),
            (*made(accepted=False, reason=f"{WORKERS_GAPS}: excess 2 nats"), "coordinator"),
            (*made(accepted=False, reason=REPEATED), "coordinator"),
        ):
            answer = post(site, site.validator, "/v1/verdicts", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (400, True), words
        validator.verdict(right, table)
        assert validator.next_submission(0.0) is None
