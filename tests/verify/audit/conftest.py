import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.audit.tampering import Copy
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, tiny_spec, verdict
from verify.formats.lease import open_lease


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A real run of two closed steps and a third that is being filled: a rejected submission, a
    filtered one, one that waits for its verdict, and a second worker."""
    site = Site(tmp_path_factory.mktemp("audited"), tiny_spec(steps=4))
    site.publish(0)
    with site.origin(), site.serving():
        key, worker = site.worker()
        site.worker("far")
        validator = site.client(site.validator)

        def work(**findings: object) -> None:
            data = worker.lease(DEADLINE_S)
            assert data is not None
            lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
            worker.submit(*submission(data, lease, key))
            if findings.get("judged", True):
                item = validator.next_submission(DEADLINE_S)
                assert item is not None
                validator.verdict(*verdict(item.submission, lease, site.validator, **findings))  # type: ignore[arg-type]

        work(accepted=False)
        work(task_rewards=(1.0, 1.0))
        for step in range(2):
            work(), work()
            site.batch(step)
            site.publish(step + 1)
        work()
        work(judged=False)
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    """A copy of that run, to be tampered with."""
    shutil.copytree(audited.run_dir, tmp_path / "run")
    return Copy(tmp_path / "run", audited)
