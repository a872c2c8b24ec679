"""A run that trains on documents: its coordinator signs the rows of each step, and no more."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from runspec.core.errors import UserError
from runspec.core.keys import SigningKey
from runspec.core.process import RunStopped
from runspec.core.run_files import step_folder
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site
from tests.verify.coordinator.documents import ROWS, documents_spec
from tests.verify.coordinator.filled import Filled, digest
from tests.verify.coordinator.over_http import status
from tests.waiting import eventually
from verify.audit.findings import Report
from verify.audit.replay import audit
from verify.coordinator.machine import filling
from verify.coordinator.machine.events import (
    IllegalTransition,
    RolledBack,
    StepClosed,
    TrainedGroup,
)
from verify.coordinator.machine.stalls import Stalled, waited_for
from verify.coordinator.machine.state import Policy
from verify.coordinator.services.operator import closed_steps, record_rollback
from verify.formats.joining import open_site
from verify.formats.ranges import RangeManifest, RowRange, open_ranges

STEPS = 9


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Nine steps, a version published every second one; nothing is published yet."""
    site = Site(tmp_path, documents_spec(steps=STEPS))
    site.sign_roles()  # no validators
    with site.origin():
        yield site


def manifest(site: Site, step: int) -> RangeManifest:
    path = batch_path(site, step)
    eventually(path.exists, f"the rows of step {step}")
    keys = frozenset({site.coordinator.public_hex})
    return open_ranges(path.read_bytes(), coordinators=keys, run=RUN, step=step, rows_per_step=ROWS)


def batch_path(site: Site, step: int) -> Path:
    return step_folder(site.run_dir, step) / "batch.json"


def signed(site: Site) -> list[int]:
    return [step for step in range(STEPS + 1) if batch_path(site, step).exists()]


def audited(site: Site) -> Report:
    return audit(site.run_dir, root_key=site.root.public_hex)


def test_steps_are_signed_ahead_of_the_newest_version_to_the_last(site: Site) -> None:
    with site.serving():
        assert status(site)["waiting_for"].startswith("the publisher: version 0 is needed")
        assert signed(site) == []
        # when versions are published, with gaps, then the steps up to three after each are signed
        for version, last in ((0, 3), (2, 5), (6, 8)):
            site.publish(version)
            rows = [manifest(site, step).rows for step in range(last + 1)]
            assert rows == [RowRange(ROWS * s, ROWS * (s + 1)) for s in range(last + 1)]
            eventually(lambda n=last: status(site)["steps_closed"] == n + 1, "the status")
            if last < STEPS - 1:
                assert signed(site) == list(range(last + 1))
                assert status(site)["waiting_for"] == (
                    f"the learner: version {last - 2} or a newer one is needed, the newest "
                    f"published is {version}"
                )
        # then the run is finished, and the learner publishes what is left
        site.publish(STEPS)
        eventually(lambda: status(site)["newest_version"] == STEPS, "the last version")
        found = status(site)
        assert (found["state"], found["rows_signed"]) == ("finished", STEPS * ROWS)
        assert (found["open_steps"], found["workers"], found["validators"]) == ([], [], [])
        with urlopen(f"{site.url}/metrics") as answer:
            assert b"runspec_coordinator_steps_closed_total 9.0" in answer.read()
    assert (audited(site).findings, audited(site).steps_closed) == ([], STEPS)


def test_workers_are_refused_and_what_is_public_is_served(site: Site) -> None:
    site.publish(0)
    with site.serving():
        client = site.client(SigningKey.generate())
        refusals = (
            lambda: client.register("near", {}),
            lambda: client.lease(0.0),
        )
        for refused in refusals:
            with pytest.raises(UserError, match=r"404, a run of algorithm.kind pretrain trains on"):
                refused()
        with pytest.raises(UserError, match=r"403, roles\.json does not name this key"):
            client.next_submission(0.0)
        for path in ("spec", "roles", "site"):
            with urlopen(f"{site.url}/v1/{path}") as answer:
                document = answer.read()
                assert json.loads(document)
        keys = frozenset({site.coordinator.public_hex})
        assert open_site(document, coordinators=keys, run=RUN).files == []


def test_a_version_that_cannot_exist_stops_the_coordinator(site: Site) -> None:
    site.publish(5)
    with site.serving() as task:
        eventually(task.done, "its end")
        with pytest.raises(RunStopped, match="only 0 steps are closed"):
            task.result()


@contextmanager
def running(site: Site, port: int) -> Iterator[subprocess.Popen[str]]:
    process = site.process(port)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_a_killed_coordinator_goes_on_and_a_rollback_signs_the_same_rows(
    site: Site, free_port: int
) -> None:
    site.publish(0)
    with running(site, free_port):
        before = [manifest(site, step).rows for step in range(4)]
    # given a kill between the ledger and the file
    last = batch_path(site, 3)
    document = last.read_bytes()
    last.unlink()
    # when it starts again, then the same bytes are there, and the next steps follow
    site.publish(2)
    with site.serving():
        before += [manifest(site, step).rows for step in (4, 5)]
        assert last.read_bytes() == document
    assert audited(site).findings == []
    # given a rollback to a step between two versions
    spec = documents_spec(steps=STEPS)
    assert closed_steps(site.run_dir, spec) == 6
    for step in (3, 4, 5):
        shutil.rmtree(step_folder(site.run_dir, step))
    record_rollback(site.run_dir, spec, 3)
    (site.store / RUN / "latest.json").unlink()
    site.new_coordinator()
    with site.serving():
        assert signed(site) == [0, 1, 2]
        # when the learner publishes the version from which it goes on, then the same rows follow
        site.publish(3)
        assert [manifest(site, step).rows for step in (3, 4, 5)] == before[3:]
        assert manifest(site, 6).rows == RowRange(36, 42)
        # and the next version, which is again one of every second step, comes in time
        site.publish(4)
        assert manifest(site, 7).rows == RowRange(42, 48)
    assert audited(site).findings == []


# -- Decisions -------------------------------------------------------------------------------------


def run_of(**changes: int) -> Filled:
    return Filled(Policy.of(documents_spec(**changes)))


def close_all(run: Filled) -> list[int]:
    return [decision.step for decision in run.advance()]


@pytest.mark.parametrize("publish_every", [1, 2, 3, 10])
@pytest.mark.parametrize("start", [0, 7])
def test_the_learner_always_finds_its_next_step_signed(publish_every: int, start: int) -> None:
    # given a new run, or one that was rolled back to a step between two versions
    run = run_of(steps=25, publish_every=publish_every)
    for version in range(0, start, publish_every):
        run.publish(version)
        close_all(run)
    if start:
        run.record(RolledBack(run.now, start))
        assert close_all(run) == []
    run.publish(start)
    close_all(run)
    newest = start
    for step in range(start, 25):
        # then each step is signed before the learner trains it, and not far ahead
        assert run.state.next_close > step
        assert run.state.next_close <= newest + 2 * publish_every
        if (step + 1) % publish_every == 0 or step + 1 == 25:
            # and the steps up to the next version are signed although this one arrives late
            assert run.state.next_close >= min(25, step + 1 + publish_every)
            newest = step + 1
            run.publish(newest)
            close_all(run)
    assert run.state.finished


def test_only_the_first_version_has_a_deadline() -> None:
    run = run_of()
    patience = run.state.policy.deadline_s
    assert filling.decide_close(run.state, run.now + patience - 1.0) is None
    assert filling.next_due(run.state, run.now) == run.now + patience
    stalled = filling.decide_close(run.state, run.now + patience)
    assert isinstance(stalled, Stalled) and "waited for the publisher: version 0" in stalled.reason
    assert "algorithm.fill" not in stalled.remedy
    # when it is published, then the learner may take as long as it likes
    run.publish(0)
    close_all(run)
    assert filling.decide_close(run.state, run.now + 100.0 * patience) is None
    assert filling.next_due(run.state, run.now) is None
    assert waited_for(run.state).startswith("the learner: version 1 or a newer one")


def test_rows_close_in_order_and_name_no_groups() -> None:
    run = run_of(steps=2)
    run.publish(0)
    with pytest.raises(IllegalTransition, match="in order"):
        run.record(StepClosed(run.now, 1, (), "signed"))
    with pytest.raises(IllegalTransition, match="cannot be trained"):
        run.record(StepClosed(run.now, 0, (TrainedGroup(digest("lease"), 0),), "signed"))
    assert close_all(run) == [0, 1]
    with pytest.raises(IllegalTransition, match="in order"):
        run.record(StepClosed(run.now, 2, (), "signed"))


def test_many_steps_are_signed_while_requests_are_answered(tmp_path: Path) -> None:
    # given versions so rare that thousands of steps may be signed at once
    site = Site(tmp_path, documents_spec(steps=200, publish_every=100))
    site.publish(0)
    with site.origin(), site.serving():
        eventually(lambda: status(site)["steps_closed"] == 200, "all steps")
    assert audited(site).findings == []
