"""A head that is tied to the embedding follows it, also where vLLM loads all weights again."""

from __future__ import annotations

import pytest

from tests.sampler.engine.agreement import assert_follows
from tests.sampler.engine.models import Reference, perturbed_version

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("patched", [True, False])
def test_a_tied_head_follows_its_embedding(tied_engine, tied, tmp_path, monkeypatch, patched):
    if not patched:
        monkeypatch.setattr(tied_engine, "patch", lambda held, weights_dir: False)
    version = perturbed_version(tied, tmp_path / "v1", "embed_tokens.weight")
    assert_follows(tied_engine, version, Reference(version).outputs)
