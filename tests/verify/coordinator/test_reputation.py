"""Reputation, quarantine, ban and appeal: what a worker's history earns it."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.filled import Filled, key, started
from tests.verify.coordinator.over_http import check, granted, post, sample, status
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import (
    BanLifted,
    KeyBanned,
    QuarantineEnded,
    SubmissionJudged,
    WorkerQuarantined,
)
from verify.coordinator.machine.reputation import (
    CLEAR_AFTER,
    EXACT_CHECKS,
    QUARANTINE_AFTER,
    Standing,
    prefill_share,
    reputation,
)

NOISY, EXACT = "logprobs: row 0: 0.2 > 0.1", "assignment: row 0: 1 > 0"


def standing(run: Filled, name: str = "x") -> Standing:
    return run.state.workers[key(name)].standing


def reject(run: Filled, reason: str = NOISY, name: str = "x") -> None:
    record = run.lease(name)
    assert record is not None
    run.submit(record)
    run.judge(record, None, reason=reason)


def named(run: Filled, reason: str) -> str:
    """A reason with the last submission that was rejected, by which its worker can ask about it."""
    judged = [e for e in run.events if isinstance(e, SubmissionJudged) and not e.accepted][-1]
    step = run.state.leases[judged.lease].lease.step
    return f"{reason} (submission {judged.submission[:16]} of step {step})"


histories = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60)


def after(history: list[tuple[bool, bool]]) -> Standing:
    found = Standing()
    for accepted, recomputed in history:
        found = found.after_verdict(1, accepted=accepted, recomputed=recomputed)
    return found


def test_reputation_is_the_mean_of_the_stated_posterior():
    good = after(20 * [(True, True)])
    assert reputation(Standing()) == 0.0
    assert reputation(good) == 20 / 40
    assert reputation(after(20 * [(True, False)])) == 0.0  # nobody recomputed it

    for fallen in (
        good.after_verdict(1, accepted=False, recomputed=True),
        good.after_withholding(),
    ):
        assert reputation(fallen) == 0.0
        for _ in range(20):
            fallen = fallen.after_verdict(1, accepted=True, recomputed=True)
        assert reputation(fallen) == 20 / 60  # slower than the first time


@given(histories, st.floats(0, 1), st.floats(0, 1))
def test_the_share_stays_between_floor_and_start_and_follows_the_work(history, one, other):
    floor, start = sorted((one, other))
    before = after(history)
    share = prefill_share(before, start=start, floor=floor)

    better = before.after_verdict(1, accepted=True, recomputed=True)
    unseen = before.after_verdict(1, accepted=True, recomputed=False)
    worse = before.after_verdict(1, accepted=False, recomputed=True)

    assert 0.0 <= reputation(before) < 1.0
    assert floor <= prefill_share(better, start=start, floor=floor) <= share <= start
    assert prefill_share(unseen, start=start, floor=floor) == share
    assert prefill_share(worse, start=start, floor=floor) == start
    assert prefill_share(before.quarantined("why"), start=start, floor=floor) == 1.0


@pytest.mark.parametrize("check", sorted(EXACT_CHECKS))
def test_what_cannot_be_an_accident_is_quarantine_at_once(check: str):
    run = started(groups=40, max_groups=400)
    reject(run, f"{check}: row 0: 1 > 0")
    assert standing(run).quarantine == named(run, f"{check}: row 0: 1 > 0")
    assert run.state.share_of(key("x")) == 1.0


def test_rejections_by_measured_limits_are_quarantine_when_they_come_together():
    run = started(groups=40, max_groups=400)
    for _ in range(QUARANTINE_AFTER - 1):
        reject(run)
    assert standing(run).quarantine is None
    for _ in range(CLEAR_AFTER):
        run.work("x")
    reject(run)
    assert standing(run).quarantine is None  # the strike before it is forgotten
    reject(run)
    assert standing(run).quarantine == named(run, NOISY)


def test_quarantine_ends_with_enough_good_work_in_a_row():
    run = started(groups=40, max_groups=400)
    reject(run, EXACT)
    for _ in range(CLEAR_AFTER - 1):
        run.work("x")
    reject(run)
    for _ in range(CLEAR_AFTER - 1):
        run.work("x")
    assert standing(run).quarantine is not None

    run.work("x")

    assert standing(run).quarantine is None and standing(run).strikes == 0
    assert isinstance(run.events[-1], QuarantineEnded)
    assert sum(isinstance(e, WorkerQuarantined) for e in run.events) == 1


def test_what_nobody_recomputed_does_not_lead_out_of_quarantine():
    # given submissions handed in before a worker is caught, of which none is drawn
    run = started(groups=40, max_groups=400)
    earlier = []
    for _ in range(CLEAR_AFTER + 1):
        record = run.lease("x")
        assert record is not None
        run.submit(record)
        earlier.append(record)
    run.judge(earlier.pop(), None, reason=EXACT)

    for record in earlier:
        run.judge(record, ["usable", "usable"], recomputed=False)

    assert standing(run).quarantine is not None and standing(run).strikes == 1


def operate(site: Site, what: str, key: str, reason: str, *, by: SigningKey) -> httpx.Response:
    body = canonical_json({"key": key, "reason": reason})
    return post(site, by, f"/v1/operator/{what}", body)


def test_a_banned_key_is_refused_until_its_ban_is_lifted(site: Site):
    with site.serving():
        key, worker = site.worker()
        granted(site, worker)

        banned = operate(site, "ban", key.public_hex, "edited tokens", by=site.coordinator)

        assert banned.status_code == 200
        with pytest.raises(UserError, match="403, this key is banned: edited tokens") as refused:
            worker.lease(0.0)
        assert f"To appeal, send this message and the key {key.public_hex}" in str(refused.value)
    with site.serving():  # and a restart changes nothing
        worker = site.client(key)
        with pytest.raises(UserError, match="403, this key is banned: edited tokens"):
            worker.register("near", {})
        told = status(site)
        assert told["banned"] == {key.public_hex: "edited tokens"}
        assert [w["standing"] for w in told["workers"]] == ["banned"]

        lifted = operate(site, "unban", key.public_hex, "the wrong key", by=site.coordinator)

        assert lifted.status_code == 200
        granted(site, worker)
        (mine,) = status(site)["workers"]
        assert (mine["standing"], mine["prefill_share"]) == ("quarantined", 1.0)
        assert mine["reason"] == "its ban was lifted: the wrong key"

    # and the ledger keeps both
    with closing(Ledger(site.run_dir / "state.db")) as ledger:
        kinds = [type(e) for e in ledger.events()]
    assert kinds.count(KeyBanned) == kinds.count(BanLifted) == 1


def test_a_worker_learns_why_it_was_banned_by_which_submission_and_how_to_appeal(
    site: Site, monkeypatch
):
    monkeypatch.setattr("verify.coordinator.machine.consequences.BAN_AFTER", 2)
    with site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        # given a worker whose work is rejected again and again
        for _ in range(2):
            last, lease = sample(site, key, worker)
            check(site, validator, accepted=False)

        # when it asks for more, then it is told check, number, limit, submission, and whom to ask
        with pytest.raises(UserError, match="403, this key is banned") as refused:
            worker.lease(0.0)
        for words in (
            "2 submissions rejected, the last one for logprobs: row 0: 0.25 > 0.1",
            f"(submission {last[:16]} of step {lease.step})",
            f"To appeal, send this message and the key {key.public_hex} to whoever invited you",
        ):
            assert words in str(refused.value)
        # and whoever is asked sees the same, grants it, and the worker goes on
        (mine,) = status(site)["workers"]
        assert mine["standing"] == "banned" and mine["reason"] in str(refused.value)
        assert operate(site, "unban", key.public_hex, "ok", by=site.coordinator).status_code == 200
        granted(site, worker)


def test_only_the_coordinators_own_key_bans_and_only_what_can_be_banned(site: Site):
    with site.serving():
        key, _ = site.worker()
        for what, whom, why, by, status in (
            ("ban", key.public_hex, "x", key, 403),
            ("ban", key.public_hex, "x", site.validator, 403),
            ("unban", key.public_hex, "x", key, 403),
            ("ban", "abc", "x", site.coordinator, 400),
            ("ban", key.public_hex, " ", site.coordinator, 400),
            ("ban", key.public_hex, "x" * 501, site.coordinator, 400),
            ("ban", site.validator.public_hex, "x", site.coordinator, 409),
            ("unban", key.public_hex, "x", site.coordinator, 409),
            ("ban", key.public_hex, "x", site.coordinator, 200),
            ("ban", key.public_hex, "x", site.coordinator, 409),
        ):
            assert operate(site, what, whom, why, by=by).status_code == status, (what, whom, why)
