"""A worker process with a real coordinator and a real origin: signals, kills, restarts, a clock
that is off, a full disk."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from broadcast.store import publish
from runspec.core.files import write_atomic
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from runspec.lint.check import check_spec
from runspec.local.identity import Identity, make_identity
from sampler.tasks.traces import build_warm_start_data
from tests.preloaded import SAMPLER, Program
from tests.sampler.engine.models import END_TOKEN, Reference, save_version
from tests.sampler.worker.works import free_port
from tests.waiting import eventually
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import LeaseExpired, LeaseGranted, LeaseReleased
from verify.formats.submission import Rollout, decode_rollouts, open_submission
from verify.toploc.statistics import verify_proofs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preload_server")]

ROOT = Path(__file__).parents[3]
GROUPS, SIZE = 2, 4
DEADLINE_S = 180.0
LARGEST_FILE = 200_000
"""Less than a version of the small model."""
SHIFTED = f"""
import sys, time
real, shift = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + shift
{SAMPLER}
"""
SMALL_DISK = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({LARGEST_FILE}, {LARGEST_FILE}))
{SAMPLER}
"""


class Run:
    """A run directory with version 0 published, and the processes around one worker."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.dir = directory
        overrides = [
            "name=workers",
            "algorithm.prompts_per_step=1024",  # more than a fast machine samples meanwhile
            f"algorithm.group_size={SIZE}",
            f"samplers.volunteers.groups_per_submission={GROUPS}",
            "verify.lease_timeout=10m",
            *more,
        ]
        path = ROOT / "specs" / "target_short.yaml"
        self.spec: RunSpec = check_spec(
            SpecFiles(path, profile="laptop", overrides=overrides)
        ).require()
        write_atomic(directory / "spec.json", dump_resolved(self.spec))
        self.identity: Identity = make_identity(directory, self.spec)
        self.store = directory / "store"
        self.version = save_version(directory / "v0")
        build_warm_start_data(self.spec).write_tokenizer(self.version)
        self.publish(self.version, 0)
        self.processes: list[subprocess.Popen[bytes] | Program] = []
        self.origin, self.coordinator = free_address(), free_address()
        self.start("broadcast", "origin", self.store, "--listen", self.origin)
        self.start_coordinator()

    def publish(self, weights: Path, version: int) -> None:
        publish(
            self.store,
            weights,
            run=self.spec.name,
            version=version,
            key=SigningKey.load(self.identity.key("publisher")),
            roles=self.identity.roles_file.read_bytes(),
        )

    def start(self, module: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with (self.dir / f"{module}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)], stderr=log, cwd=ROOT
            )
        self.processes.append(process)
        return process

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        return self.start(
            "verify",
            *("coordinator", self.dir, "--listen", self.coordinator),
            *("--weights", f"http://{self.origin}"),
            *("--public-key", self.identity.root_public_key),
        )

    def start_worker(self, code: str, *arguments: str, folder: str = "worker") -> Program:
        """`python -m sampler work`, as the code runs it."""
        working = (*arguments, "work", "--pool", "volunteers")
        return self.start_sampler(code, *working, key="volunteers-0", folder=folder)

    def start_sampler(self, code: str, *arguments: str, key: str, folder: str) -> Program:
        program = Program(
            code,
            *(*arguments, "--run", self.spec.name),
            *("--coordinator", f"http://{self.coordinator}"),
            *("--weights", f"http://{free_address()}"),  # a relay that is gone
            *("--weights", f"http://{self.origin}"),
            *("--public-key", self.identity.root_public_key),
            *("--key", self.identity.key(key), "--dir", self.dir / folder),
            log=self.dir / f"{folder}.log",
        )
        self.processes.append(program)
        return program

    def submissions(self) -> list[Path]:
        return sorted(self.dir.glob("rollouts/step_*/*.safetensors"))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        eventually(condition, what, deadline_s=DEADLINE_S, context=self._logs)

    def _logs(self) -> str:
        return "\n---\n".join(path.read_text()[-3000:] for path in self.dir.glob("*.log"))

    def wait_for_submissions(self, count: int) -> None:
        self.wait_for(lambda: len(self.submissions()) >= count, f"{count} submissions")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def run(preload_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A worker that was killed with its coordinator, started again, lost its coordinator for a
    while, and was ended. Its clock is minutes off, the one way and the other."""
    run = Run(tmp_path_factory.mktemp("workers"))
    try:
        worker = run.start_worker(SHIFTED, "-240")
        run.wait_for_submissions(2)
        coordinator = run.processes[1]
        for process in (worker, coordinator):
            process.kill()
            process.wait()

        coordinator = run.start_coordinator()
        worker = run.start_worker(SHIFTED, "240")
        run.wait_for_submissions(len(run.submissions()) + 2)

        coordinator.kill()
        coordinator.wait()
        run.start_coordinator()
        run.wait_for_submissions(len(run.submissions()) + 2)
        assert worker.poll() is None, "the worker did not survive its coordinator's restart"
        worker.send_signal(signal.SIGTERM)
        run.worker_ended_within_s = elapsed(lambda: worker.wait(DEADLINE_S))
        run.worker_exit = worker.returncode
        yield run
    finally:
        run.close()


def elapsed(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def rollouts(path: Path) -> list[Rollout]:
    return decode_rollouts(path.read_bytes(), max_rows=GROUPS * SIZE, max_bytes=1 << 20)


def test_it_ends_soon_and_politely(run):
    assert run.worker_exit == 0
    assert run.worker_ended_within_s < 20.0  # of which three are the worker's own grace


def test_every_lease_is_answered_once_or_given_back_through_kills_and_restarts(run):
    envelopes = []
    for path in run.submissions():  # none of them half made
        envelopes.append(open_submission(path.with_suffix(".json").read_bytes()))
        assert digest_bytes(path.read_bytes()) == envelopes[-1].digest
        assert len(rollouts(path)) == GROUPS * SIZE
    with closing(Ledger(run.dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    granted = {event.digest for event in events if isinstance(event, LeaseGranted)}
    released = {event.lease for event in events if isinstance(event, LeaseReleased)}

    answered = [envelope.lease for envelope in envelopes]
    assert len(set(answered)) == len(answered)
    assert {*answered, *released} == granted
    assert not released & set(answered)
    assert not any(isinstance(event, LeaseExpired) for event in events)


def test_logprobs_and_proofs_are_those_of_the_version(run):
    reference = Reference(run.version)

    for row in rollouts(run.submissions()[0]):
        tokens = row.output_tokens.tolist()
        logprobs, hidden = reference.logprobs(row.prompt_tokens.tolist(), tokens)
        np.testing.assert_allclose(row.logprobs, logprobs, atol=1e-3)
        assert np.abs(row.logprobs - logprobs).mean() < 1e-5
        bits = hidden.astype(ml_dtypes.bfloat16).view(np.uint16)
        statistics = verify_proofs(bits, row.proofs)
        assert len(statistics) == len(row.proofs) == -(-len(tokens) // 32)
        assert row.finish_reason == ("stop" if tokens[-1] == END_TOKEN else "length")


@pytest.mark.parametrize(
    ("code", "shift", "says"),
    [
        (SMALL_DISK, [], r"{folder}/weights"),
        (SHIFTED, ["900"], r"clock is (900|899) s ahead of ours"),
    ],
    ids=["a full disk", "a clock that is far off"],
)
def test_what_a_worker_cannot_work_with_ends_it_by_name(run, code, shift, says):
    before, folder = len(run.submissions()), f"faulty{len(run.processes)}"

    assert run.start_worker(code, *shift, folder=folder).wait(DEADLINE_S) == 1

    words = (run.dir / f"{folder}.log").read_text()
    assert re.search(says.format(folder=run.dir / folder), words), words
    assert len(run.submissions()) == before
