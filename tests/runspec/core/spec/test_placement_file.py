"""One recipe at several sites: what a placement may say, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import CheckedSpec, check_spec
from tests.runspec.core.spec.spec_files import SAMPLING, SPECS, lines, small_spec, write

HEAD = "version: runspec/v1\nkind: Placement\nname: here\n"
RECIPES = SAMPLING
PLACEMENTS = sorted((SPECS / "placements").glob("*.yaml"))


def placed(folder: Path, text: str, *overrides: str, head: str = HEAD) -> CheckedSpec:
    """The small spec with a placement over it."""
    site = write(folder / "site.yaml", head + text)
    files = SpecFiles(small_spec(folder), placement=site, overrides=overrides)
    return check_spec(files, environ={})


def test_it_goes_over_the_profile_and_under_set(tmp_path: Path) -> None:
    write(tmp_path / "profiles/fast.yaml", "learner: {remat: none, attention: xla}")
    site = write(tmp_path / "site.yaml", HEAD + "learner: {remat: dots, hosts: 2}")
    files = SpecFiles(small_spec(tmp_path), "fast", site, ["learner.hosts=1"])
    spec = check_spec(files, environ={}).require()
    assert (spec.learner.remat, spec.learner.attention, spec.learner.hosts) == ("dots", "xla", 1)
    assert spec.name == "small", "the placement's own name is the site's"


def test_it_sets_pools_relays_and_whole_blocks(tmp_path: Path) -> None:
    spec = placed(
        tmp_path,
        """\
samplers: [{name: pool, replicas: 3, hardware: {kind: cpu, count: 2}}]
broadcast: {relays: {eu: {upstream: [origin]}}}
storage: {dir: /data}
secrets: {TOKEN: {from: {env: TOKEN}}}
budget: {max_hours: 2}
""",
    ).require()
    assert (spec.samplers[0].replicas, spec.samplers[0].hardware.count) == (3, 2)
    assert [relay.name for relay in spec.broadcast.relays] == ["eu"]
    assert (spec.storage.dir, spec.secrets[0].source.env, spec.budget.max_hours) == (
        "/data",
        "TOKEN",
        2.0,
    )


@pytest.mark.parametrize(
    ("text", "place", "path"),
    [
        ("steps: 5", "4:1", "steps"),
        ("algorithm: {kl: {coef: 0.0}}", "4:18", "algorithm.kl.coef"),
        ("learner: {compute_dtype: float32}", "4:11", "learner.compute_dtype"),
        ("samplers: {pool: {dtype: float32}}", "4:19", "samplers.pool.dtype"),
        ("samplers: [{name: pool, trust: trusted}]", "4:25", "samplers.pool.trust"),
        ("samplers: {pool: null}", "4:12", "samplers.pool"),
        ("samplers: []", "4:1", "samplers"),
        ("samplers: {more: {replicas: 1}}", "4:12", "samplers.more"),
        ("samplers: [{replicas: 1}]", "4:12", "samplers"),
        ("reward: {length: {alpha: 0.2}}", "4:19", "reward.length.alpha"),
        ("verify: {prefill_share: 0.0}", "4:10", "verify.prefill_share"),
        ("model: null", "4:1", "model"),
    ],
)
def test_what_is_the_recipes_is_refused_and_left_out(
    tmp_path: Path, text: str, place: str, path: str
) -> None:
    checked = placed(tmp_path, text)
    (finding,) = [f for f in checked.findings if f.severity == "error"]
    assert (finding.code, finding.path) == ("placement-scope", path)
    assert f"{finding.line}:{finding.column}" == place
    # then the spec is what the recipe says
    alone = check_spec(SpecFiles(tmp_path / "spec.yaml"), environ={})
    assert checked.spec == alone.spec


@pytest.mark.parametrize(
    ("head", "place"),
    [("version: runspec/v1\n", "1:1"), ("version: runspec/v1\nkind: Run\n", "2:7"), ("", "1:1")],
)
def test_a_spec_is_no_placement(tmp_path: Path, head: str, place: str) -> None:
    # given a file that says of itself that it is a spec, with much that a placement may not say
    checked = placed(tmp_path, "steps: 5\nseed: 3\n", head=head)
    (said,) = lines(checked, tmp_path)
    assert said.startswith(f"site.yaml:{place}: error placement-scope: kind: a file of kind")


def test_files_that_a_placement_extends_are_held_to_the_same(tmp_path: Path) -> None:
    write(tmp_path / "racks.yaml", "learner: {hosts: 2}\nseed: 4\n")
    (said,) = lines(placed(tmp_path, "extends: [racks.yaml]\n"), tmp_path)
    assert said.startswith("racks.yaml:2:1: error placement-scope: seed: ")


def test_by_itself_its_keys_types_and_scope_are_checked(tmp_path: Path) -> None:
    site = write(
        tmp_path / "site.yaml",
        HEAD
        + """\
learner: {hosts: many, mush: 1}
samplers: {anything: {replicas: 2}}
broadcast: {relays: {eu: null}}
seed: 3
""",
    )
    checked = check_spec(SpecFiles(site), environ={})
    assert [line.split(" error ")[1].split(": ")[0] for line in lines(checked, tmp_path)] == [
        "placement-scope",
        "unknown-key",
        "wrong-type",
    ]
    assert checked.spec is None


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda path: path.stem)
def test_shipped_placements_are_clean_alone_and_over_every_recipe(placement: Path) -> None:
    assert check_spec(SpecFiles(placement), environ={}).findings == []
    for recipe in RECIPES:
        checked = check_spec(SpecFiles(recipe, placement=placement), environ={})
        assert [str(f) for f in checked.findings] == []
