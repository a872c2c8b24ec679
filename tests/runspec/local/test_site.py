"""The role groups of a site, and the addresses that its spec fixes."""

from __future__ import annotations

from pathlib import PurePath

from runspec.core.spec.load import SpecFiles
from runspec.core.spec.role_names import relay_names
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec
from runspec.lint.rules.placement import RESERVED
from runspec.local.endpoints import fixed_endpoints
from runspec.local.site import BASE_PORT, Disk, Restart, groups_of, site_spec
from tests.runspec.local.fake_run import ROOT, small_spec

ROOT_KEY = "ab" * 32


def spread(hosts: int) -> RunSpec:
    """The full run, whose learner has so many hosts."""
    spec = check_spec(SpecFiles(ROOT / "specs" / "target_long.yaml"), environ={}).require()
    learner = spec.learner.model_copy(update={"hosts": hosts})
    return spec.model_copy(update={"learner": learner})


def test_the_trunk_keeps_the_run_and_all_others_wait_for_it() -> None:
    groups = {group.name: group for group in groups_of(small_spec())}
    assert list(groups) == ["trunk", "relay-local", "validators", "evaluator", "volunteers"]
    assert {group.name for group in groups.values() if group.disk is Disk.RUN} == {"trunk"}
    assert groups["trunk"].waits_for == ()
    assert all(groups[name].waits_for == ("trunk",) for name in groups.keys() - {"trunk"})
    assert all(group.devices == 0 and group.hardware is None for group in groups.values())


def test_the_learners_share_their_devices_and_are_restarted_together() -> None:
    groups = {group.name: group for group in groups_of(spread(16))}
    assert groups["learners"].members == tuple(f"learner-{i}" for i in range(1, 16))
    assert groups["learners"].disk is Disk.CHECKPOINTS
    for name in ("trunk", "learners"):
        assert groups[name].devices == 4
        assert groups[name].restart is Restart.TOGETHER
    assert groups["volunteers"].devices == 4
    assert groups["volunteers"].restart is Restart.ALONE
    # and one host has all of them, and nobody to wait for
    alone = {group.name: group for group in groups_of(spread(1))}
    assert "learners" not in alone
    assert (alone["trunk"].devices, alone["trunk"].restart) == (64, Restart.ALONE)


def test_no_pool_can_be_called_like_a_group() -> None:
    spec = spread(16)
    names = {group.name for group in groups_of(spec)}
    assert names - {pool.name for pool in spec.samplers} - set(relay_names(spec)) <= set(RESERVED)


def test_a_command_is_what_a_person_types() -> None:
    group = next(group for group in groups_of(small_spec()) if group.name == "validators")
    command = group.command("validator-0", PurePath("site/bundles"), PurePath("/data/v"))
    assert " ".join(command) == (
        "runspec role validator-0 --bundle site/bundles/validator-0.json --dir /data/v"
    )
    assert "--dir" not in group.command("validator-0", PurePath("site/bundles"), None)


def test_a_sites_spec_pins_the_root_and_every_address() -> None:
    spec = site_spec(small_spec("small", 5, "placement.host=10.0.0.7"), ROOT_KEY)
    assert spec.identity.root_public_key == ROOT_KEY
    endpoints = fixed_endpoints(spec)
    assert endpoints.all() == {
        "coordinator": f"http://10.0.0.7:{BASE_PORT}",
        "origin": f"http://10.0.0.7:{BASE_PORT + 1}",
        "relay-local": f"http://10.0.0.7:{BASE_PORT + 2}",
    }
    # and URLs of the spec's own stay
    url = "placement.url=https://run.example.org/"
    named = small_spec("small", 5, "placement.base_port=9000", "placement.host=::1", url)
    relay = named.broadcast.relays[0].model_copy(update={"url": "https://r.example.org/"})
    broadcast = named.broadcast.model_copy(update={"relays": [relay]})
    several = named.learner.model_copy(update={"hosts": 2})
    named = named.model_copy(update={"broadcast": broadcast, "learner": several})
    endpoints = fixed_endpoints(site_spec(named, ROOT_KEY))
    assert endpoints.all() == {
        "coordinator": "https://run.example.org",
        "origin": "http://[::1]:9001",
        "relay-local": "https://r.example.org",
        "learner": "http://[::1]:9003",
    }
