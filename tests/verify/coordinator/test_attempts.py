"""Failed attempts outlive the coordinator: as files, and at a coordinator that starts again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from tests.verify.coordinator.deployment import DEADLINE_S, Site, tiny_spec
from tests.verify.coordinator.filled import digest
from tests.verify.coordinator.test_set_aside import hand_in, judge, status
from verify.client import CoordinatorClient
from verify.coordinator.attempts import FOLDER, AttemptFiles
from verify.coordinator.claims import ATTEMPTS, Failure
from verify.coordinator.events import FailedAttempt

POISON, OTHER = digest("poison"), digest("other")


def failure(at: float, *, counts: bool = False) -> Failure:
    return Failure(FailedAttempt(at, "ab" * 32, "its process ended: \u2028ä"), counts)


def test_what_is_kept_is_there_for_the_next_process_and_what_is_forgotten_is_not(
    tmp_path: Path,
) -> None:
    files = AttemptFiles(tmp_path)
    assert files.load() == {}
    files.keep(POISON, [failure(1.5)])
    files.keep(POISON, [failure(1.5, counts=True), failure(2.5)])
    files.keep(OTHER, [failure(3.5)])
    files.forget(OTHER)
    files.forget(OTHER)

    found = AttemptFiles(tmp_path).load()

    assert found == {POISON: (failure(1.5, counts=True), failure(2.5))}


@pytest.mark.parametrize("text", ["", "[", "[{}]", '{"at": 1}', " " * (1 << 17)])
def test_a_damaged_file_is_said_and_costs_no_other(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = AttemptFiles(tmp_path)
    files.keep(OTHER, [failure(1.0)])
    (tmp_path / FOLDER / f"{POISON}.json").write_text(text)
    (tmp_path / FOLDER / "notes.json").write_text("somebody's own")

    with caplog.at_level(logging.WARNING):
        assert AttemptFiles(tmp_path).load() == {OTHER: (failure(1.0),)}

    assert f"attempts at {POISON[:16]} are forgotten" in caplog.text
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == sorted(
        [f"{OTHER}.json", "notes.json"]
    )


def test_a_disk_that_cannot_be_written_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file where a folder should be")
    files = AttemptFiles(tmp_path)
    with caplog.at_level(logging.WARNING):
        files.keep(POISON, [failure(1.0)])
        files.forget(POISON)
    assert "would be forgotten by a restart" in caplog.text


def test_a_poison_file_ends_three_validators_in_all_and_not_three_a_restart(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    with site.origin():
        poison = ""
        for death in range(ATTEMPTS):
            with site.serving():
                key, worker = site.worker()
                if death == 0:
                    poison = hand_in(site, key, worker, note=0)
                else:  # what has failed is offered after the rest
                    assert status(site)["queue"]["suspects"] == 1
                    judge_another(site, key, worker, note=death)
                # a validator's process claims it, and ends; so does the coordinator
                item = site.client(site.validator).next_submission(DEADLINE_S)
                assert item is not None and item.submission == poison
                site.client(site.validator).next_submission(0.0)
                assert kept(site) == [f"{poison}.json"]
        with site.serving():
            key, worker = site.worker()
            assert status(site)["set_aside"] == []

            judge_another(site, key, worker, note=ATTEMPTS)

            (aside,) = status(site)["set_aside"]
            assert aside["submission"] == poison and len(aside["attempts"]) == ATTEMPTS
            assert status(site)["queue"]["suspects"] == 0
    assert kept(site) == []


def kept(site: Site) -> list[str]:
    return sorted(path.name for path in (site.run_dir / FOLDER).iterdir())


def judge_another(site: Site, key: SigningKey, worker: CoordinatorClient, note: int) -> None:
    other, validator = hand_in(site, key, worker, note=note), site.client(site.validator)
    item = validator.next_submission(DEADLINE_S)
    assert item is not None and item.submission == other
    judge(site, validator, item)
