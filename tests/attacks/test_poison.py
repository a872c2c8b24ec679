"""Files that end, fill or stall whoever reads or checks them: the validator goes on."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.attacks.mortal_validator import VALIDATOR, poison
from tests.fuzz.bounds import bounded
from tests.verify.bench import MODEL, Bench
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.over_http import status
from tests.verify.small_model import ParityTask, Worker
from tests.verify.test_workers_to_batches import DISHONEST, HONEST, SPEC, STEPS, at_work, work
from verify.checks.duplicates import fingerprints
from verify.coordinator.services.claims import ATTEMPTS
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts

DEADLINE_S = 120.0


class TestFileThatAllocates:
    """What a file takes to read is a small multiple of its bytes, wherever they lie."""

    @pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "problem_id", "proofs"])
    def test_a_column_that_is_all_of_the_file(self, bench: Bench, field: str) -> None:
        rows = [
            replace(row, **{field: large(field, number)})
            for number, row in enumerate(bench.honest())
        ]
        _, table = bench.packed(rows)
        assert len(table) > 4 << 20
        with bounded(3 * len(table)):
            assert len(decode_rollouts(table, max_rows=8, max_bytes=len(table))) == 8


def large(field: str, number: int) -> object:
    """A value of half a megabyte, another one for each row."""
    if field == "problem_id":
        return str(number) * (1 << 19)
    if field == "proofs":
        return [bytes(258)] * (1 << 11)
    return np.full(1 << 17, number, np.int32)


class TestFileThatStalls:
    def test_one_token_without_end(self, bench: Bench) -> None:
        """Thousands of equal runs are one run: an output is hashed some times and no more."""
        tokens, logprobs = np.full(32768, 7, np.int32), np.full(32768, -130 / 32768, np.float32)
        assert len(fingerprints(tokens, logprobs)) == 2  # of the whole, and of one run


class PoisonWorker(Worker):
    """Hands in a file that kills validators, once, and honest work after it."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        super().__init__(*arguments)
        self.directory, self.poisoned = directory, 0

    def rollouts(self, signed_lease: bytes, lease: Lease) -> list[Rollout]:
        rows = super().rollouts(signed_lease, lease)
        if not self.poisoned:
            longest = max((row.output_tokens for row in rows), key=len)  # as no other will be
            path = poison(self.directory, longest)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        self.poisoned += 1
        return rows


@pytest.mark.slow
class TestFileThatKillsValidators:
    """Whatever the fault of ours that it finds: a few processes die, and the run goes on."""

    def test_it_is_set_aside_and_everything_else_is_judged(self, tmp_path: Path) -> None:
        # given an honest worker, and one whose first submission kills validators that prefill it
        site = Site(tmp_path, SPEC)
        site.sign_roles(VALIDATOR)
        honest = Worker(HONEST, MODEL, SPEC, ParityTask())
        deadly = PoisonWorker(tmp_path / "weights", DISHONEST, MODEL, SPEC, ParityTask())

        # when validators are started again as often as they die
        deaths = []
        with at_work(site), ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work, site, worker) for worker in (deadly, honest)]
            command = [sys.executable, "-m", "tests.attacks.mortal_validator", site.url]
            command += [site.root.public_hex, str(tmp_path / "weights")]
            while (code := subprocess.call(command, timeout=DEADLINE_S)) != 0:
                deaths.append(code)
                assert len(deaths) < 10
            assert all(done.result(DEADLINE_S) for done in working)
            told = status(site)

        # then SIGKILL came three times, one file is set aside, and nobody was rejected
        assert set(deaths) == {-9} and len(deaths) >= ATTEMPTS
        assert told["rejected_submissions"] == 0
        (aside,) = told["set_aside"]
        assert aside["worker"] == DISHONEST.public_hex and len(aside["attempts"]) >= ATTEMPTS
        manifests = [site.batch(step) for step in range(STEPS)]
        assert all(manifest.complete for manifest in manifests)
        trained = {group.submission for manifest in manifests for group in manifest.groups}
        assert aside["submission"] not in trained
