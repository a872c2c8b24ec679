"""The JSON Schema: valid in both drafts, silent on what is right, loud on typos."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from runspec.core.spec.json_schema import DRAFTS, json_schema
from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import parse_yaml
from tests.runspec.core.spec.spec_files import EXAMPLES, SMALL, SPECS

VALIDATORS = {"07": jsonschema.Draft7Validator, "2020-12": jsonschema.Draft202012Validator}
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
