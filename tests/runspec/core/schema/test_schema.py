"""The schema: what its JSON form finds, and what it says of itself, in docs/spec.md too."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runspec.core.schema.field_docs import DRAFTS, field_doc, json_schema
from runspec.core.schema.fields import CHANGE_CLASSES
from runspec.core.schema.schema_fields import field_at, schema_fields
from runspec.core.schema.validate import to_python
from runspec.core.schema.yaml_nodes import parse_yaml
from tests.runspec.core.schema.field_table import with_table
from tests.runspec.core.schema.spec_files import EXAMPLES, SMALL, SPECS

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
    found = validator.iter_errors(to_python(root))
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize(
    "layer",
    [
        *(SMALL, *(path.read_text() for path in SHIPPED)),
        *("extends: [a.yaml]", "steps: ${STEPS}", "learner: {mesh: {fsdp: '${N:?how many}'}}"),
        "algorithm: {fill: {deadline: null, max_groups: null}, clip: null}",
        *("reward: {length: {alpha: 0.1}, code: null}", "optimizer: {betas: [0.9, 1]}"),
        *("samplers: {pool: {sampling: {temperature: 1}}}", "secrets: []"),
        "data: {sources: {gym: {params: {words: 3, kind: x, fast: true}}}}",
        "version: runspec/v1\nkind: Placement\nname: here\nlearner: {hardware: {kind: cpu}}",
        "verify: {thresholds: {fp8: {gap: 0.1}}}",
    ],
    ids=repr,
)
def test_what_a_layer_may_say_and_what_ships_shows_no_error(validator, layer):
    assert problems(validator, layer) == []


@pytest.mark.parametrize(
    ("place", "layers"),
    {
        "$: ": ["stepz: 1"],
        "$.algorithm: ": ["algorithm: {grop_size: 1}"],
        "$.samplers[0]: ": ["samplers: [{name: a, dtyp: float32}]"],
        "$.samplers[0]: 'name' is a required": ["samplers: [{dtype: float32}]"],
        "$.samplers: ": ["samplers: {A B: {}}"],
        "$.samplers.a: ": ["samplers: {a: {dtyp: float32}}"],
        "$.samplers.a.dtype: ": ["samplers: {a: {dtype: float16}}"],
        "$.steps: ": ["steps: '3'", "steps: 0", "steps: 1.5"],
        "$.algorithm.fill.deadline: ": ["algorithm: {fill: {deadline: 90}}"],
        "$.learner.hardware.memory: ": ["learner: {hardware: {memory: 80 gigabytes}}"],
        "$.optimizer.betas: ": ["optimizer: {betas: [0.9]}", "optimizer: {betas: [0.9, 0.9, 0.9]}"],
        "$": ["kind: Placement\nsteps: 3", "kind: Placement\nlearner: {compute_dtype: float32}"],
        "$.samplers.a": ["kind: Placement\nsamplers: {a: {dtype: float32}}"],
    }.items(),
)
def test_what_it_may_not_say(validator, place, layers):
    for layer in layers:
        found = problems(validator, layer)
        assert found and found[0].startswith(place), found


def test_the_page_has_every_field_as_a_sentence_and_every_class_of_change():
    docs = {path: field_doc(f) for path, f in schema_fields().items()}
    assert [path for path, doc in docs.items() if not doc.endswith((".", ")"))] == []
    page = (Path(__file__).parents[4] / "docs" / "spec.md").read_text(encoding="utf-8")
    # else: python -m tests.runspec.core.schema.field_table docs/spec.md
    assert with_table(page) == page
    for name, meaning in CHANGE_CLASSES.items():
        assert f"| `{name}` | {meaning} |" in page


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("samplers.volunteers.dtype", "samplers.<name>.dtype"),
        ("samplers.volunteers", "samplers"),
        ("data.sources.words.params.min_word_len", "data.sources.<name>.params"),
        ("secrets.HF_TOKEN.from.env", "secrets.<name>.from.env"),
    ],
)
def test_paths_as_people_write_them(written, path):
    field = field_at(written)
    assert field is not None and field.path == path


def test_a_site_changes_nothing_that_is_learned():
    both = [path for path, f in schema_fields().items() if f.site and f.change == "newrun"]
    # The ledger and the states lie where a site has room; a run cannot lose them.
    assert both == ["verify.ledger", "checkpoints.dir"]
