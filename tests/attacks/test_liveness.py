"""Many keys of one attacker that would keep a run from its steps.

Coordinator, worker, validator and attacker over HTTP, with real signatures and a small model. The
same attacks on a whole run: `tests/e2e/test_whole_loop.py`, `python -m tests.campaigns liveness`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runspec.core.spec.schema import RunSpec
from tests.attacks.hostile_keys import attack, standings
from tests.verify.bench import MODEL
from tests.verify.coordinator.deployment import Site
from tests.verify.small_model import ParityTask, Worker, fixed_key, small_spec
from tests.verify.test_workers_to_batches import at_work, validate, work
from tests.waiting import eventually
from verify.formats.lease import Lease
from verify.formats.submission import Rollout

OWN, DEADLINE_S, STEPS = fixed_key(5), 60.0, 12


def spec_of_a_run() -> RunSpec:
    """All steps are leased at version 0, and leases last a second."""
    spec = small_spec()
    algorithm = spec.algorithm.model_copy(update={"async_level": STEPS})
    verify = spec.verify.model_copy(update={"lease_timeout": 1.0})
    return spec.model_copy(update={"steps": STEPS, "algorithm": algorithm, "verify": verify})


def misdeeds(site: Site) -> int:
    """Leases that strangers did not answer as they should."""
    _, others = standings(site.run_dir, OWN.public_hex)
    return sum(each.rejected + each.withheld for each in others)


class TestManyHostileKeys:
    """Rubbish from eight keys, eight that go silent, and one that answers one lease in four."""

    @pytest.mark.parametrize(
        ("name", "keys", "most"), [("rubbish", 8, 12), ("silent", 8, 8), ("alternating", 1, 3)]
    )
    def test_every_step_is_closed_whole(
        self, tmp_path: Path, name: str, keys: int, most: int
    ) -> None:
        # given a run that hostile keys attacked for a while when its own worker comes
        spec = spec_of_a_run()
        site = Site(tmp_path, spec)
        site.own_worker("home-0", OWN)

        def sample(signed: bytes, lease: Lease) -> list[Rollout]:
            return Worker(OWN, MODEL, spec, ParityTask()).rollouts(signed, lease)

        with ThreadPoolExecutor(3) as pool, at_work(site):
            where = {"url": site.url, "pool": "home"}
            attacker = pool.submit(attack, {name: keys}, site.client, **where, sample=sample)
            checked = pool.submit(validate, site, tmp_path / "weights", spec)
            eventually(lambda: misdeeds(site) >= most, f"{most} misdeeds")
            # when the worker works to the end of the run
            answered = pool.submit(work, site, Worker(OWN, MODEL, spec, ParityTask()))
            for each in (checked, answered, attacker):
                each.result(DEADLINE_S)
        # then every step was closed, complete
        assert all(site.batch(step).complete for step in range(STEPS))
        # and the worker has done no wrong
        own, _ = standings(site.run_dir, OWN.public_hex)
        assert own is not None
        assert (own.rejected, own.withheld, own.quarantine) == (0, 0, None)
