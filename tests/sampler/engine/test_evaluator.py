"""An evaluator process with a real coordinator, origin and engine, killed in its work.

It is here because one process of tests has all that start vLLM.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from broadcast.store import publish
from runspec.core.files import write_atomic
from runspec.core.process import Endpoints, save_endpoints
from runspec.core.run_files import evaluation_file, evaluation_files
from runspec.core.schema.load import SpecFiles, dump_resolved
from runspec.core.signed import SigningKey
from runspec.lint.check import check_spec
from runspec.local.identity import make_identity
from sampler.evaluation.ask import figures
from sampler.tasks.traces import build_warm_start_data
from tests.harness import free_port
from tests.preloaded import ROLE, Program
from tests.role_folder import write_folder
from tests.sampler.engine.models import save_version
from tests.waiting import eventually
from verify.formats.documents import Evaluated, open_evaluation, read_evaluations

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROBLEMS, SAMPLES, STEPS = 20, 2, 2
OVERRIDES = (
    *("name=evaluated", f"steps={STEPS}", "estimate=null", "reward.spelling.timeout=10m"),
    f"evaluations=[{{name: held-out, every: 1, problems: {PROBLEMS}, samples: {SAMPLES}}}]",
)


class Run:
    """A run directory, its coordinator, and an origin of versions for the evaluator alone: the
    coordinator, which knows version 0, has no steps behind the others."""

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self.dir, self._running = directory, running
        files = SpecFiles(ROOT / "specs" / "target_short.yaml", "laptop", overrides=OVERRIDES)
        self.spec = check_spec(files).require()
        write_atomic(directory / "spec.json", dump_resolved(self.spec))
        self.identity = make_identity(directory, self.spec)
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        first, self.origin, self.coordinator = addresses
        self.publish(0, seed=0)
        shutil.copytree(directory / "store", directory / "first")
        self._start("broadcast", "origin", directory / "first", "--listen", first)
        self._start("broadcast", "origin", directory / "store", "--listen", self.origin)
        save_endpoints(directory, Endpoints(f"http://{self.coordinator}", f"http://{first}"))
        self._start("runspec.role", "coordinator", directory)

    def _start(self, *words: str | Path) -> None:
        with (self.dir / f"{words[1]}-{Path(words[-1]).name}.log").open("wb") as log:
            command = [sys.executable, "-m", *map(str, words)]
            process = subprocess.Popen(command, stderr=log, cwd=ROOT)
        self._running.callback(process.wait)
        self._running.callback(process.kill)

    def publish(self, version: int, *, seed: int) -> None:
        """A version, which follows from the seed."""
        weights = save_version(self.dir / f"made-{version}", seed=seed)
        build_warm_start_data(self.spec).write_tokenizer(weights)
        key = SigningKey.load(self.identity.key("publisher"))
        roles, store = self.identity.roles_file.read_bytes(), self.dir / "store"
        publish(store, weights, run=self.spec.name, version=version, key=key, roles=roles)

    def evaluator(self) -> Program:
        gone = {"local": f"http://127.0.0.1:{free_port()}"}
        ends = Endpoints(f"http://{self.coordinator}", f"http://{self.origin}", gone)
        own, root = self.dir / "evaluator", self.identity.root_public_key
        write_folder(own, self.spec, ends, root)
        words = ("evaluator", own, "--key", self.identity.key("evaluator"))
        program = Program(ROLE, *words, log=self.dir / "evaluator.log")
        self._running.callback(program.kill)
        return program

    def wait_for(self, path: Path, program: Program) -> None:
        """Until the program has written it."""

        def logs() -> str:
            return "\n---\n".join(log.read_text()[-3000:] for log in self.dir.glob("*.log"))

        def ended() -> str:
            return "" if program.poll() is None or path.exists() else "it ended"

        eventually(path.exists, path.name, hopeless=ended, context=logs)

    def result(self, version: int, program: Program) -> Evaluated:
        path = evaluation_file(self.dir, "held-out", version)
        self.wait_for(path, program)
        key = SigningKey.load(self.identity.key("evaluator")).public_hex
        return open_evaluation(path.read_bytes(), evaluators=frozenset({key}))


def test_a_killed_evaluator_leaves_no_gap_and_no_double(tmp_path):
    with ExitStack() as running:
        # given an evaluator that is killed once it has begun with version 0
        run = Run(tmp_path, running)
        first = run.evaluator()
        run.wait_for(run.dir / "evaluator" / "work" / "weights" / "v0", first)
        first.kill()
        first.wait()
        # when it is started again, and other versions come out, the last with the weights of 0
        second = run.evaluator()
        zero = run.result(0, second)
        run.publish(1, seed=1)
        one = run.result(1, second)
        run.publish(STEPS, seed=0)
        # then it ends by itself once the last has its result
        assert second.wait() == 0
        two = run.result(STEPS, second)
        names = [path.name for path in evaluation_files(run.dir)]
        assert names == ["v0.json", "v1.json", "v2.json"]
        # and each result has all problems, and the figures of its answers
        for each in read_evaluations(evaluation_files(run.dir)):
            assert len(each.problems) == PROBLEMS and each.cpu_s > 0
            assert all(len(p.rewards) == SAMPLES for p in each.problems)
            assert each.figures == figures(each.problems)
            assert {problem.target for problem in each.problems} == {8, 16, 24, 32}
        # and the same weights give the same answers, others give others
        assert two.problems == zero.problems != one.problems
        # and an evaluator that is started once more has nothing to do
        assert run.evaluator().wait() == 0
        assert (run.dir / "evaluator.log").read_text().count("of version 0: mean") == 1
