"""Stores of learner islands: signed by an island's key, published from memory, in any order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from broadcast.client import WeightsClient, WrongFiles
from broadcast.keygen import renew_keys
from broadcast.layout import stored_versions
from broadcast.store import AlreadyPublished, newest_version, prune, publish_objects
from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.roles import open_roles, sign_roles

from .conftest import CHUNK_BYTES, Run, contents

SHARE = {"share.bin": b"".join(i.to_bytes(8, "little") for i in range(700))}
SIZES = {"share.bin": 5600}


class IslandRun(Run):
    """A run of one island `a`, which publishes to `store`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self.island = SigningKey.generate()
        root = SigningKey.load(self.keys / "root.key")
        payload = open_roles(self.roles, root_public_key=self.root, run=self.name)
        named = {
            "publisher": [*payload.publisher],
            "coordinator": [*payload.coordinator],
            "validator": [*payload.validator],
        }
        signed = sign_roles(
            *(self.name, named, root),
            valid_s=1000.0,
            now=time.time() + 1.0,
            islands={"a": self.island.public_hex},
        )
        (self.keys / "roles.json").write_bytes(signed)

    def put(self, version: int, files: dict[str, bytes] = SHARE, **options: Any) -> str:
        return publish_objects(
            self.store,
            {name: memoryview(data) for name, data in files.items()},
            run=self.name,
            version=version,
            chunk_bytes=CHUNK_BYTES,
            **({"key": self.island, "roles": self.roles} | options),
        )

    def island_client(self, url: str) -> WeightsClient:
        return self.client(url, signers="island")


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[IslandRun]:
    with ExitStack() as stack:
        yield IslandRun(tmp_path / "run", stack)


def test_what_an_island_signed_reaches_a_client_by_its_digest(islands: IslandRun) -> None:
    digest = islands.put(7)
    client = islands.island_client(islands.origin().url)

    path = client.fetch(7, manifest_digest=digest, deadline_s=10, sizes=SIZES)

    assert contents(path) == SHARE
    assert client.received == 5600
    latest = client.latest(None, 10)
    assert latest is not None and latest.version == 7


def test_versions_come_in_any_order_and_again_after_they_were_pruned(islands: IslandRun) -> None:
    # given versions published out of order
    digests = {v: islands.put(v, {"share.bin": b"x" * v}) for v in (9, 5, 11, 8)}
    assert newest_version(islands.store, run="demo") == 11
    # when the old ones are pruned, then the newest by number stay
    prune(islands.store, run="demo", keep_versions=2)
    assert stored_versions(islands.store, "demo") == [9, 11]
    assert len(islands.chunks()) == 2
    # and a pruned one may come again, as what it was
    assert islands.put(5, {"share.bin": b"x" * 5}) == digests[5]


def test_other_contents_are_refused_by_the_digest_that_is_there(islands: IslandRun) -> None:
    digest = islands.put(3)
    assert islands.put(3) == digest
    before = islands.chunks()
    with pytest.raises(AlreadyPublished, match="version 3 is published already") as caught:
        islands.put(3, {"share.bin": b"another"})
    assert caught.value.manifest_digest == digest
    assert islands.chunks() == before


def test_each_kind_of_store_takes_and_gives_what_its_own_signers_signed(islands: IslandRun) -> None:
    # given a store that an island signed, and one of the publisher
    with pytest.raises(UserError, match=r"does not name .* as island of run 'demo'"):
        islands.put(1, key=islands.key)
    islands.put(1)
    url = islands.origin().url
    # when clients of the other kind fetch, then they believe nothing of it
    with pytest.raises(UserError, match="which may not sign it"):
        islands.client(url).fetch(1, manifest_digest=None, deadline_s=0.5)
    islands.island = islands.key
    islands.publish(2, SHARE)
    with pytest.raises(UserError, match="which may not sign it"):
        islands.island_client(url).fetch(2, manifest_digest=None, deadline_s=0.5)


@pytest.mark.parametrize(
    "files",
    [{"share.bin": b"x" * 5601}, {"share.bin": b"x" * 5600, "more": b""}, {"other": b"x" * 5600}],
    ids=["size", "another file", "name"],
)
def test_other_files_than_expected_are_refused_before_a_chunk_is_fetched(
    islands: IslandRun, files: dict[str, bytes]
) -> None:
    digest = islands.put(3, files)
    server = islands.static()
    client = islands.island_client(server.url)
    with pytest.raises(WrongFiles, match=r"must be share.bin of 5600 bytes; .* names ") as caught:
        client.fetch(3, manifest_digest=digest, deadline_s=10, sizes=SIZES)
    assert caught.value.place == server.url
    assert server.asked("/chunks/") == 0 and client.received == 0


def test_islands_stay_named_when_another_key_is_renewed(islands: IslandRun) -> None:
    renew_keys(islands.keys, ["publisher"])
    roles = open_roles(islands.roles, root_public_key=islands.root, run="demo")
    assert roles.islands == {"a": islands.island.public_hex}
