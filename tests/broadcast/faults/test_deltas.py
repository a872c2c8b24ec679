"""Faults on the way of a delta: in its chunks, in the chain, in the process that applies it."""

from __future__ import annotations

import logging

import pytest

from broadcast.manifest import read_manifest
from runspec.core.errors import UserError

from .. import fake_relay as lies
from ..conftest import Run, contents
from ..fake_relay import Answer, instead, only
from ..model_versions import ModelVersions

pytestmark = pytest.mark.slow


@pytest.fixture
def versions(run: Run) -> ModelVersions:
    """Version 0, whole, and 1 and 2 as deltas, each on the one before."""
    made = ModelVersions(run)
    made.publish(0)
    made.publish(1, base=0)
    made.publish(2, base=1)
    return made


def delta_chunk(run: Run, version: int) -> str:
    manifest = read_manifest(run.store / "demo" / "versions" / str(version))
    return manifest.delta["model.safetensors.delta"].chunks[0].blake3


def not_there(request: lies.Request) -> None:
    request.write(lies.head("404 Not Found", 0))


@pytest.mark.parametrize("lie", [lies.flipped, lies.truncated, lies.cut_off, instead(b"x" * 300)])
def test_a_bad_chunk_of_a_delta_is_blamed_and_fetched_again_alone(
    run: Run, versions: ModelVersions, lie: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    # given a follower with version 0, and a server that sends a chunk of a delta wrong, once
    server = run.static()
    client = run.client(server.url)
    client.fetch(0, manifest_digest=None, deadline_s=10)
    bad = delta_chunk(run, 1)
    server.answer(bad, only(1, lie))
    server.paths.clear()
    # when it fetches version 2, for which it needs both deltas
    with caplog.at_level(logging.WARNING):
        path = client.fetch(2, manifest_digest=None, deadline_s=10)
    # then that chunk came twice, the other once, the blame names them, and the bits are right
    assert contents(path) == versions.files(2)
    assert (server.asked(bad), server.asked(delta_chunk(run, 2))) == (2, 1)
    blamed = [r.getMessage() for r in caplog.records if r.getMessage().startswith(server.url)]
    assert any("model.safetensors.delta at byte 0, chunk " + bad[:16] in line for line in blamed)


@pytest.mark.parametrize("missing", ["manifest", "chunk"])
def test_a_missing_link_is_found_elsewhere_or_named(
    run: Run, versions: ModelVersions, missing: str
) -> None:
    # given a relay that has lost version 1, on which version 2 is built
    relay = run.static()
    relay.answer("versions/1/" if missing == "manifest" else delta_chunk(run, 1), not_there)
    # when a joiner fetches version 2 from it alone, then it is told what is missing, and where
    with pytest.raises(UserError) as failure:
        run.client(relay.url, cache="alone").fetch(2, manifest_digest=None, deadline_s=1)
    if missing == "manifest":
        assert "needs version 1, which no server has" in str(failure.value)
    else:
        assert delta_chunk(run, 1)[:16] in str(failure.value) and relay.url in str(failure.value)
    assert not (run.folder / "alone" / "v2").exists()
    # and with a second server, it has it
    both = run.client(relay.url, run.static().url)
    assert contents(both.fetch(2, manifest_digest=None, deadline_s=10)) == versions.files(2)
