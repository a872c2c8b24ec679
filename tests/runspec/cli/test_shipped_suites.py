"""Shipped suites: their rows load as they are published, and right and wrong answers are told."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runspec.cli.evaluate import bare_spec, suite_spec
from runspec.cli.shipped_suites import named_suite, shipped_names
from runspec.core.errors import BadUsage, UserError
from runspec.core.spec.schema import RunSpec, Source
from sampler.tasks.grading.answers import Answer
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import ProblemSource, make_source
from tests.runspec.cli.in_process import runspec
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
    file, overrides = named_suite(suite, data, folder)
    return suite_spec(bare_spec(folder, 512), file, overrides, folder)


def problems_of(spec: RunSpec, suite: str) -> ProblemSource:
    source = next(each for each in spec.data.sources if each.name == f"suite-{suite}")
    return make_source(source, 1, KeepAll())


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with closing(Graders([reward("math"), reward("code")])) as made:
        yield made


def test_every_suite_is_here() -> None:
    assert shipped_names() == sorted(RIGHT)


@pytest.mark.parametrize("suite", sorted(RIGHT))
def test_published_rows_load_and_are_graded(suite: str, tmp_path: Path, graders: Graders) -> None:
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


def test_prompts_say_what_is_asked_for(tmp_path: Path) -> None:
    spec = spec_of("humaneval", ROWS / "humaneval.jsonl", tmp_path)
    first = problems_of(spec, "humaneval").problem(0)
    assert first.problem_id == "HumanEval/0"
    assert first.prompt.startswith("Complete this Python function.\ndef twice")
    spec = spec_of("livecodebench", ROWS / "livecodebench.jsonl", tmp_path)
    program, function = (problems_of(spec, "livecodebench").problem(i).prompt for i in range(2))
    assert "standard input" in program and "class Solution" in function


def as_parquet(path: Path) -> Path:
    rows = [json.loads(line) for line in (ROWS / "math.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), path / "test.parquet")
    return path / "test.parquet"


def as_gzip(path: Path) -> Path:
    with (ROWS / "math.jsonl").open("rb") as plain, gzip.open(path / "t.jsonl.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    return path / "t.jsonl.gz"


@pytest.mark.parametrize("form", [as_parquet, as_gzip])
def test_problems_may_be_parquet_or_packed(form: Callable[[Path], Path], tmp_path: Path) -> None:
    data = form(tmp_path)
    (made := tmp_path / "made").mkdir()
    problems = problems_of(spec_of("math", data, made), "math")
    assert [problems.problem(i).verification for i in range(len(problems))] == [
        {"ground_truth": r"\frac{1}{2}"},
        {"ground_truth": "3"},
    ]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for suite, data, message in (
        ("gsm8k", None, "its problems are not here"),
        ("gsm8k", tmp_path / "none.jsonl", "there is no"),
        ("gsm9k", None, "no shipped suite"),
        (str(ROWS / "gsm8k.jsonl"), ROWS / "gsm8k.jsonl", "--data is of a shipped suite"),
    ):
        with pytest.raises(BadUsage, match=message):
            named_suite(suite, data, tmp_path)
    (broken := tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot be unpacked"):
        named_suite("gsm8k", broken, tmp_path)
    done = runspec("evaluate", "nothing", "--suite", "gsm8k", "--runs-dir", tmp_path)
    assert done.returncode == 1 and "no run 'nothing'" in done.stderr


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # A pickle that would call os.system is read as data, and refused.
        ({"private_test_cases": packed(b"cos\nsystem\n(S'true'\ntR.")}, "more than a text"),
        ({"private_test_cases": packed(b"\x80\x04")}, "cannot be unpacked"),
        ({"private_test_cases": packed(b"\x8c\x02[]\x94.")[:-4]}, "cut off|cannot be unpacked"),
        ({"private_test_cases": "no base64!"}, "cannot be unpacked"),
        ({"public_test_cases": '{"input": ""}'}, "is no list of tests"),
        ({"public_test_cases": '[{"input": 1, "output": ""}]'}, "input is 1, not a text"),
        ({"question_content": None}, "question_content is None"),
    ],
)
def test_a_malformed_row_of_livecodebench_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = json.loads((ROWS / "livecodebench.jsonl").read_text().splitlines()[0]) | change
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=message) as caught:
        make_source(Source(name="own", kind="livecodebench", uri=str(path)), 1, KeepAll())
    assert caught.value.place == "rows.jsonl:1"
