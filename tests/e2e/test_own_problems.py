"""One run of the problems that `runspec init --template problems` writes, cut to a few steps.

Shows: a person who has a file of problems and docs/first-run.md gets a warm start that solves some
of them, steps that train on them, a report with their figures, and the page's commands on the run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.first_run_page import commands
from tests.harness import LiveRun, runspec

pytestmark = pytest.mark.nightly

STEPS = 4


class OwnProblems(LiveRun):
    """A run of the spec that `init` wrote beside its runs."""

    @property
    def words(self) -> list[str]:
        spec = str(self.runs_dir / self.name / "spec.yaml")
        values = (f"steps={STEPS}", "checkpoints.every=2", self.compile_cache)
        sets = [word for value in values for word in ("--set", value)]
        return [spec, "--runs-dir", str(self.runs_dir / "runs"), *sets]

    @property
    def dir(self):
        return self.runs_dir / "runs" / self.name


@pytest.fixture(scope="module")
def finished(runs_dir):
    # given what the page's first command writes
    done = subprocess.run(
        [sys.executable, "-m", *commands()[0].split()], cwd=runs_dir, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # when the run is applied as it stands, but for its length
    with OwnProblems(runs_dir, "sums") as run:
        run.finish()
    return run


def test_it_trains_on_problems_of_which_the_start_solves_some(finished):
    # then the warm start says which problems there are, and how many it solves
    logged = (finished.dir / "logs" / "warm-start.log").read_text()
    assert "source problems: 451 to train on, 49 held out, 0 over-long" in logged
    shown = finished._output.read_text()
    [share] = re.findall(r"warm-start: sampled at temperature 1: (\d+)% of training", shown)
    record = json.loads((finished.dir / "initial" / "warm_start.json").read_text())
    assert record["sampled_right"]["train"] == pytest.approx(int(share) / 100, abs=0.006)
    assert 0.05 < record["sampled_right"]["train"] < 0.8
    # and vLLM's samples of the first step, graded by the run, are right about as often
    rows = finished.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert abs(rows[0]["task_reward"] - record["sampled_right"]["train"]) < 0.2
    assert all(row["complete"] and row["grad_norm"] > 0 for row in rows)


def test_the_report_and_the_commands_of_the_page_have_its_figures(finished):
    summary = json.loads((finished.dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0.05 < summary["task_reward_first"] < 0.8
    assert [each["version"] for each in summary["evaluations"]["held-out"]] == [0, STEPS]
    assert "Task reward" in (finished.dir / "report.html").read_text()
    assert "no rollout of step" not in finished._output.read_text()
    about = [line.split()[1:] for line in commands() if re.match("runspec .* sums( |$)", line)]
    asked = [words for words in about if words[0] in ("status", "describe", "logs")]
    assert len(asked) == 3
    for words in asked:
        done = runspec(*words, "--runs-dir", finished.dir.parent)
        assert done.returncode == 0, done.stderr
    told = runspec("status", finished.dir, "--json")
    conditions = {each["type"]: each["status"] for each in json.loads(told.stdout)["conditions"]}
    assert (conditions["Finished"], conditions["NothingSolved"]) == ("True", "False")


def test_the_model_is_evaluated_on_rows_exported_and_talked_to(finished, tmp_path):
    # given some of the person's rows, in a file of their own
    source = (finished.runs_dir / "sums" / "problems.jsonl").read_text().splitlines()
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(source[:6]) + "\n")
    runs = ("--runs-dir", finished.dir.parent)
    # when the run's model is evaluated on them, then answers are shown with what the grader says
    evaluated = runspec("evaluate", "sums", "--data", rows, "--samples", "2", *runs)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "6 problems" in evaluated.stdout and evaluated.stdout.count("  output ") == 2
    # when it is exported, then the copy is what was published, and says how to load it
    model = tmp_path / "model"
    exported = runspec("export", "sums", model, *runs)
    assert exported.returncode == 0, exported.stderr
    assert "AutoTokenizer.from_pretrained" in (model / "README.md").read_text()
    # and somebody talks to it
    talk = [sys.executable, "-m", "runspec", "chat", str(model), "--max-tokens", "8"]
    asked = subprocess.run(talk, input="what is 1 + 2 ?\n", capture_output=True, text=True)
    assert asked.returncode == 0 and "tokens)" in asked.stdout, asked.stderr
