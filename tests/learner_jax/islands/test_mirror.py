"""What an island brings from the coordinator into a folder of its own, and what it refuses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from broadcast.relay import run_origin
from broadcast.store import publish
from learner_jax.batch import BatchReader
from learner_jax.islands.mirror import Mirror, fetch_initial
from runspec.core.errors import UserError
from runspec.core.roles import ROLE_NAMES, sign_roles
from runspec.core.run_files import step_folder, submission_files
from runspec.core.signed import SigningKey
from tests.broadcast.conftest import Served, contents
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.island_run import island, sampled_spec
from tests.verify.coordinator.over_http import check, sample
from verify.formats.batch import BatchGroup
from verify.island_client import IslandClient

NEVER = threading.Event()


class FakeCoordinator:
    """Answers with the files of a run directory, changed as a test says."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.asked: list[str] = []
        self.change: dict[str, Callable[[bytes], bytes]] = {}
        """By the end of a file's name."""

    def roles(self) -> bytes:
        return self._read(self._run.path / "keys" / "roles.json")

    def batch(self, step: int, wait_s: float) -> bytes | None:
        path = step_folder(self._run.path, step) / "batch.json"
        return self._read(path) if path.exists() else None

    def file(self, step: int, name: str, *, max_bytes: int) -> bytes:
        data = self._read(step_folder(self._run.path, step) / name)
        assert len(data) <= max_bytes
        return data

    def _read(self, path: Path) -> bytes:
        self.asked.append(path.name)
        data = path.read_bytes()
        for end, change in self.change.items():
            if path.name.endswith(end):
                data = change(data)
        return data


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.fixture
def coordinator(run: Any) -> FakeCoordinator:
    return FakeCoordinator(run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "island"


def mirror(folder: Path, run: Any, coordinator: FakeCoordinator) -> Mirror:
    return Mirror(folder, run.spec, cast(IslandClient, coordinator), run.root.public_hex)


def test_the_readers_of_a_run_directory_read_the_islands_folder(run, coordinator, folder):
    # given a step, two of whose groups are another island's
    own, other = run.add_step(0, version=0, groups=2), run.add_step(1, version=0, groups=2)
    run.add_batch(1, own + other)
    run.add_batch(0, own)
    # when the island brings the manifest and the files of its own groups
    brought = mirror(folder, run, coordinator)
    assert brought.bring_manifest(0, NEVER)
    brought.bring_rollouts(0, own)
    # then a reader reads there what it reads in the run directory
    there, here = (BatchReader(p, run.spec, run.root.public_hex) for p in (run.path, folder))
    expected, found = there.read(there.manifest(0)), here.read(here.manifest(0))
    assert found.digest == expected.digest
    for a, b in zip(found.rollouts, expected.rollouts, strict=True):
        np.testing.assert_array_equal(a.output_tokens, b.output_tokens)
        assert a.advantage == b.advantage
    # and nothing else was asked for, and nothing is asked for twice
    assert not any(other[0].submission in name for name in coordinator.asked)
    coordinator.asked.clear()
    again = mirror(folder, run, coordinator)
    assert again.bring_manifest(0, NEVER)
    again.bring_rollouts(0, own)
    assert coordinator.asked == ["roles.json"]


@pytest.mark.parametrize("end", [".verdict.safetensors", ".verdict.json", ".safetensors", ".json"])
def test_a_file_that_is_not_what_the_manifest_names_never_appears(run, coordinator, folder, end):
    # given a coordinator, or somebody between, that changes a file
    (group, *_) = run.add_step(0, version=0, groups=1)
    files = vars(submission_files(folder, 0, group.submission)).values()
    (path,) = (p for p in files if p.name == f"{group.submission}{end}")
    brought = mirror(folder, run, coordinator)
    coordinator.change[path.name] = flipped
    # when it is brought, then it is refused by name
    with pytest.raises(UserError, match="is not to be believed") as caught:
        brought.bring_rollouts(0, [group])
    assert path.name in caught.value.thing and not path.exists()
    # and a later try brings it right
    coordinator.change.clear()
    brought.bring_rollouts(0, [group])
    assert path.exists()


def test_a_manifest_counts_only_with_the_coordinators_signature_and_for_its_step(
    run, coordinator, folder
):
    named = run.add_step(0, version=0)
    brought = mirror(folder, run, coordinator)
    run.add_batch(0, named, key=SigningKey.generate())
    with pytest.raises(UserError, match=r"manifest of step 0 .* which may not sign it"):
        brought.bring_manifest(0, NEVER)
    run.add_batch(0, named)
    (step_folder(run.path, 1)).mkdir(parents=True)
    (step_folder(run.path, 0) / "batch.json").rename(step_folder(run.path, 1) / "batch.json")
    with pytest.raises(UserError, match="of tiny step 0, not tiny step 1"):
        brought.bring_manifest(1, NEVER)
    assert not (folder / "rollouts").exists()


def test_what_was_signed_before_a_rollback_is_brought_anew(run, coordinator, folder):
    # given an island that has brought a step, and a rollback, which makes new keys
    groups = run.add_step(0, version=0)
    brought = mirror(folder, run, coordinator)
    brought.bring_manifest(0, NEVER)
    brought.bring_rollouts(0, groups)
    run.coordinator, run.validator = SigningKey.generate(), SigningKey.generate()
    run.sign_roles()
    groups = run.add_step(0, version=0)
    # when it begins again, then it has what counts now
    again = mirror(folder, run, coordinator)
    again.bring_manifest(0, NEVER)
    again.bring_rollouts(0, groups)
    reader = BatchReader(folder, run.spec, run.root.public_hex)
    assert len(reader.read(reader.manifest(0)).groups) == 4


def test_roles_are_never_replaced_by_older_ones_or_by_another_roots(run, coordinator, folder):
    old = (run.path / "keys" / "roles.json").read_bytes()
    run.sign_roles()
    newest = coordinator.roles()
    brought = mirror(folder, run, coordinator)
    coordinator.change["roles.json"] = lambda data: old
    brought.bring_roles()
    assert (folder / "keys" / "roles.json").read_bytes() == newest
    none: dict[str, list[str]] = {name: [] for name in ROLE_NAMES}
    foreign = sign_roles("tiny", none, SigningKey.generate(), valid_s=99.0)
    coordinator.change["roles.json"] = lambda data: foreign
    with pytest.raises(UserError, match=r"roles\.json of the coordinator is not to be believed"):
        brought.bring_roles()


def test_an_island_brings_its_own_groups_from_a_real_coordinator(tmp_path):
    # given a step of a run with workers, that is closed
    spec = sampled_spec()
    site = Site(tmp_path, spec)
    site.publish(0)
    with site.origin(), site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        for _ in range(2):
            sample(site, key, worker)
            check(site, validator)
        # when island b brings the manifest, and the files of its groups alone
        folder, root = tmp_path / "island", site.root.public_hex
        brought = Mirror(folder, spec, island(site, "b"), root)
        assert brought.bring_manifest(0, NEVER)
        manifest = BatchReader(folder, spec, root).manifest(0)
        (share,) = (share for share in manifest.shares if share.island == "b")
        own: list[BatchGroup] = manifest.groups[share.first : share.last]
        brought.bring_rollouts(0, own)
        # then they are the coordinator's, byte by byte
        named = {group.submission for group in own}
        assert named and len(list(step_folder(folder, 0).iterdir())) == 1 + 4 * len(named)
        for path in step_folder(folder, 0).iterdir():
            assert path.read_bytes() == (step_folder(site.run_dir, 0) / path.name).read_bytes()
        # and one that the manifest does not name is an error that says so
        stranger = BatchGroup("ab" * 32, "cd" * 32, 0, 0, 0)
        with pytest.raises(UserError, match="names no file abab"):
            brought.bring_rollouts(0, [stranger])


@pytest.mark.parametrize(("versions", "compared"), [((0, 5), True), ((5,), False)])
def test_the_starting_model_comes_from_the_broadcast_tree(run, tmp_path, versions, compared):
    # given versions on a real origin: the first is the reference policy, or gone
    wanted = {"model.safetensors": bytes(5000), "config.json": b"{}"}
    roles = (run.path / "keys" / "roles.json").read_bytes()
    for version in versions:
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        for name, data in wanted.items():
            (folder / name).write_bytes(data if version == versions[0] else b"another")
        publish(
            *(tmp_path / "store", folder),
            run="tiny",
            version=version,
            key=run.publisher,
            roles=roles,
        )
    folder, root = tmp_path / "island", run.root.public_hex
    log = logging.getLogger("test")

    def fetch(deadline_s: float) -> Path:
        return fetch_initial(
            *(folder, [origin.url]),
            run="tiny",
            root_public_key=root,
            compared=compared,
            deadline_s=deadline_s,
        )

    with ExitStack() as stack:
        origin = Served(lambda started: run_origin(tmp_path / "store", log=log, started=started))
        stack.callback(origin.stop)
        # when an island fetches one
        found = fetch(600.0)
    # then it lies where a run directory has it, and nothing else is left
    assert found == folder / "initial" and contents(found) == wanted
    assert list((folder / "work").iterdir()) == []
    # and it is not fetched again, though the origin is gone
    fetch(0.1)
