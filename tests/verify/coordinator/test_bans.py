"""Bans: by the operator over HTTP, kept over a restart, explained to whom they hit."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.over_http import check, granted, post, sample, status
from verify.coordinator import reputation
from verify.coordinator.events import BanLifted, KeyBanned
from verify.ledger import Ledger


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
    monkeypatch.setattr(reputation, "BAN_AFTER", 2)
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
        (rejection, _) = status(site)["recent_rejections"]
        assert rejection["reason"] == "logprobs: row 0: 0.25 > 0.1"
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
