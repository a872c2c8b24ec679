"""A run of three strangers with unlike devices, the fastest of which leaves.

The devices are faked by name: all three are vLLM on this machine's CPU (`tests.unlike_worker`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.process import Endpoints, load_endpoints
from runspec.core.run_files import submission_files
from runspec.core.schema.load import SpecFiles, load_layers, load_resolved
from runspec.core.signed import SigningKey
from runspec.local.identity import make_identity
from tests.harness import SMALL, TARGET_SHORT, LiveRun
from tests.role_folder import write_folder
from tests.unlike_worker import POOL, WORKERS
from tests.verify.profiles import document, made_profile
from tests.waiting import HANG_S
from verify.coordinator.ledger import read_events
from verify.coordinator.machine.events import LeaseGranted, SubmissionJudged, WorkerRegistered
from verify.formats.batch import FILE_NAME
from verify.formats.verdict import decode_verdicts
from verify.thresholds import FLOAT32

pytestmark = pytest.mark.nightly

STEPS = 12
OVERRIDES = {
    "steps": STEPS,
    "algorithm.prompts_per_step": 8,
    "algorithm.async_level": 3,
    "algorithm.fill.deadline": "1h",
    f"samplers.{POOL}.groups_per_submission": 4,
    "verify.lease_timeout": "10m",
    "placement.roles": "[relay-local, validators]",
}
PAIRS = {"fast": "", "slow": "cpu-b x 2", "unknown": "cpu-c x 1"}
GAP_MEANS = {
    name: share * FLOAT32.gap_mean
    for name, share in (("fast", 0.8), ("slow", 0.9), ("unknown", 1.0))
}
"""Limits that tell the pairs apart."""


def profiled(runs_dir: Path) -> dict[str, str]:
    """Makes the run's keys, and profiles signed by its root; returns the overrides for both."""
    values = {**SMALL, **OVERRIDES, "name": "unlike"}
    overrides = [f"{path}={value}" for path, value in values.items()]
    spec = load_layers(SpecFiles(TARGET_SHORT, "laptop", None, overrides)).spec
    assert spec is not None
    identity = make_identity(runs_dir / "unlike", spec)
    root, shape, pool = SigningKey.load(identity.key("root")), spec.model.shape, spec.samplers[0]
    assert shape is not None
    model = {
        name: getattr(shape, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    }
    sampling = {name: getattr(pool.sampling, name) for name in ("temperature", "top_p", "top_k")}
    items = []
    for name in ("fast", "slow"):
        _, said = WORKERS[name]
        sampler = {"hardware": said["device"], "tensor": said["tensor"], "sampling": sampling}
        limits = replace(FLOAT32, gap_mean=GAP_MEANS[name])
        path = runs_dir / f"{name}.json"
        path.write_text(document(made_profile(limits, sampler=sampler, model=model), root))
        items.append(f"{{name: {name}, file: {path}}}")
    return {
        "verify.profiles": f"[{', '.join(items)}]",
        "identity.root_public_key": root.public_hex,
    }


def workers_judged(run_dir: Path) -> set[str]:
    spec = load_resolved(run_dir)
    leases = {e.digest: e.lease for e in read_events(run_dir, spec, LeaseGranted)}
    return {leases[e.lease].worker for e in read_events(run_dir, spec, SubmissionJudged)}


def test_unlike_workers_fill_steps_by_limits_of_their_own_and_the_fastest_may_leave(runs_dir: Path):
    run = LiveRun(runs_dir, "unlike", {**OVERRIDES, **profiled(runs_dir)})
    keys = {name: SigningKey.generate() for name in WORKERS}
    with run, ExitStack() as stack:
        run.wait_until(
            lambda: list(run.dir.glob("weights/v0")) and load_endpoints(run.dir), "version 0"
        )
        up, spec = load_endpoints(run.dir), load_resolved(run.dir)
        assert up is not None
        workers = {}
        for name, key in keys.items():
            key_file = runs_dir / f"{name}.key"
            key.save(key_file)
            home = write_folder(runs_dir / name, spec, Endpoints(up.coordinator, up.origin))
            words = [sys.executable, "-m", "tests.unlike_worker", name, str(home), str(key_file)]
            workers[name] = stack.enter_context(subprocess.Popen(words))
            stack.callback(workers[name].terminate)
        # when the fastest leaves, once all of them have work accepted
        run.wait_until(
            lambda: workers_judged(run.dir) >= {key.public_hex for key in keys.values()},
            "a verdict on each",
            others=[*workers.values()],
        )
        workers["fast"].terminate()
        assert workers["fast"].wait(HANG_S) == 0
        # then the run goes on to its end
        summary = run.finish()
    assert (summary["steps"], summary["rollouts_rejected"]) == (STEPS, 0)
    registered = {e.worker: e.devices for e in read_events(run.dir, spec, WorkerRegistered)}
    assert registered == {keys[name].public_hex: PAIRS[name] for name in WORKERS}
    # and each submission was judged by the limits of its pair
    names = {key.public_hex: name for name, key in keys.items()}
    leases = {e.digest: e.lease for e in read_events(run.dir, spec, LeaseGranted)}
    seen, sampled = Counter[str](), dict[str, str]()
    for event in read_events(run.dir, spec, SubmissionJudged):
        lease = leases[event.lease]
        name = names[lease.worker]
        assert event.accepted and lease.devices == PAIRS[name]
        files = submission_files(run.dir, lease.step, event.submission)
        rows = decode_verdicts(files.verdict.read_bytes())
        limit = GAP_MEANS[name] + FLOAT32.gap / sum(row.length for row in rows)
        checks = [c for row in rows for c in row.checks if c.name == "seeded_sampling_submission"]
        assert checks and [c.limit for c in checks] == pytest.approx([limit] * len(checks))
        seen[name] += 1
        sampled[event.submission] = name
    assert seen.keys() == WORKERS.keys()
    # and all steps are whole, of the calibrated ones' work alone
    trained = Counter[str]()
    for path in run.dir.glob(f"rollouts/step_*/{FILE_NAME}"):
        batch = json.loads(path.read_text())["payload"]
        assert batch["complete"]
        trained.update(sampled[group["submission"]] for group in batch["groups"])
    assert trained.total() == STEPS * 8 and trained.keys() == {"fast", "slow"}
    audit = [sys.executable, "-m", "verify", "audit", str(run.dir)]
    done = subprocess.run(audit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
