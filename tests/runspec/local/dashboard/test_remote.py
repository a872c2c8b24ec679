"""A page elsewhere reads a live run through its coordinator, and nobody else may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.run_files import initial_model
from runspec.local.dashboard.remote import CoordinatorSource
from runspec.local.dashboard.source import FolderSource
from runspec.local.dashboard.view import RunView
from tests.runspec.local.dashboard.made_run import bytes_tokenizer, metrics_row
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import check, sample


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A live coordinator with one rejected and one accepted submission, and two trained steps."""
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    folder = initial_model(site.run_dir)
    folder.mkdir()
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    lines = [json.dumps(metrics_row(step)) + "\n" for step in range(2)]
    (site.run_dir / "metrics.jsonl").write_text("".join(lines))
    with site.origin(), site.serving():
        key, worker = site.worker()
        validator = site.client(site.validator)
        sample(site, key, worker)
        check(site, validator)
        sample(site, key, worker, note=1)
        check(site, validator, accepted=False)
        yield site


def view(source: FolderSource | CoordinatorSource) -> RunView:
    made = RunView(source)
    made.refresh(60.0)
    assert made.trouble == ""
    return made


def test_the_page_shows_what_the_run_directory_does(site: Site) -> None:
    # when a page reads over HTTP with the coordinator's key
    remote = view(CoordinatorSource(site.url, site.coordinator))
    local = view(FolderSource(site.run_dir))
    there, here = json.loads(remote.answer({})), json.loads(local.answer({}))
    # then rollouts, curves and timeline are the same
    assert len(there["rollouts"][1]["rows"]) == 8
    for section in ("rollouts", "figures", "timeline"):
        assert there[section] == here[section]
    assert remote.rollouts.detail(0) == local.rollouts.detail(0)
    head = there["head"][1]
    assert (head["state"], head["step"], head["published"]) == ("running", 2, 0)
    assert [worker["pool"] for worker in head["workers"]] == ["near"]
    # and what comes later, too, also where the learner trains a step again
    (site.run_dir / "metrics.jsonl").write_text(json.dumps(metrics_row(0)) + "\n")
    remote.refresh()
    assert json.loads(remote.answer({}))["head"][1]["step"] == 1


def test_files_that_are_gone_are_counted(site: Site) -> None:
    for path in (site.run_dir / "rollouts").glob("*/*.verdict.safetensors"):
        path.unlink()
    remote = view(CoordinatorSource(site.url, site.coordinator))
    assert json.loads(remote.answer({}))["rollouts"][1]["unreadable"] == 2


@pytest.mark.parametrize("who", ["validator", "publisher", "stranger"])
def test_only_the_coordinators_own_key_may_read(site: Site, who: str) -> None:
    stranger = SigningKey.generate()
    key = {"validator": site.validator, "publisher": site.publisher, "stranger": stranger}[who]
    # given a source that has read the spec with the right key
    source = CoordinatorSource(site.url, site.coordinator)
    source._http._key = key
    # then with another one it gets nothing that is not public
    for read in (
        source.tokenizer,
        source.rows,
        lambda: list(source.events(0)),
        lambda: source.table("submission", 0, "ab" * 32),
    ):
        with pytest.raises(UserError, match=r": 40[13], "):
            read()
    # and a page with that key refuses the spec, which another key signed
    with pytest.raises(UserError, match="signed with another key"):
        CoordinatorSource(site.url, key)
