"""The files of the problems, from the publisher's machine over relays to workers that lack them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridge.publisher import Publisher
from broadcast.layout import data_run
from broadcast.relay import run_origin, run_relay
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec
from runspec.core.schema.source_files import source_files
from tests.broadcast.conftest import Served, metric
from tests.broadcast.fake_relay import FakeRelay, flipped
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.waiting import eventually
from verify.client import CoordinatorClient, problem_files
from verify.plugins import WeightsLocation

pytestmark = pytest.mark.slow
LOG = logging.getLogger("worker")
ROWS = json.dumps({"problem_id": "p"}).encode() * 1000


class Run:
    """Coordinator, publisher, origin and relay of a run whose problems are in files."""

    def __init__(self, folder: Path, stack: ExitStack, *names: str) -> None:
        self.files, self.folder, self.stack = folder / "files", folder, stack
        self.files.mkdir()
        for name in names:
            (self.files / name).write_bytes(name.encode() + ROWS)
        self.spec = self.spec_at(self.files)
        self.site = Site(folder, self.spec if names else tiny_spec())
        self.site.publisher.save(self.site.run_dir / "keys" / "publisher.key")
        self.store = self.site.run_dir / "store" / "origin"
        self.publish()
        self.origin = self.serve(run_origin, self.store)
        self.site.weights = self.origin.url
        stack.enter_context(self.site.serving())
        _, self.client = self.site.worker()

    def spec_at(self, uri: Path) -> RunSpec:
        return tiny_spec(data={"sources": [{"name": "s", "kind": "parquet", "uri": str(uri)}]})

    def publish(self) -> None:
        """What a publisher does at its start."""
        Publisher(self.site.run_dir, self.spec, LOG)

    def serve(self, kind: Callable[..., object], *words: object, **options: object) -> Served:
        served = Served(lambda started: kind(*words, log=LOG, started=started, **options))  # type: ignore[arg-type,return-value]
        self.stack.callback(served.stop)
        return served

    def relay(self, upstream: str, **options: object) -> Served:
        named = {"run": self.site.run, "root_public_key": self.site.root.public_hex}
        folder = self.folder / "relay"
        more = {"upstreams": [upstream], "keep_versions": 2} | options
        return self.serve(run_relay, folder, **named, **more)

    def wanted(self, *urls: str, own: str = "own") -> tuple[CoordinatorClient, RunSpec, object]:
        """Arguments of `problem_files` on a machine that has no file at the spec's path."""
        root, folder = self.site.root.public_hex, self.folder / own
        where = WeightsLocation(self.site.run, urls, root, folder / "weights")
        return self.client, self.spec_at(self.folder / "nowhere"), where

    def fetched(self, *urls: str, own: str = "own") -> dict[str, bytes]:
        client, spec, where = self.wanted(*urls, own=own)
        folder = problem_files(client, spec, where, LOG)  # type: ignore[arg-type]
        found = source_files(spec.data.sources[0], folder)
        return {name: path.read_bytes() for name, path in found.items()}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def rows(*names: str) -> dict[str, bytes]:
    return {name: name.encode() + ROWS for name in names}


def test_files_come_over_a_relay_once_for_all_processes_of_a_folder(tmp_path, stack):
    # given a run whose publisher has the files, a relay, and workers without them
    run = Run(tmp_path, stack, "a.parquet", "b.parquet")
    relay = run.relay(run.origin.url)
    # when two ask at once, then both have them, sent once, and nothing is kept twice
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run.fetched(relay.url), range(2)))
    assert both == [rows("a.parquet", "b.parquet")] * 2
    size = sum(map(len, both[0].values()))
    assert metric(relay.url, 'sent_bytes_total{what="chunk"}') == size
    left = [path.name for path in (tmp_path / "own" / "data" / ".fetched").glob("v*")]
    assert left == []
    # and a machine that has the same files fetches nothing
    client, _, where = run.wanted(relay.url, own="other")
    assert problem_files(client, run.spec, where, LOG) is None
    assert not (tmp_path / "other").exists()
    # and one whose copy was damaged has it anew, without the origin
    (tmp_path / "own" / "data" / "s" / "a.parquet").write_bytes(b"damaged")
    run.origin.stop()
    assert run.fetched(relay.url) == rows("a.parquet", "b.parquet")


def test_a_relay_that_sends_other_bytes_is_avoided(tmp_path, stack, caplog):
    run = Run(tmp_path, stack, "a.parquet")
    liar = FakeRelay(run.store)
    stack.callback(liar.stop)
    liar.answer("/chunks/", flipped)
    assert run.fetched(liar.url, run.origin.url) == rows("a.parquet")
    sources = tmp_path / "own" / "data" / "s"
    assert [path.name for path in sources.iterdir()] == ["a.parquet"]


def test_a_file_that_the_coordinator_does_not_list_is_refused_by_name(tmp_path, stack):
    # given a file that changed after the coordinator started, and a publisher that has the new one
    run = Run(tmp_path, stack, "a.parquet", "b.parquet")
    listed = (run.files / "b.parquet").read_bytes()
    (run.files / "b.parquet").write_bytes(b"other rows")
    run.client.site()
    run.publish()
    with pytest.raises(UserError, match=r"b.parquet of source s: published are other bytes"):
        run.fetched(run.origin.url)
    assert not (tmp_path / "own" / "data" / "s" / "b.parquet").exists()
    # and once it is published as it is listed, it is fetched
    (run.files / "b.parquet").write_bytes(listed)
    run.publish()
    assert run.fetched(run.origin.url) == rows("a.parquet", "b.parquet")


def test_what_a_revoked_key_published_is_published_again(tmp_path, stack):
    run = Run(tmp_path, stack, "a.parquet")
    run.site.publisher = type(run.site.publisher).generate()
    (run.site.run_dir / "keys" / "publisher.key").unlink()
    run.site.publisher.save(run.site.run_dir / "keys" / "publisher.key")
    run.site.sign_roles(run.site.validator)
    run.publish()
    assert run.fetched(run.origin.url) == rows("a.parquet")
    versions = run.store / data_run(run.site.run) / "versions"
    assert [path.name for path in versions.iterdir()] == ["1"]


def test_a_run_without_files_publishes_none_and_its_relay_says_nothing(
    tmp_path, stack, caplog, monkeypatch
):
    monkeypatch.setattr("broadcast.relay._POLL_S", 0.05)
    run = Run(tmp_path, stack)
    upstream = FakeRelay(run.store)
    stack.callback(upstream.stop)
    with caplog.at_level(logging.WARNING):
        relay = run.relay(upstream.url)
        asked = f"{data_run(run.site.run)}/latest.json"
        eventually(lambda: upstream.asked(asked) > 2, "it is looked for again and again")
        relay.stop()
    assert list(run.store.glob("*")) == []
    said = [line for line in caplog.messages if "no believable latest.json" in line]
    assert said and not any(".data" in line for line in said)
