"""Who may register: open runs, invites and their uses, the run's own keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runspec.cli import app
from runspec.common.errors import UserError
from runspec.common.invite import make_invite, open_invite, use_invite
from runspec.common.join_link import parse_join_link
from runspec.common.keys import SigningKey
from runspec.common.signed import BadSignature
from runspec.local.endpoints import Endpoints, save_endpoints
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec

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


def test_uses_are_counted_in_the_ledger_so_that_a_restart_resets_none(site: Site):
    text, keys = invite(site, uses=2), [SigningKey.generate() for _ in range(3)]
    with site.serving():
        for _ in range(3):  # the same key again uses nothing up
            site.client(keys[0]).register("near", {}, invite=text)
        site.client(keys[1]).register("near", {}, invite=text)
    with site.serving():
        with pytest.raises(UserError, match="403, the invite was used 2 times, as often as"):
            site.client(keys[2]).register("near", {}, invite=text)
        site.client(keys[0]).register("near", {})


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


def test_the_runs_own_workers_need_no_invite(site: Site):
    own = SigningKey.generate()
    own.save(site.run_dir / "keys" / "near-0.key")
    with site.serving():
        site.client(own).register("near", {})


def test_a_trusted_pool_takes_only_keys_that_the_operator_named(tmp_path: Path):
    """An open run, whose pool `near` is trusted: unseeded, say, with updates in flight."""
    spec = tiny_spec()
    near, far = spec.samplers
    pools = [near.model_copy(update={"trust": "trusted", "in_flight_updates": True}), far]
    site = Site(tmp_path, spec.model_copy(update={"samplers": pools}))
    own = SigningKey.generate()
    own.save(site.run_dir / "keys" / "near-0.key")
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
    for odd in (None, [], {}, {"document": 1, "proof": 2}, {"document": "", "proof": ""}, "x" * 99):
        with pytest.raises(BadSignature):
            opened(odd, one.public_hex)


def test_the_command_prints_a_link_that_a_join_takes(site: Site):
    with site.serving():
        SigningKey.generate().save(site.run_dir / "keys" / "root.key")
        save_endpoints(site.run_dir, Endpoints(site.url, site.weights, {}))

        words = ["invite", str(site.run_dir), "--pool", "near", "--uses", "3", "--expires", "2h"]
        result = CliRunner().invoke(app, words)

        assert result.exit_code == 0, result.output
        link = parse_join_link(result.output.strip())
        assert str(link) == result.output.strip() and link.coordinator == site.url
        for _ in range(3):
            site.client(SigningKey.generate()).register("near", {}, invite=link.invite)
        with pytest.raises(UserError, match="used 3 times"):
            site.client(SigningKey.generate()).register("near", {}, invite=link.invite)


@pytest.mark.parametrize(
    ("option", "said"),
    [(("--pool", "none"), "no sampler pool 'none'"), (("--expires", "soon"), "--expires")],
)
def test_a_command_line_that_makes_no_sense_is_refused(site: Site, option, said):
    save_endpoints(site.run_dir, Endpoints("http://127.0.0.1:1", "http://127.0.0.1:2", {}))
    SigningKey.generate().save(site.run_dir / "keys" / "root.key")
    result = CliRunner().invoke(app, ["invite", str(site.run_dir), *option])
    assert isinstance(result.exception, UserError) and said in str(result.exception)


def test_an_invite_that_would_admit_to_no_pool_is_not_made(tmp_path: Path):
    spec = tiny_spec()
    pools = [pool.model_copy(update={"trust": "trusted"}) for pool in spec.samplers]
    site = Site(tmp_path, spec.model_copy(update={"samplers": pools}))

    result = CliRunner().invoke(app, ["invite", str(site.run_dir)])

    assert isinstance(result.exception, UserError)
    assert "takes only invites that name it" in str(result.exception)
    assert result.exception.remedy == "name one: near, far"
