"""Processes of one machine that keep fetched versions in one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broadcast.client import WeightsClient
from broadcast.disk import Cache
from tests.broadcast.conftest import Run, contents, fetch, fetched, not_fetched, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("patient")]

HOLDER = """
import sys
from pathlib import Path
from broadcast.client import WeightsClient
url, root, folder = sys.argv[1:]
with WeightsClient([url], run="demo", root_public_key=root, cache_dir=Path(folder)) as client:
    print(client.fetch(0, manifest_digest=None, deadline_s=600), flush=True)
    sys.stdin.read()
"""
"""Fetches version 0, and holds it until its standard input ends."""


def holder(run: Run, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, url, run.root, str(run.folder / "cache")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_processes_fetch_a_version_once_and_remove_it_after_the_last_one(run: Run) -> None:
    run.publish(0, weights())
    server, whole = run.static(), run.folder / "cache" / "v0"
    ours = run.client(server.url)
    with holder(run, server.url) as first, holder(run, server.url) as second:
        try:
            # given two processes and a client of this one, then each chunk was sent once
            assert said(first) == said(second) == fetch(ours) == whole
            chunks = [path for path in server.paths if "/chunks/" in path]
            infos = run.manifest(0).objects.values()
            assert len(chunks) == len(set(chunks)) == sum(len(info.chunks) for info in infos)
            # when one process needs the version no more, then the others have it still
            ours.prune(set())
            assert contents(whole) == weights()
            # also once another is killed, which holds nothing any more, while a third goes on
            first.kill()
            first.wait()
            ours.prune(set())
            assert contents(whole) == weights()
            # but not for ever
            second.communicate()
            ours.prune(set())
            assert not whole.exists()
        finally:
            first.kill()
            second.kill()


def test_what_another_removes_before_it_is_held_is_fetched_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(0, weights())
    server, hold = run.static(), Cache.hold
    client, other = run.client(server.url), run.client(server.url)
    removed: list[int] = []

    def late(cache: Cache, version: int) -> bool:
        if cache.whole(version).exists() and not removed:
            other.prune(set())
            assert not cache.whole(version).exists()
            removed.append(version)
        return hold(cache, version)

    monkeypatch.setattr(Cache, "hold", late)
    assert fetched(client) == weights()
    chunks = [path for path in server.paths if "/chunks/" in path]
    assert removed == [0] and len(chunks) == 2 * len(set(chunks))
    # and it is held from then on
    other.prune(set())
    assert fetched(client) == weights()


def test_a_version_is_replaced_by_its_last_holder_alone(run: Run) -> None:
    # given a version that two clients hold, which is no longer the one that is wanted
    run.publish(0, weights(seed=1))
    url = run.static().url
    clients: list[WeightsClient] = [run.client(url) for _ in range(2)]
    assert [fetched(client) for client in clients] == [weights(seed=1)] * 2
    shutil.rmtree(run.store)
    digest = run.publish(0, weights(seed=2))
    # then a holder is told that another one has it, which keeps its files
    not_fetched(clients[0], "used by someone else", "/.lock-v0", digest=digest)
    assert fetched(clients[1]) == weights(seed=1)
    # and replaces it after the other's `prune`
    clients[1].prune({1})
    assert fetched(clients[0], 0, digest) == weights(seed=2)
