"""The JSON Schema: valid in both drafts, silent on what is right, loud on typos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runspec.cli.schema import schema_command
from runspec.core.spec.json_schema import DRAFTS, json_schema
from runspec.core.spec.schema_fields import schema_fields
from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import parse_yaml
from tests.runspec.core.spec.spec_files import SMALL, SPECS

VALIDATORS = {"07": jsonschema.Draft7Validator, "2020-12": jsonschema.Draft202012Validator}
EXAMPLES = SPECS.parent / "runspec" / "lint" / "examples"
SHIPPED = [*sorted(SPECS.rglob("*.yaml")), *sorted(EXAMPLES.rglob("good.yaml"))]


@pytest.fixture(params=list(DRAFTS), scope="module")
def validator(request: pytest.FixtureRequest) -> Any:
    kind = VALIDATORS[request.param]
    schema = json_schema(request.param)
    kind.check_schema(schema)
    return kind(schema)


def problems(validator: Any, text: str) -> list[str]:
    root = parse_yaml(text, "x.yaml").root
    assert root is not None
    return [
        f"{error.json_path}: {error.message}" for error in validator.iter_errors(to_python(root))
    ]


def test_shipped_files_show_no_errors(validator: Any) -> None:
    found = {path.name: problems(validator, path.read_text()) for path in SHIPPED}
    assert {name: said for name, said in found.items() if said} == {}
    assert problems(validator, SMALL) == []


@pytest.mark.parametrize(
    "layer",
    [
        "extends: [a.yaml]",
        "steps: ${STEPS}",
        "learner: {mesh: {fsdp: '${N:?how many}'}}",
        "algorithm: {fill: {deadline: null, max_groups: null}, clip: null}",
        "reward: {length: {alpha: 0.1}, code: null}",
        "samplers: {pool: {sampling: {temperature: 1}}}",
        "optimizer: {betas: [0.9, 1]}",
        "secrets: []",
        "data: {sources: {gym: {params: {words: 3, kind: x, fast: true}}}}",
        "version: runspec/v1\nkind: Placement\nname: here\nlearner: {hardware: {kind: cpu}}",
        "verify: {thresholds: {fp8: {gap: 0.1}}}",
    ],
)
def test_what_a_layer_may_say(validator: Any, layer: str) -> None:
    assert problems(validator, layer) == []


@pytest.mark.parametrize(
    ("layer", "place"),
    [
        ("stepz: 1", "$: "),
        ("algorithm: {grop_size: 1}", "$.algorithm: "),
        ("samplers: [{name: a, dtyp: float32}]", "$.samplers[0]: "),
        ("samplers: {a: {dtyp: float32}}", "$.samplers.a: "),
        ("samplers: [{dtype: float32}]", "$.samplers[0]: 'name' is a required"),
        ("samplers: {a: {dtype: float16}}", "$.samplers.a.dtype: "),
        ("samplers: {A B: {}}", "$.samplers: "),
        ("steps: '3'", "$.steps: "),
        ("steps: 0", "$.steps: "),
        ("steps: 1.5", "$.steps: "),
        ("algorithm: {fill: {deadline: 90}}", "$.algorithm.fill.deadline: "),
        ("learner: {hardware: {memory: 80 gigabytes}}", "$.learner.hardware.memory: "),
        ("optimizer: {betas: [0.9]}", "$.optimizer.betas: "),
        ("optimizer: {betas: [0.9, 0.9, 0.9]}", "$.optimizer.betas: "),
        ("kind: Placement\nsteps: 3", "$"),
        ("kind: Placement\nsamplers: {a: {dtype: float32}}", "$.samplers.a"),
        ("kind: Placement\nlearner: {compute_dtype: float32}", "$.learner"),
    ],
)
def test_what_it_may_not_say(validator: Any, layer: str, place: str) -> None:
    found = problems(validator, layer)
    assert found and found[0].startswith(place), found


@pytest.mark.parametrize("draft", list(DRAFTS))
def test_every_field_is_described_with_its_marks(draft: Any) -> None:
    schema = json_schema(draft)
    for path, field in schema_fields().items():
        at = schema
        for step in path.split("."):
            at = at["additionalProperties"] if step == "<name>" else at["properties"][step]
        assert at["x-change"] == field.change and at["x-site"] is field.site, path
        assert at.get("x-unit", "") == field.unit, path
        assert len(at["description"]) > 20, path


def test_defaults_are_as_yaml_writes_them() -> None:
    properties = json_schema("07")["properties"]["algorithm"]["properties"]
    assert properties["fill"]["properties"]["deadline"]["default"] == "90m"
    assert properties["group_size"]["default"] == 16


def test_draft_07_has_none_of_the_newer_words() -> None:
    text = json.dumps(json_schema("07"))
    assert "$defs" not in text and "prefixItems" not in text
    assert "$defs" in json.dumps(json_schema("2020-12"))


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert schema_command("2020-12") == 0
    assert json.loads(capsys.readouterr().out) == json_schema("2020-12")
    assert schema_command("04") == 2
    assert "there are: 07, 2020-12" in capsys.readouterr().err
