import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.audit.tampering import Copy, work
from tests.verify.coordinator.deployment import Site, tiny_spec


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A real run of two closed steps and a third that is being filled: a rejected submission, a
    filtered one, one that waits for its verdict, and a second worker."""
    site = Site(tmp_path_factory.mktemp("audited"), tiny_spec(steps=4))
    site.publish(0)
    with site.origin(), site.serving():
        worker = site.worker()
        site.worker("far")
        work(site, worker, accepted=False)
        work(site, worker, task_rewards=(1.0, 1.0))
        for step in range(2):
            work(site, worker)
            work(site, worker)
            site.batch(step)
            site.publish(step + 1)
        work(site, worker)
        work(site, worker, judged=False)
    yield site


@pytest.fixture
def run(audited: Site, tmp_path: Path) -> Copy:
    """A copy of that run, to be tampered with."""
    shutil.copytree(audited.run_dir, tmp_path / "run")
    return Copy(tmp_path / "run", audited)
