"""Files that end, fill or stall whoever decodes or checks them: the validator goes on."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.attacks.mortal_validator import poison
from tests.fuzz.tables import damaged
from tests.fuzz.test_tables import EVERY_FILE, KINDS
from tests.poison import inflating_pages, lying_page, skipped_pages
from tests.verify.bench import MODEL, Bench
from tests.verify.small_model import VOCAB, ParityTask, Worker, small_spec
from tests.verify.test_workers_to_batches import (
    HONEST,
    PERTURBED,
    ROOT,
    STEPS,
    coordinator,
    make_run_dir,
    origin,
    work,
)
from tests.verify.test_workers_to_batches import batch as batch_of
from verify.checks import fingerprints
from verify.coordinator.claims import ATTEMPTS
from verify.decoder import Decoder
from verify.examiner import Examiner, Verdict
from verify.formats.lease import Lease, lease_digest
from verify.formats.submission import Rollout, sign_submission

CPU_S = 1
DEADLINE_S = 120.0


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    decoder = Decoder(cpu_s=CPU_S)
    yield decoder
    decoder.close()


class Decoding:
    """An examiner as a validator's, with a decoder of its own."""

    def __init__(self, bench: Bench, decoder: Decoder) -> None:
        self.bench, self.decoder = bench, decoder

    def verdict(self, table: bytes) -> Verdict:
        """On a file that its worker has signed for the lease."""
        bench = self.bench
        envelope = sign_submission(
            table,
            run=bench.lease.run,
            step=bench.lease.step,
            index=bench.lease.index,
            lease=lease_digest(bench.signed_lease),
            key=bench.worker_key,
        )
        examiner = Examiner(
            bench.spec,
            task_set=bench.task_set,
            engine=bench.engine,
            vocab_size=VOCAB,
            wants_prefill=lambda submission: False,
            decode=self.decoder.decode,
        )
        return examiner.examine([bench.file(envelope, table)])[0]

    def refuses(self, table: bytes) -> str:
        """The reason; an honest file is read after it as before."""
        _, honest = self.bench.packed(self.bench.honest())
        assert self.verdict(honest).accepted
        verdict = self.verdict(table)
        assert not verdict.accepted and verdict.rows == []
        assert self.verdict(honest).accepted
        return verdict.reason


@pytest.fixture
def decoding(bench: Bench, decoder: Decoder) -> Decoding:
    return Decoding(bench, decoder)


class TestFileThatEndsArrow:
    """Of some files pyarrow ends the whole process: here of a size statistic of another length."""

    RAW = """
import io, sys, pyarrow.parquet as pq
meta = pq.ParquetFile(io.BytesIO(sys.stdin.buffer.read())).metadata
for group in range(meta.num_row_groups):
    for column in range(meta.num_columns):
        meta.row_group(group).column(column).total_uncompressed_size
"""

    @pytest.fixture
    def file(self) -> bytes:
        rng = random.Random(213843475017391)  # what `tests/fuzz` found
        return damaged(rng.choice(KINDS[0].files), rng, EVERY_FILE)

    def test_it_ends_a_process_that_asks_arrow_about_it(self, file: bytes) -> None:
        asks = subprocess.run([sys.executable, "-c", self.RAW], input=file, capture_output=True)
        assert asks.returncode < 0 and b"terminate called" in asks.stderr

    def test_a_validator_refuses_it_and_goes_on(self, decoding: Decoding, file: bytes) -> None:
        assert decoding.refuses(file).startswith(("format: ", "assignment: "))


class TestFileThatAllocates:
    def test_a_page_that_claims_two_gigabytes(self, decoding: Decoding) -> None:
        reason = decoding.refuses(lying_page(2**31 - 1))
        assert re.fullmatch(r"format: \d+ bytes decoded, more than the \d+ allowed", reason)

    def test_proofs_of_no_bytes_without_number(self, decoding: Decoding) -> None:
        rows = decoding.bench.honest()
        _, table = decoding.bench.packed([replace(rows[0], proofs=[b""] * 40_000), *rows[1:]])
        assert decoding.refuses(table).startswith("format: 40")


class TestFileThatStalls:
    def test_pages_that_decompress_without_end(self, decoding: Decoding) -> None:
        """70 kB of them keep a processor busy for a minute, and what is legal for hours."""
        reason = decoding.refuses(inflating_pages(1 << 16, 1 << 24))
        assert re.fullmatch(r"format: \d+ bytes decoded, more than the \d+ allowed", reason)

    def test_pages_that_are_passed_over(self, decoding: Decoding) -> None:
        assert decoding.refuses(skipped_pages(1 << 18)).startswith("format: ")

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
        spec = small_spec().model_copy(update={"steps": STEPS})
        run_dir = make_run_dir(tmp_path / "run", spec)
        honest = Worker(HONEST, MODEL, spec, ParityTask())
        deadly = PoisonWorker(tmp_path / "weights", PERTURBED, MODEL, spec, ParityTask())

        # when validators are started again as often as they die
        deaths = []
        with (
            origin(tmp_path / "store") as weights,
            coordinator(run_dir, weights) as url,
            ThreadPoolExecutor(2) as pool,
        ):
            working = [pool.submit(work, url, worker) for worker in (deadly, honest)]
            command = [sys.executable, "-m", "tests.attacks.mortal_validator", url]
            command += [ROOT.public_hex, str(tmp_path / "weights")]
            while (code := subprocess.call(command, timeout=DEADLINE_S)) != 0:
                deaths.append(code)
                assert len(deaths) < 10
            assert all(done.result(DEADLINE_S) for done in working)
            status = httpx.get(f"{url}/v1/status", trust_env=False).json()

        # then SIGKILL came three times, one file is set aside, and nobody was rejected
        assert set(deaths) == {-9} and len(deaths) >= ATTEMPTS
        assert status["rejected_submissions"] == 0
        (aside,) = status["set_aside"]
        assert aside["worker"] == PERTURBED.public_hex and len(aside["attempts"]) >= ATTEMPTS
        manifests = [batch_of(run_dir, step) for step in range(STEPS)]
        assert all(manifest.complete for manifest in manifests)
        trained = {group.submission for manifest in manifests for group in manifest.groups}
        assert aside["submission"] not in trained
