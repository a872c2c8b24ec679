"""A reward plug-in that raises: its words and its line, wherever somebody looks."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from runspec.core.errors import UserError, describe_error, one_line
from runspec.core.files import write_atomic
from runspec.core.process import EXIT_FINAL
from runspec.core.signed import BadSignature
from runspec.core.spec.resolved import dump_resolved
from sampler.tasks.grading.graders import Graders
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import small_spec as small_laptop_spec
from tests.sampler.tasks.grading.plugin import TERM, answers, install_term, reward
from tests.sampler.worker.works import free_port
from tests.verify.bench import MODEL, lease_for, packed
from tests.verify.coordinator.deployment import Site, tiny_spec, verdict
from tests.verify.coordinator.filled import started
from tests.verify.coordinator.over_http import check, sample, status
from tests.verify.small_model import NumpyEngine, ParityTask, Worker, fixed_key, small_spec
from tests.waiting import eventually
from verify.audit.replay import audit
from verify.coordinator.machine.filling import decide_close
from verify.coordinator.machine.stalls import RUN_DIR, Stalled
from verify.formats.lease import open_lease
from verify.formats.verdict import MAX_FAULT, open_verdict
from verify.plugins import GradeItem, GraderFault
from verify.validator import Validator

WORKER = fixed_key(5)
LINE = 1 + TERM.splitlines().index('            raise RuntimeError("no idea")')


@dataclass
class PluginTask(ParityTask):
    """The task, graded by a reward of an installed package, which raises."""

    graders: Graders | None = None

    def grade_all(self, items: Sequence[GradeItem]) -> list[GraderFault]:
        assert self.graders is not None
        found = self.graders.score(answers("chess", ["raise"] * len(items)))
        return [result for result in found if isinstance(result, GraderFault)]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PluginTask, str]]:
    kind, module = install_term(tmp_path, monkeypatch)
    with closing(Graders([reward(kind)], processes=1)) as graders:
        yield PluginTask(graders=graders), f"/{module}.py:{LINE}"


@pytest.mark.slow
def test_what_a_reward_raises_is_in_the_validators_log_in_the_stall_and_in_status(
    tmp_path: Path, plugin: tuple[PluginTask, str], caplog: pytest.LogCaptureFixture
) -> None:
    # given a run whose reward raises, and that may lease no more groups than one step needs
    task, place = plugin
    spec = small_spec()
    fill = spec.algorithm.fill.model_copy(update={"max_groups": 1.0})
    spec = spec.model_copy(
        update={"algorithm": spec.algorithm.model_copy(update={"fill": fill}), "steps": 1}
    )
    site = Site(tmp_path, spec)
    site.publish(0)
    with site.origin(), site.process(free_port()) as coordinator:
        # when a worker answers its leases, and a validator judges what comes
        client = site.client(WORKER)
        client.register("home", {}, invite=site.invite)
        for _ in range(2):
            signed = client.lease(5.0)
            assert signed is not None
            lease = open_lease(signed, coordinators=frozenset({site.coordinator.public_hex}))
            rollouts = Worker(WORKER, MODEL, spec, ParityTask()).rollouts(signed, lease)
            client.submit(*packed(rollouts, signed, lease, WORKER))
        validator = Validator(
            *(spec, site.validator, site.client(site.validator, deadline_s=1.0)),
            NumpyEngine({0: MODEL}, tmp_path / "weights"),
            task_set_of=lambda weights: task,
            log=logging.getLogger("validator"),
        )
        with suppress(UserError):  # the coordinator ends
            validator.serve(threading.Event())
        _, said = coordinator.communicate(timeout=30)
    # then the run stops with the exception, its text and its line, and with what to do
    found = f"RuntimeError: no idea at {tmp_path.name}{place}"
    assert coordinator.returncode == EXIT_FINAL
    assert "step 0 stalled: 0 of 4 groups" in said
    assert "4 groups dropped by the grader, the newest: p" in said and found in said
    assert "remedy: repair the grader" in said and "python -m sampler grade" in said
    assert "waited for" not in said
    # and so do the validator's log and the run's status, and an audit finds the ledger sound
    assert found in caplog.text
    assert found in " ".join(runspec("status", site.run_dir, "--json").stdout.split())
    conditions = json.loads(runspec("status", site.run_dir, "--json").stdout)["conditions"]
    (faults,) = (each for each in conditions if each["type"] == "GraderFaults")
    assert faults["message"].startswith("4 groups dropped by the grader, the newest: ")
    assert "GraderFaults" in runspec("status", site.run_dir).stdout
    assert audit(site.run_dir, root_key=site.root.public_hex).findings == []


@pytest.mark.slow
def test_the_command_that_a_stall_names_reads_the_spec_of_the_run(tmp_path: Path) -> None:
    # given a step whose problems the model never solves, of a run that has its spec
    run = started(max_groups=2)
    record = run.lease("x")
    run.submit(record)
    run.judge(record, ["filtered"] * 2, task_reward=0.0)
    stalled = decide_close(run.state, run.now)
    assert isinstance(stalled, Stalled)
    spec = small_laptop_spec()
    write_atomic(tmp_path / "spec.json", dump_resolved(spec))
    # when its command is given, with the name of a source
    command = stalled.remedy.split("`")[1].replace(RUN_DIR, str(tmp_path))
    words = shlex.split(command.replace("NAME", spec.data.sources[0].name))
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # then all that it lacks is the model, which this test does not make
    assert f"{tmp_path}/initial/tokenizer_config.json: cannot read the tokenizer's" in done.stderr


def test_a_coordinator_that_starts_again_still_knows_the_fault(tmp_path: Path) -> None:
    site = Site(tmp_path, tiny_spec())
    site.publish(0)
    told = {"groups": 1, "newest": "p7: KeyError: 'gold' at mine/grading.py:17"}
    with site.origin():
        with site.serving():
            assert status(site)["dropped_by_grader"] == {"groups": 0, "newest": ""}
            key, client = site.worker()
            sample(site, key, client)
            check(site, site.client(site.validator), dropped=(1,), fault=told["newest"])
            assert status(site)["dropped_by_grader"] == told
        with site.serving():
            eventually(lambda: status(site)["dropped_by_grader"] == told, "the fault")


@pytest.mark.parametrize("fault", ["two\nlines", "\x1b[2Jgone", "a" * (MAX_FAULT + 1)])
def test_a_verdict_whose_fault_is_no_short_printable_line_is_none(
    tmp_path: Path, fault: str
) -> None:
    site = Site(tmp_path, tiny_spec())
    _, lease = lease_for(WORKER, site.coordinator)
    envelope, _ = verdict("ab" * 32, lease, site.validator, dropped=(1,), fault=fault)
    with pytest.raises(BadSignature, match="one printable line"):
        open_verdict(envelope, validators=frozenset({site.validator.public_hex}))


def test_an_error_is_put_into_one_line_with_the_line_of_its_package() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        assert describe_error(error, "tests").startswith("JSONDecodeError: Expecting property")
        assert " at verify/test_grader_faults.py:" in describe_error(error, "tests")
        assert " at json/decoder.py:" in describe_error(error)
    assert describe_error(KeyError("a\n\x1b[2J" * 99)).isprintable()
    assert len(describe_error(KeyError("a" * 10_000))) < 250
    assert one_line(" a\n\tb\x1b[0m ", 100) == "a b?[0m"
    assert one_line("a" * 100, 10) == "a" * 10
