"""Coordinator, workers and validator over HTTP, with real signatures and a real small model."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runspec.core.canonical import digest_bytes
from runspec.core.files import write_atomic
from runspec.core.process import EXIT_FINAL, Endpoints, Role, RunStopped
from runspec.core.roles import sign_roles
from runspec.core.run_files import evaluation_files, submission_files
from runspec.core.schema import Evaluation, RunSpec
from runspec.role import main as start
from sampler.tasks.graders import Graders
from tests.role_folder import write_folder
from tests.runspec.cli.in_process import runspec
from tests.sampler.tasks.grading.plugin import TERM, answers, install_term, reward
from tests.verify.bench import MODEL, packed
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import granted
from tests.verify.profiles import document, made_profile, with_profile
from tests.verify.small_model import NumpyEngine, ParityTask, Worker, fixed_key, small_spec
from tests.waiting import eventually
from verify import validator
from verify.audit import audit
from verify.client import RunFinished, SubmissionRefused, problem_files
from verify.formats.documents import Evaluated, Figure, sign_evaluation
from verify.formats.lease import open_lease
from verify.formats.submission import decode_rollouts
from verify.formats.verdict import decode_verdicts
from verify.plugins import GradeItem, GraderFault, WeightsLocation
from verify.validator import Validator

HONEST, DISHONEST, EVALUATOR = fixed_key(5), fixed_key(6), fixed_key(7)
DEADLINE_S = 600.0
STEPS = 3
SPEC = small_spec().model_copy(update={"steps": STEPS})
LOG = logging.getLogger("validator")


@contextmanager
def at_work(site: Site) -> Iterator[None]:
    """The coordinator of a run whose newest version is 0."""
    site.publish(0)
    with site.origin(), site.serving():
        yield


def work(site: Site, worker: Worker) -> int:
    """Answers leases until the run is finished; returns how many."""
    answered, client = 0, site.client(worker.key, deadline_s=DEADLINE_S)
    client.register("home", {})
    try:
        while True:
            signed = client.lease(1.0)
            if signed is None:
                continue
            lease = open_lease(signed, coordinators=frozenset({site.coordinator.public_hex}))
            rollouts = worker.rollouts(signed, lease)
            with suppress(SubmissionRefused):  # the step was filled meanwhile
                client.submit(*packed(rollouts, signed, lease, worker.key))
                answered += 1
    except RunFinished:
        return answered


def validator_of(
    site: Site, directory: Path, spec: RunSpec, task: ParityTask | None = None, **options: float
) -> Validator:
    """All versions have the same weights."""
    return Validator(
        *(spec, site.validator, site.client(site.validator, **options)),
        NumpyEngine(dict.fromkeys(range(STEPS), MODEL), directory),
        task_set_of=lambda weights: task or ParityTask(),
        log=LOG,
    )


def validate(site: Site, directory: Path, spec: RunSpec = SPEC) -> int:
    """Judges until the run is finished; returns how many."""
    judge = validator_of(site, directory, spec, deadline_s=DEADLINE_S)
    judge.serve(threading.Event())
    return judge.checked


# --- batches ------------------------------------------------------------------------------------


def test_honest_rollouts_reach_the_batches_and_no_others(tmp_path: Path) -> None:
    # given a run with an honest worker of its own, and a stranger that serves perturbed weights
    site = Site(tmp_path, SPEC)
    site.own_worker("home-0", HONEST)
    stranger = Worker(DISHONEST, MODEL.perturbed(0.05), SPEC, ParityTask())
    # when it runs to its last step, and a first verdict comes before the honest worker
    with at_work(site), ThreadPoolExecutor(2) as pool:
        checked = pool.submit(validate, site, tmp_path / "weights")
        pool.submit(work, site, stranger)  # it ends with the run, or is banned before
        eventually(lambda: any(site.run_dir.glob("rollouts/*/*.verdict.json")), "a verdict")
        assert work(site, Worker(HONEST, MODEL, SPEC, ParityTask())) and checked.result()
    # then every batch is whole, made of the honest worker's groups alone, and others were rejected
    manifests = [site.batch(step) for step in range(STEPS)]
    for manifest in manifests:
        assert manifest.complete and len(manifest.groups) == SPEC.algorithm.prompts_per_step
        for group in manifest.groups:
            files = submission_files(site.run_dir, group.step, group.submission)
            rows = decode_rollouts(files.submission.read_bytes(), max_rows=64, max_bytes=1 << 20)
            verdicts = decode_verdicts(files.verdict.read_bytes())
            assert {row.worker for row in rows} == {HONEST.public_hex}
            assert all(v.logprob_diff is not None and v.logprob_diff < 1e-5 for v in verdicts)
    assert sum(m.stats["rejected_submissions"] for m in manifests) > 0


def trained(folder: Path, patch: pytest.MonkeyPatch, *, evaluated: bool) -> list[dict[str, Any]]:
    """The rollouts of all steps of a synchronous run, in the order in which they train."""
    drawn = iter(range(1000))
    known = SimpleNamespace(token_hex=lambda size: digest_bytes(str(next(drawn)).encode()))
    patch.setattr("verify.coordinator.handlers.leasing.secrets", known)
    algorithm = SPEC.algorithm.model_copy(update={"async_level": 0})
    evaluations = [Evaluation(name="held-out", source="parity")] if evaluated else []
    spec = SPEC.model_copy(update={"algorithm": algorithm, "evaluations": evaluations})
    folder.mkdir()
    site = Site(folder, spec)
    keys = {"publisher": site.publisher, "coordinator": site.coordinator}
    keys |= {"validator": site.validator, "evaluator": EVALUATOR}
    named = {role: [key.public_hex] for role, key in keys.items()}
    roles = sign_roles(spec.name, named, site.root, valid_s=3600.0)
    write_atomic(site.run_dir / "keys" / "roles.json", roles)
    rows = []
    site.publish(0)
    with site.origin(), site.serving(), ThreadPoolExecutor(2) as pool:
        judging = pool.submit(validate, site, folder / "weights", spec)
        working = pool.submit(work, site, Worker(HONEST, MODEL, spec, ParityTask()))
        for step in range(STEPS):
            if evaluated:  # the evaluator sends its result while the step is sampled
                figures = {"mean": Figure(0.25, 0.2, 0.3)}
                result = Evaluated(spec.name, "held-out", step, None, figures, 0, [], 9.0, 1.0, 1.0)
                site.client(EVALUATOR, deadline_s=DEADLINE_S).evaluated(
                    sign_evaluation(result, EVALUATOR)
                )
            for group in site.batch(step).groups:
                files = submission_files(site.run_dir, group.step, group.submission)
                data = files.submission.read_bytes()
                found = decode_rollouts(data, max_rows=64, max_bytes=1 << 20)
                rows += [vars(row) for row in found if row.group == group.group]
            site.publish(step + 1)
        assert working.result() and judging.result()
    assert len(evaluation_files(site.run_dir)) == (STEPS if evaluated else 0)
    return rows


def test_evaluations_change_no_bit_of_what_a_synchronous_run_trains(tmp_path, monkeypatch):
    # given two runs with the same keys and nonces, which are random elsewhere
    without = trained(tmp_path / "without", monkeypatch, evaluated=False)
    evaluated = trained(tmp_path / "with", monkeypatch, evaluated=True)
    # then both train the same tokens, log-probs, rewards and proofs in the same order
    assert len(without) == len(evaluated) > 0
    for ours, theirs in zip(evaluated, without, strict=True):
        for name in ours.keys() - {"lease"}:  # which follows from the time
            assert np.array_equal(ours[name], theirs[name]), name


# --- a grader that raises -----------------------------------------------------------------------

LINE = 1 + TERM.splitlines().index('            raise RuntimeError("no idea")')


@dataclass
class PluginTask(ParityTask):
    """The task, graded by a reward of an installed package, which raises."""

    graders: Graders | None = None

    def grade_all(self, items: Sequence[GradeItem]) -> list[GraderFault]:
        assert self.graders is not None
        found = self.graders.score(answers("chess", ["raise"] * len(items)))
        return [result for result in found if isinstance(result, GraderFault)]


def test_what_a_reward_raises_is_in_the_validators_log_in_the_stall_and_in_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # given a run whose reward raises, and that may lease no more groups than one step needs
    kind, module = install_term(tmp_path, monkeypatch)
    fill = SPEC.algorithm.fill.model_copy(update={"max_groups": 1.0})
    algorithm = SPEC.algorithm.model_copy(update={"fill": fill})
    spec = SPEC.model_copy(update={"algorithm": algorithm, "steps": 1})
    site = Site(tmp_path, spec)
    site.publish(0)
    with (
        closing(Graders([reward(kind, timeout="600s")], processes=1)) as graders,
        site.origin(),
        site.serving() as coordinator,
    ):
        # when a worker answers its leases, and a validator judges what comes
        client = site.client(HONEST, deadline_s=DEADLINE_S)
        client.register("home", {}, invite=site.invite)
        for _ in range(2):
            signed, lease = granted(site, client)
            rollouts = Worker(HONEST, MODEL, spec, ParityTask()).rollouts(signed, lease)
            client.submit(*packed(rollouts, signed, lease, HONEST))
        task = PluginTask(graders=graders)
        judge = validator_of(site, tmp_path / "weights", spec, task, deadline_s=DEADLINE_S)
        judge.serve(SimpleNamespace(is_set=lambda: judge.checked == 2))
        eventually(coordinator.done, "the coordinator's end")
        stalled = coordinator.exception()
    # then the run stops with the exception, its text and its line, and with what to do
    found = f"RuntimeError: no idea at {tmp_path.name}/{module}.py:{LINE}"
    assert isinstance(stalled, RunStopped)
    said = str(stalled)
    assert "step 0 stalled: 0 of 4 groups" in said
    assert "4 groups dropped by the grader, the newest: p" in said and found in said
    assert "remedy: repair the grader" in said and "python -m sampler grade" in said
    # and so do the validator's log and the run's status, and an audit finds the ledger sound
    assert found in caplog.text
    printed = runspec("status", site.run_dir, "--json").stdout
    assert found in " ".join(printed.split())
    conditions = json.loads(printed)["conditions"]
    (faults,) = (each for each in conditions if each["type"] == "GraderFaults")
    assert faults["message"].startswith("4 groups dropped by the grader, the newest: ")
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


# --- what a role needs --------------------------------------------------------------------------


def with_source(**changes: object) -> RunSpec:
    spec = tiny_spec()
    source = spec.data.sources[0].model_copy(update=changes)
    return spec.model_copy(update={"data": spec.data.model_copy(update={"sources": [source]})})


def test_a_generator_of_another_version_ends_the_role(tmp_path, monkeypatch):
    # given a coordinator whose problems are generated
    spec = with_source(uri=None, kind="reasoning_gym")
    site = Site(tmp_path, spec)
    location = WeightsLocation(site.run, [], site.root.public_hex, tmp_path / "own" / "weights")
    with site.origin(), site.serving():
        _, client = site.worker()
        assert problem_files(client, spec, location, LOG) is None
        # when the generator's package here is another
        monkeypatch.setattr("runspec.core.schema.source_files.version", lambda name: "0.0.1")
        # then the role says what to do, and does not try again
        with pytest.raises(RunStopped, match="the coordinator are made from other data") as caught:
            problem_files(client, spec, location, LOG)
    assert "the same version of every generator's package" in (caught.value.remedy or "")


def with_engine(name: str) -> RunSpec:
    verify = tiny_spec().verify.model_copy(update={"engine": name})
    return tiny_spec().model_copy(update={"verify": verify})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (with_engine("no_such_engine"), "no plug-in 'no_such_engine'"),
        (with_profile(tiny_spec(), document(made_profile())), "is pinned"),
    ],
    ids=["an engine that is not installed", "profiles of another root"],
)
def test_a_validator_that_every_try_would_end_stops_the_run(tmp_path, monkeypatch, spec, words):
    monkeypatch.setattr("verify.plugins.require_graders", lambda spec: None)
    site = Site(tmp_path, spec)
    site.validator.save(tmp_path / "validator.key")
    with site.origin(), site.serving(), pytest.raises(RunStopped, match=words):
        ends = Endpoints(site.url, site.weights)
        folder = write_folder(tmp_path / "validator", spec, ends, site.root.public_hex)
        role = Role.load("validator-0", folder, key_file=tmp_path / "validator.key")
        validator.run(role, threading.Event(), LOG)


def test_a_coordinator_that_cannot_read_its_spec_ends_with_the_code_that_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path, tiny_spec())
    (site.run_dir / "spec.json").write_text("{")
    assert start(["coordinator", str(site.run_dir)]) == EXIT_FINAL
    assert "spec.json" in capsys.readouterr().err
