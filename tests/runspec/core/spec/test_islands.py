"""Islands of a spec: their names, and the spec by which one of them trains."""

from __future__ import annotations

import pytest

from runspec.core.spec.islands import island_names, island_spec, step_overlap
from runspec.core.spec.resolved import dump_resolved, parse_resolved
from runspec.core.spec.schema import Islands, RunSpec
from tests.runspec.core.spec.spec_files import BASE, DOCUMENTS, load


def spec_of(path: object, *overrides: str) -> RunSpec:
    spec = load(path, *overrides).spec  # type: ignore[arg-type]
    assert spec is not None
    return spec


def test_one_learner_has_no_islands() -> None:
    spec = spec_of(BASE)
    assert island_names(spec) == []
    assert island_spec(spec, "learner") is spec
    assert step_overlap(spec) == 0


def test_a_count_becomes_members() -> None:
    spec = spec_of(BASE, "learner.islands.count=3")
    assert island_names(spec) == ["0", "1", "2"]
    assert spec.learner.islands is not None and spec.learner.islands.count is None
    assert parse_resolved(dump_resolved(spec), place="spec.json") == spec


@pytest.mark.parametrize("wrong", ["{}", "{count: 2, members: [{name: a}]}", "{members: []}"])
def test_either_members_or_a_count(wrong: str) -> None:
    [found] = load(BASE, f"learner.islands={wrong}").findings
    assert (found.code, found.path) == ("bad-value", "learner.islands")
    assert "exactly one of members and count" in found.message


def test_a_name_belongs_to_one_island() -> None:
    [found] = load(BASE, "learner.islands.members=[{name: a}, {name: a}]").findings
    assert found.code == "duplicate-name"


def test_the_sparse_codec_goes_without_momentum() -> None:
    assert Islands.model_validate({"count": 2}).outer.momentum == 0.9
    sparse = {"count": 2, "codec": {"kind": "sparse"}}
    assert Islands.model_validate(sparse).outer.momentum == 0.0
    asked = Islands.model_validate({**sparse, "outer": {"momentum": 0.5}})
    assert asked.outer.momentum == 0.5


def test_an_island_trains_its_part_of_documents_on_its_own_machine() -> None:
    own = "{name: b, hardware: {kind: cpu, count: 4}, mesh: {data: 4}, hosts: 2, rows: 2}"
    spec = spec_of(
        DOCUMENTS,
        f"learner.islands={{members: [{{name: a}}, {own}], overlap: 1}}",
    )
    a, b = island_spec(spec, "a"), island_spec(spec, "b")
    assert a.learner == spec.learner.model_copy(update={"islands": None})
    assert (b.learner.mesh.devices, b.learner.hosts, b.learner.packing.rows) == (4, 2, 2)
    assert b.learner.packing.tokens == spec.learner.packing.tokens
    assert a.supervised and a.supervised.tokens_per_update == 512
    assert step_overlap(spec) == 1
    with pytest.raises(KeyError):
        island_spec(spec, "c")


def test_an_islands_part_of_the_groups_is_rounded_up() -> None:
    spec = spec_of(BASE, "learner.islands.count=3", "algorithm.prompts_per_step=10")
    assert island_spec(spec, "2").grpo.prompts_per_step == 4
