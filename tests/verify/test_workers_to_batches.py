"""Coordinator, workers and validator over HTTP, with real signatures and a real small model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.latest import sign_latest
from runspec.core.roles import sign_roles
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from tests.verify.bench import MODEL, packed
from tests.verify.small_model import RUN, NumpyEngine, ParityTask, Worker, fixed_key, small_spec
from verify.client import CoordinatorClient, RunFinished, SubmissionRefused
from verify.coordinator.run import serve
from verify.formats.batch import BatchManifest, open_batch
from verify.formats.layout import step_folder, submission_files
from verify.formats.lease import open_lease
from verify.formats.submission import decode_rollouts
from verify.formats.verdict import decode_verdicts
from verify.validator import Validator

ROOT, PUBLISHER, COORDINATOR, VALIDATOR, HONEST, PERTURBED = map(fixed_key, range(1, 7))
DEADLINE_S = 60.0
STEPS = 3


def make_run_dir(path: Path, spec: RunSpec) -> Path:
    write_atomic(path / "spec.json", dump_resolved(spec))
    COORDINATOR.save(path / "keys" / "coordinator.key")
    held = {"publisher": PUBLISHER, "coordinator": COORDINATOR, "validator": VALIDATOR}
    roles = sign_roles(RUN, {r: [k.public_hex] for r, k in held.items()}, ROOT, valid_s=3600)
    write_atomic(path / "keys" / "roles.json", roles)
    return path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def origin(directory: Path) -> Iterator[str]:
    """A plain file server that says version 0 is the newest."""
    write_atomic(directory / RUN / "latest.json", sign_latest(RUN, 0, "ab" * 32, PUBLISHER))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def coordinator(run_dir: Path, weights: str) -> Iterator[str]:
    ports: Queue[int] = Queue()
    loop = asyncio.new_event_loop()
    serving = loop.create_task(
        serve(
            run_dir,
            host="127.0.0.1",
            port=0,
            weights=weights,
            root_public_key=ROOT.public_hex,
            started=ports.put,
        )
    )

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.wait([serving]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=DEADLINE_S)}"
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(DEADLINE_S)
        loop.close()


def client(url: str, key: SigningKey) -> CoordinatorClient:
    return CoordinatorClient(
        url, key, run=RUN, root_public_key=ROOT.public_hex, deadline_s=DEADLINE_S
    )


def work(url: str, worker: Worker) -> int:
    """Answers leases until the run is finished; returns how many."""
    answered = 0
    connection = client(url, worker.key)
    connection.register("home", {})
    try:
        while True:
            signed = connection.lease(1.0)
            if signed is None:
                continue
            lease = open_lease(signed, coordinators={COORDINATOR.public_hex})
            rollouts = worker.rollouts(signed, lease)
            try:
                connection.submit(*packed(rollouts, signed, lease, worker.key))
            except SubmissionRefused:
                continue
            answered += 1
    except RunFinished:
        return answered


def validate(url: str, spec: RunSpec, directory: Path) -> int:
    engine = NumpyEngine({0: MODEL}, directory)
    connection = client(url, VALIDATOR)
    validator = Validator(
        spec,
        VALIDATOR,
        connection,
        engine,
        task_set_of=lambda weights: ParityTask(),
        log=logging.getLogger("validator"),
    )
    validator.serve(threading.Event())
    return validator.checked


def batch(run_dir: Path, step: int) -> BatchManifest:
    data = (step_folder(run_dir, step) / "batch.json").read_bytes()
    return open_batch(data, coordinators=frozenset({COORDINATOR.public_hex}), run=RUN, step=step)


def test_honest_rollouts_reach_the_batches_and_no_others(tmp_path: Path) -> None:
    # given a run with an honest worker and one that serves perturbed weights
    spec = small_spec().model_copy(update={"steps": STEPS})
    run_dir = make_run_dir(tmp_path / "run", spec)
    workers = [
        Worker(HONEST, MODEL, spec, ParityTask()),
        Worker(PERTURBED, MODEL.perturbed(0.05), spec, ParityTask()),
    ]

    # when it runs to its last step
    with (
        origin(tmp_path / "store") as weights,
        coordinator(run_dir, weights) as url,
        ThreadPoolExecutor(3) as pool,
    ):
        checked = pool.submit(validate, url, spec, tmp_path / "weights")
        answers = [pool.submit(work, url, worker) for worker in workers]
        answered = [answer.result(DEADLINE_S) for answer in answers]
        assert checked.result(DEADLINE_S) > 0

    # then both took part, and every batch is whole, made of the honest worker's groups alone
    assert all(answered)
    manifests = [batch(run_dir, step) for step in range(STEPS)]
    for manifest in manifests:
        assert manifest.complete and len(manifest.groups) == spec.algorithm.prompts_per_step
        for group in manifest.groups:
            files = submission_files(run_dir, group.step, group.submission)
            rows = decode_rollouts(files.submission.read_bytes(), max_rows=64, max_bytes=1 << 20)
            verdicts = decode_verdicts(files.verdict.read_bytes())
            assert {row.worker for row in rows} == {HONEST.public_hex}
            assert all(v.logprob_diff is not None and v.logprob_diff < 1e-5 for v in verdicts)
    assert sum(m.stats["rejected_submissions"] for m in manifests) > 0
