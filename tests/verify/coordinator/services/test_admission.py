"""Who may register: open runs, invites and their uses, the run's own keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from runspec.cli import app
from runspec.core.address import parse_join_link
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.invite import invite_key, make_invite, open_invite, use_invite
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from runspec.local.endpoints import Endpoints, save_endpoints
from runspec.local.run_dir import hold
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from tests.verify.coordinator.over_http import post
from verify.audit.replay import audit

DAY_S = 86400.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run that takes invited workers only."""
    spec = tiny_spec()
    verify = spec.verify.model_copy(update={"admission": "invite"})
    site = Site(tmp_path, spec.model_copy(update={"verify": verify}))
    site.publish(0)
    with site.origin():
        yield site


def invite(site: Site, *, pool: str | None = None, uses: int = 1, valid_s: float = DAY_S) -> str:
    return make_invite(RUN, pool=pool, uses=uses, valid_s=valid_s, coordinator=site.coordinator)


def test_who_was_not_invited_is_refused_and_who_was_works(site: Site):
    with site.serving():
        client = site.client(SigningKey.generate())
        with pytest.raises(UserError, match="403, this run takes invited workers only"):
            client.register("near", {})

        client.register("near", {}, invite=invite(site))

        client.register("near", {})  # as the worker process does: known by now
        assert client.lease(5.0) is not None
        used = invite(site)
        site.client(SigningKey.generate()).register("near", {}, invite=used)
    with site.serving(), pytest.raises(UserError, match="403, the invite was used 1 times, as oft"):
        site.client(SigningKey.generate()).register("near", {}, invite=used)  # after a restart too


def test_an_invite_is_for_its_pool_its_time_and_its_run(site: Site):
    with site.serving():
        client = site.client(SigningKey.generate())
        other = make_invite("other", pool=None, uses=1, valid_s=1.0, coordinator=site.coordinator)
        forged = make_invite(RUN, pool=None, uses=1, valid_s=DAY_S, coordinator=site.validator)
        for text, said in (
            (invite(site, pool="far"), "the invite is for pool 'far'"),
            (invite(site, valid_s=-5.0), "invite: expired 5 s ago"),
            (other, "invite: of run 'other', not 'tiny'"),
            (forged, "may not sign it"),
        ):
            with pytest.raises(UserError, match=f"403, .*{said}"):
                client.register("near", {}, invite=text)
        with pytest.raises(UserError, match="copy the whole link"):
            client.register("near", {}, invite=invite(site)[:-1])


def test_a_trusted_pool_takes_only_keys_that_the_operator_named(tmp_path: Path):
    """An open run, whose pool `near` is trusted: unseeded, say, with updates in flight."""
    spec = tiny_spec()
    near, far = spec.samplers
    pools = [near.model_copy(update={"trust": "trusted", "in_flight_updates": True}), far]
    site = Site(tmp_path, spec.model_copy(update={"samplers": pools}))
    own = SigningKey.generate()
    site.own_worker("near-0", own)
    site.publish(0)
    with site.origin(), site.serving():
        stranger = site.client(SigningKey.generate())
        with pytest.raises(UserError, match="403, pool 'near' is trusted: it takes the run's own"):
            stranger.register("near", {})
        with pytest.raises(UserError, match="trusted, and the invite does not name it"):
            stranger.register("near", {}, invite=invite(site))
        with pytest.raises(UserError, match="403, this key is not registered"):
            stranger.lease(0.0)

        stranger.register("far", {})  # the untrusted pool is open all the same
        with pytest.raises(UserError, match="409, this key is a worker of pool 'far'"):
            stranger.register("near", {}, invite=invite(site, pool="near"))
        site.client(SigningKey.generate()).register("near", {}, invite=invite(site, pool="near"))
        site.client(own).register("near", {})


def test_what_one_worker_sent_is_of_no_use_to_another():
    coordinator, one, other = (SigningKey.generate() for _ in range(3))
    text = make_invite(RUN, pool=None, uses=1, valid_s=DAY_S, coordinator=coordinator)
    used = use_invite(text, one.public_hex)

    def opened(used: object, worker: str) -> object:
        keys = {coordinator.public_hex}
        return open_invite(used, run=RUN, worker=worker, coordinators=keys, now=0.0)

    assert opened(used, one.public_hex)
    with pytest.raises(BadSignature, match="the proof is for another key"):
        opened(used, other.public_hex)
    own_proof = use_invite(text.rpartition(".")[0] + "." + other.secret_hex, other.public_hex)
    with pytest.raises(BadSignature, match="may not sign it"):
        opened(own_proof, other.public_hex)
    fields = {"run": RUN, "key": one.public_hex, "pool": None, "uses": 1, "expires": -(10**400)}
    endless = sign_document("invite", fields, coordinator).decode()
    with pytest.raises(BadSignature, match="seconds since the epoch"):
        opened({**used, "document": endless}, one.public_hex)
    for odd in (None, [], {}, {"document": 1, "proof": 2}, {"document": "", "proof": ""}, "x" * 99):
        with pytest.raises(BadSignature):
            opened(odd, one.public_hex)


def told(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_a_revoked_invite_admits_nobody_and_who_came_with_it_stays(site: Site):
    # given three invites, of which one was used and one was made elsewhere
    SigningKey.generate().save(site.run_dir / "keys" / "root.key")
    first, late = SigningKey.generate(), SigningKey.generate()
    with site.serving(), hold(site.run_dir):
        save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))
        words = ("invite", site.run_dir, "--uses", "3", "--pool", "near", "--expires", "2h")
        links = [told(*words).output.strip() for _ in range(2)]
        invites = [parse_join_link(link).invite for link in links]
        assert parse_join_link(links[0]).coordinator == site.url
        elsewhere = invite(site, uses=2)
        site.client(first).register("near", {}, invite=invites[0])

        # when they are revoked: by link, by the beginning of its key, and by its whole key
        by_link = told("invite", site.run_dir, "--revoke", links[0], "--reason", "it was published")
        by_start = told("invite", site.run_dir, "--revoke", invite_key(invites[1] or "")[:12])
        by_key = told("invite", site.run_dir, "--revoke", invite_key(elsewhere))

        # then nobody comes with them, and who came before works on
        assert [each.exit_code for each in (by_link, by_start, by_key)] == [0, 0, 0], by_link.output
        assert "no more keys come with it" in by_link.output
        with pytest.raises(UserError, match="403, the invite was revoked: it was published"):
            site.client(late).register("near", {}, invite=invites[0])
        for text in (invites[1], elsewhere):
            with pytest.raises(UserError, match="403, the invite was revoked: the link is no long"):
                site.client(late).register("near", {}, invite=text)
        assert site.client(first).lease(5.0) is not None
        body = canonical_json({"key": first.public_hex, "reason": "x"})
        assert post(site, first, "/v1/operator/revoke", body).status_code == 403
        again = told("invite", site.run_dir, "--revoke", links[0])
        assert "409, revoked already: it was published" in str(again.exception)

    # and so it is after a restart, and in the list
    with site.serving(), hold(site.run_dir):
        save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))
        with pytest.raises(UserError, match="403, the invite was revoked: it was published"):
            site.client(late).register("near", {}, invite=invites[0])
        site.client(first).register("near", {})
        rows = json.loads(told("invite", site.run_dir, "--list", "--json").stdout)
        assert [(row["uses"], row["used"], row["revoked"]) for row in rows] == [
            (3, 1, "it was published"),
            (3, 0, "the link is no longer valid"),
            (None, 0, "the link is no longer valid"),
        ]
        table = told("invite", site.run_dir, "--list").output
        assert "1 of 3" in table and "revoked: it was published" in table
    report = audit(site.run_dir, root_key=site.root.public_hex)
    assert report.findings == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--pool", "none"), "no sampler pool 'none'"),
        (("--expires", "soon"), "--expires"),
        (("--revoke", "abc"), "0 known keys begin with it"),
        (("--revoke", "http://here:1/#run=x&root=" + "ab" * 32), "invite: "),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(site: Site, option, said):
    with site.serving(), hold(site.run_dir):
        save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))
        SigningKey.generate().save(site.run_dir / "keys" / "root.key")
        result = told("invite", site.run_dir, *option)
        shown = result.exception if isinstance(result.exception, UserError) else result.output
        assert result.exit_code != 0 and said in str(shown)
