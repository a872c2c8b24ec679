"""`runspec evaluate`: suites of one's own, shipped suites, and other projects' tools (`--with`).

A suite is asked of a model in test_serving.py; real tools are in a campaign.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runspec.cli import evaluation_suites as suites
from runspec.cli.evaluate import LOG_NAME, run_tool
from runspec.core.entry_points import Asked, Measured
from runspec.core.errors import BadUsage, UserError
from runspec.core.models.family import named_model
from runspec.core.schema import RunSpec, Source
from runspec.local.backend import StopSignals
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer, ProblemSource, make_source
from sampler.tasks.traces import build_warm_start_data
from tests import harness
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import small_spec
from tests.sampler.tasks.grading.plugin import reward
from tests.sampler.tasks.row_files import KeepAll, write_jsonl

ROWS = Path(__file__).parent / "suite_rows"
PROGRAM = "```python\n{}\n```"
SUM = PROGRAM.format("print(sum(map(int, input().split())))")
TOP = PROGRAM.format(
    "class Solution:\n    def top(self, nums: List[int], k: int) -> int:\n"
    "        return max(nums) + k"
)
RIGHT: dict[str, list[str]] = {
    "gsm8k": ["10 are left.", "The answer is $1200."],
    "math": [r"\boxed{\frac12}", r"\boxed{3}"],
    "aime": [r"\boxed{204}", r"It is \boxed{25}."],
    "humaneval": ["    return x + x"],
    "livecodebench": [SUM, TOP, PROGRAM.format("print('hello')")],
}
WRONG: dict[str, list[str]] = {
    "gsm8k": ["12", "600"],
    "math": [r"\boxed{\frac14}", r"\boxed{-3}"],
    "aime": [r"\boxed{203}", r"\boxed{52}"],
    "humaneval": ["    return 4"],
    # The public test alone would pass the first two.
    "livecodebench": [PROGRAM.format("print(3)"), TOP.replace("max(nums)", "3"), SUM],
}


def spec_of(suite: str, data: Path, folder: Path) -> RunSpec:
    file, overrides = suites.named_suite(suite, data, folder)
    return suites.suite_spec(suites.bare_spec(folder, 512), file, overrides, folder)


def problems_of(spec: RunSpec, suite: str) -> ProblemSource:
    source = next(each for each in spec.data.sources if each.name == f"suite-{suite}")
    return make_source(source, 1, KeepAll())


@pytest.fixture(scope="module")
def graders():
    with closing(Graders([reward("math", timeout="10m"), reward("code", timeout="10m")])) as made:
        yield made


def test_every_suite_is_here():
    assert suites.shipped_names() == sorted(RIGHT)


@pytest.mark.parametrize("suite", sorted(RIGHT))
def test_published_rows_load_and_are_graded(suite, tmp_path, graders):
    # given rows with the columns of the public data set, of which some are not read
    spec = spec_of(suite, ROWS / f"{suite}.jsonl", tmp_path)
    problems = problems_of(spec, suite)
    # then the suite's evaluation asks them, and a term grades each
    assert [each.name for each in spec.evaluations] == [f"suite-{suite}"]
    assert problems.task_types <= {term.kind for term in spec.reward}
    assert len(problems) == len(RIGHT[suite])
    for answers, wanted in ((RIGHT[suite], 1.0), (WRONG[suite], 0.0)):
        asked = [Answer(problems.problem(i), text) for i, text in enumerate(answers)]
        assert [getattr(r, "value", r) for r in graders.score(asked)] == [wanted] * len(asked)
    # and prompts say what is asked for
    prompts = [problems.problem(i).prompt for i in range(len(problems))]
    if suite == "humaneval":
        assert problems.problem(0).problem_id == "HumanEval/0"
        assert prompts[0].startswith("Complete this Python function.\ndef twice")
    if suite == "livecodebench":
        assert "standard input" in prompts[0] and "class Solution" in prompts[1]


@pytest.mark.parametrize("name", ["test.parquet", "test.jsonl.gz"])
def test_problems_may_be_parquet_or_packed(name, tmp_path):
    text = (ROWS / "math.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    if name == "test.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    (made := tmp_path / "made").mkdir()
    problems = problems_of(spec_of("math", tmp_path / name, made), "math")
    found = [problems.problem(i).verification for i in range(len(problems))]
    assert found == [{"ground_truth": row["answer"]} for row in rows]


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        # A pickle that would call os.system is read as data, and refused.
        ("private_test_cases", packed(b"cos\nsystem\n(S'true'\ntR."), "more than a text"),
        ("private_test_cases", packed(b"\x80\x04"), "cannot be unpacked"),
        ("private_test_cases", packed(b"\x8c\x02[]\x94.")[:-4], "cut off|cannot be unpacked"),
        ("private_test_cases", "no base64!", "cannot be unpacked"),
        ("public_test_cases", '{"input": ""}', "is no list of tests"),
        ("public_test_cases", '[{"input": 1, "output": ""}]', "input is 1, not a text"),
        ("question_content", None, "question_content is None"),
    ],
)
def test_a_malformed_row_of_livecodebench_is_named(tmp_path, column, value, message):
    row = json.loads((ROWS / "livecodebench.jsonl").read_text().splitlines()[0])
    path = write_jsonl(tmp_path / "rows.jsonl", [row | {column: value}])
    with pytest.raises(UserError, match=message) as caught:
        make_source(Source(name="own", kind="livecodebench", uri=str(path)), 1, KeepAll())
    assert caught.value.place == "rows.jsonl:1"


def test_a_suite_whose_problems_are_missing_is_named(tmp_path):
    for suite, data, message in (
        ("gsm8k", None, "its problems are not here"),
        ("gsm8k", tmp_path / "none.jsonl", "there is no"),
        ("gsm9k", None, "no shipped suite"),
        (str(ROWS / "gsm8k.jsonl"), ROWS / "gsm8k.jsonl", "--data is of a shipped suite"),
    ):
        with pytest.raises(BadUsage, match=message):
            suites.named_suite(suite, data, tmp_path)
    (broken := tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot be unpacked"):
        suites.named_suite("gsm8k", broken, tmp_path)


OWN = {"name": "own", "kind": "parquet", "uri": "x", "params": {"prompt": "q", "split": "train"}}


@pytest.mark.parametrize(
    ("sources", "reward", "column"),
    [
        ([], [], "prompt"),  # a model that no run made
        ([{"name": "made", "kind": "reasoning_gym"}], ["reasoning_gym"], "prompt"),
        ([OWN], ["math"], "q"),  # the columns of the run's own rows
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_a_suite_are_asked_in_the_form_of_the_run(
    tmp_path, sources, reward, column, suffix
):
    row = {"problem_id": "a", "task_type": "math", column: "1+1?"}
    rows = [{**row, "verification_info": json.dumps({"ground_truth": "2"})}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), data := tmp_path / "rows.parquet")
    base = suites.bare_spec(tmp_path, 512)
    base["data"]["sources"] = sources
    base["reward"] = [{"name": kind, "kind": kind} for kind in reward]
    spec = suites.suite_spec(base, suites.rows_suite(base, data, tmp_path), (), tmp_path)
    [source] = [each for each in spec.data.sources if each.name == suites.ROWS]
    assert (source.train, spec.evaluations[-1].source) == (False, suites.ROWS)
    assert make_source(source, 1, KeepAll()).problem(0).prompt == "1+1?"
    assert "math" in {term.kind for term in spec.reward}


def test_a_wrong_row_is_named_by_its_file_and_line_before_a_model_is_loaded(tmp_path):
    # given the tokenizer of a model whose weights are not here, and a row without an answer
    build_warm_start_data(small_spec()).write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(named_model("Qwen/Qwen3-4B")))
    row = {"problem_id": "a", "task_type": "math", "prompt": "1+1?"}
    right = {**row, "verification_info": {"ground_truth": "2"}}
    write_jsonl(tmp_path / "rows.jsonl", [right, {**row, "problem_id": "b"}])
    done = harness.runspec("evaluate", str(tmp_path), "--data", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 1
    assert "error: rows.jsonl:2: verification_info is missing" in done.stderr
    assert "runspec-evaluate-" not in done.stderr and "waits for vLLM" not in done.stderr


WITH = ("nothing", "--with", "lm-eval")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("MODEL", "--suite", "SUITE", "--set", "evaluations.all.source=x"), 1, "no source x"),
        (("MODEL",), 1, "ask rows with --data ROWS.jsonl"),
        (("MODEL", "--data", "no.jsonl"), 2, "there is no no.jsonl"),
        (("MODEL", "--suite", "rows.jsonl"), 2, "remedy: --data rows.jsonl without --suite"),
        (("MODEL", "--suite", "EMPTY"), 1, "empty.yaml:1:1: error missing-key: reward"),
        (("nothing@1", "--suite", "SUITE"), 1, "no run 'nothing'"),
        (("nothing@new", "--suite", "SUITE"), 2, "no version: 'new'"),
        (("nothing", "--with", "nothing"), 2, "no adapter 'nothing'"),
        ((*WITH, "--task", "t"), 2, "its environment is not named"),
        ((*WITH, "--python", "/none"), 2, "there is no /none"),
        ((*WITH, "--python", sys.executable), 2, "no task"),
        ((*WITH, "--suite", "math"), 2, "--suite beside --with"),
        (("nothing", "--task", "t"), 2, "--task without --with"),
        (("nothing", "--", "-T", "a=b"), 2, "options after -- without --with"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(tmp_path, words, code, message):
    suite = "data: {sources: [{name: rows, kind: jsonl, uri: rows.jsonl, train: false}]}\n"
    suite += "reward: [{name: math, kind: math}]\nevaluations: [{name: all, source: rows}]\n"
    (tmp_path / "suite.yaml").write_text(suite)
    (tmp_path / "config.json").write_text(json.dumps(named_model("Qwen/Qwen3-4B")))
    (tmp_path / "empty.yaml").write_text("evaluations: [{name: all}]\n")
    places = {name.upper(): str(tmp_path / f"{name}.yaml") for name in ("suite", "empty")}
    places["MODEL"] = str(tmp_path)
    runs_dir = () if "--" in words else ("--runs-dir", tmp_path)
    done = runspec("evaluate", *(places.get(word, word) for word in words), *runs_dir)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr


class FakeTool:
    """An adapter to a Python program."""

    def __init__(self, program: str) -> None:
        self._program = program

    def command(self, asked: Asked) -> list[str]:
        return [str(asked.python), "-c", self._program, *asked.more]

    def measured(self, out: Path) -> Mapping[str, Measured]:
        raise NotImplementedError


@pytest.fixture
def run(tmp_path):
    """Runs a tool beside what stands for the server: a process that goes on.

    A program is told, after its other arguments, the folder and the server's process.
    """
    (tmp_path / "server.log").write_text("out of memory\n")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as server, StopSignals() as stops:

        def run(program: str, *more: str) -> bool:
            more = (*more, str(tmp_path), str(server.pid))
            asked = Asked(Path(sys.executable), "", "m", tmp_path, 64, "task", tmp_path, more)
            return run_tool(FakeTool(program), asked, server, tmp_path / "server.log", stops)

        yield run


def test_what_a_tool_prints_goes_to_its_log_and_into_the_error_if_it_fails(run, tmp_path):
    program = "import os, sys; print(os.environ['RUNSPEC_API_KEY'], sys.argv[1:3])"
    assert run(program, "-T", "a=b")
    assert (tmp_path / LOG_NAME).read_text() == "none ['-T', 'a=b']\n"
    with pytest.raises(UserError, match="exit code 3\nno such task"):
        run("import sys; print('no such task'); sys.exit(3)")


@pytest.mark.parametrize("ending", ["server", "signal"])
def test_a_tool_ends_with_the_server_or_on_a_signal(run, tmp_path, ending):
    # given a tool that asks for ever, once it runs
    program = (
        "import os, pathlib, signal, sys\n"
        "number, ours, folder, server = sys.argv[1:]\n"
        "pathlib.Path(folder, 'pid').write_text(str(os.getpid()))\n"
        "os.kill(int(server if number == '9' else ours), int(number))\n"
        "signal.pause()\n"
    )
    # when the server dies, or the user presses Ctrl-C
    if ending == "server":
        with pytest.raises(UserError, match="the server ended with exit code -9\nout of memory"):
            run(program, "9", "")
    else:
        assert not run(program, "15", str(os.getpid()))
    # then the tool is gone
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
