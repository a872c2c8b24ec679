"""An evaluator process with a real coordinator, origin and engine, killed in its work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runspec.core.keys import SigningKey
from runspec.core.run_files import evaluation_file, evaluation_files
from sampler.evaluation.figures import figures
from sampler.tasks.traces import build_warm_start_data
from tests.preloaded import SAMPLER, Program
from tests.sampler.engine.models import save_version
from tests.sampler.worker.test_worker import DEADLINE_S, Run, free_address
from verify.formats.evaluation import Evaluated, open_evaluation, read_evaluations

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preload_server")]
PROBLEMS, SAMPLES, STEPS = 40, 2, 2
EVALUATION = f"{{name: held-out, every: 1, problems: {PROBLEMS}, "
EVALUATION += f"samples: {SAMPLES}}}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("evaluated")
    run = Run(folder, f"evaluations=[{EVALUATION}]", f"steps={STEPS}", "estimate=null")
    # Versions for the evaluator alone: the coordinator has no steps behind them.
    run.store = Path(shutil.copytree(run.store, folder / "versions"))
    run.origin = free_address()
    run.start("broadcast", "origin", run.store, "--listen", run.origin)
    try:
        yield run
    finally:
        run.close()


def start(run: Run) -> Program:
    return run.start_sampler(SAMPLER, "evaluate", key="evaluator", folder="evaluator")


def result(run: Run, version: int) -> Evaluated:
    path = evaluation_file(run.dir, "held-out", version)
    run.wait_for(path.exists, f"the result of version {version}")
    key = SigningKey.load(run.identity.key("evaluator")).public_hex
    return open_evaluation(path.read_bytes(), evaluators=frozenset({key}))


def test_a_killed_evaluator_leaves_no_gap_and_no_double(run: Run, tmp_path: Path) -> None:
    # given an evaluator that is killed once it has begun with version 0
    first, log = start(run), run.dir / "evaluator.log"
    run.wait_for((run.dir / "evaluator" / "weights" / "v0").exists, "version 0 is there")
    first.kill()
    first.wait(DEADLINE_S)
    # when it is started again
    second = start(run)
    zero = result(run, 0)
    # and another version comes out, then the last, with the weights of version 0
    other = save_version(tmp_path / "v1", seed=1)
    build_warm_start_data(run.spec).write_tokenizer(other)
    run.publish(other, 1)
    one = result(run, 1)
    shutil.copytree(run.version, tmp_path / "v2")
    run.publish(tmp_path / "v2", STEPS)
    # then it ends by itself once the last has its result
    assert second.wait(DEADLINE_S) == 0
    two = result(run, STEPS)
    assert [path.name for path in evaluation_files(run.dir)] == ["v0.json", "v1.json", "v2.json"]
    # and each result has all problems, and the figures of its answers
    for each in read_evaluations(evaluation_files(run.dir)):
        assert len(each.problems) == PROBLEMS and each.cpu_s > 0
        assert all(len(p.rewards) == SAMPLES for p in each.problems)
        assert each.figures == figures(each.problems)
        targets = {problem.target for problem in each.problems}
        assert targets == {8, 16, 24, 32}
    # and the same weights give the same answers, others give others
    assert two.problems == zero.problems
    lengths = [np.array([p.lengths for p in each.problems]) for each in (zero, one)]
    assert (lengths[0] != lengths[1]).any()
    # and an evaluator that is started once more has nothing to do
    third = start(run)
    assert third.wait(DEADLINE_S) == 0
    assert log.read_text().count("of version 0: mean") == 1
