"""What the schema says of itself: a docstring, a unit and a change class for every field."""

from __future__ import annotations

import pytest

from runspec.core.spec.field_docs import field_doc
from runspec.core.spec.schema_fields import field_at, schema_fields


def test_every_field_has_a_docstring_that_is_a_sentence() -> None:
    docs = {path: field_doc(f) for path, f in schema_fields().items()}
    assert [path for path, doc in docs.items() if not doc.endswith((".", ")"))] == []


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("samplers.volunteers.dtype", "samplers.<name>.dtype"),
        ("samplers.volunteers", "samplers"),
        ("data.sources.words.params.min_word_len", "data.sources.<name>.params"),
        ("learner.mesh.fsdp", "learner.mesh.fsdp"),
        ("secrets.HF_TOKEN.from.env", "secrets.<name>.from.env"),
    ],
)
def test_paths_as_people_write_them(written: str, path: str) -> None:
    field = field_at(written)
    assert field is not None and field.path == path


def test_a_site_changes_nothing_that_is_learned() -> None:
    both = [path for path, f in schema_fields().items() if f.site and f.change == "newrun"]
    # The ledger and the states lie where a site has room; a run cannot lose them.
    assert both == ["verify.ledger", "checkpoints.dir"]
