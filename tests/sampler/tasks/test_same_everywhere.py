"""Problems follow from the spec, the files and the tokenizer alone, in every process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runspec.common.errors import UserError
from runspec.spec.resolved import dump_resolved
from runspec.spec.schema import RunSpec, SolveRate
from runspec.spec.source_files import compare_data_digests, data_digest, source_files
from sampler.tasks.task_set import build_task_set
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.row_files import FORMS, make_rows, source, write_jsonl

PROMPTS_OF_LEASES = """\
import json, sys
from pathlib import Path
from runspec.spec.resolved import parse_resolved
from verify.formats.lease import Lease, assignments
from verify.plugins import load_task_set

spec = parse_resolved(Path(sys.argv[1]).read_bytes(), place="spec")
data = Path(sys.argv[3]) if len(sys.argv) > 3 else None
tasks = load_task_set(spec, Path(sys.argv[2]), data)
drawn = []
for index in range(8):
    lease = Lease(run="r", step=1, nonce="ab" * 32, worker="cd" * 32, pool="p", index=index,
        groups=4, version=0, manifest_digest="ef" * 32, issued=1.0, expires=2.0)
    for one in assignments(lease, n_problems=len(tasks), targets=tasks.targets):
        problem = tasks.problem(one.problem)
        drawn.append([problem.problem_id, tasks.prompt_tokens(one.problem, one.target)])
print(json.dumps([tasks.data_digest, len(tasks), drawn]))
"""


def spec_of(form: str, folder: Path) -> RunSpec:
    """The laptop's spec with one source: rows in a form, GSM8K's, or a generator."""
    spec = laptop_spec("data.max_prompt_tokens=60")
    rows = make_rows(300)
    for i, row in enumerate(rows):
        row["prompt"] = f"add {i} and {'x' * (i % 40)}"
        row["task_type"] = "reasoning_gym"
    if form == "gsm8k":
        path = folder / "gsm8k.jsonl"
        path.write_text(
            "".join(
                json.dumps({"question": row["prompt"], "answer": f"so\n#### {i}"}) + "\n"
                for i, row in enumerate(rows)
            )
        )
        one = source("gsm8k", path, task_types={"math": "reasoning_gym"})
    elif form == "reasoning_gym":
        return spec
    else:
        bounds = SolveRate(field="rate", min=0.1, max=0.9)
        one = FORMS[form](folder, rows).model_copy(update={"solve_rate": bounds})
    data = spec.data.model_copy(update={"sources": [one]})
    return spec.model_copy(update={"data": data})


def prompts(
    spec: RunSpec, tokenizer_dir: Path, home: Path, *, data_dir: Path | None = None, seed: str = "1"
) -> list[object]:
    """What another process draws, with nothing remembered."""
    home.mkdir()
    (home / "spec.json").write_bytes(dump_resolved(spec))
    command = [sys.executable, "-c", PROMPTS_OF_LEASES, str(home / "spec.json"), str(tokenizer_dir)]
    done = subprocess.run(
        [*command, *([str(data_dir)] if data_dir else [])],
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(home)},
        timeout=120,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, "gsm8k", "reasoning_gym"])
def test_two_processes_draw_the_same_prompts_from_the_same_leases(
    tmp_path: Path, tokenizer_dir: Path, form: str
) -> None:
    # Given a spec and its files
    spec = spec_of(form, tmp_path)

    # When two processes that share nothing else build its tasks
    first = prompts(spec, tokenizer_dir, tmp_path / "one", seed="1")
    second = prompts(spec, tokenizer_dir, tmp_path / "two", seed="2")

    # Then leases mean the same prompts, and some rows were left out by both
    assert first == second
    digest, count, drawn = first
    assert digest == data_digest(spec)
    assert isinstance(drawn, list)
    assert len(drawn) == 32
    assert form == "reasoning_gym" or (isinstance(count, int) and 50 < count < 290)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one_jsonl", "shards_of_parquet", "saved_dataset_dict"])
def test_a_volunteers_copy_of_the_files_means_the_same(
    tmp_path: Path, tokenizer_dir: Path, form: str
) -> None:
    # Given the files that the source names, copied elsewhere under their names
    spec = spec_of(form, tmp_path / "here")
    [one] = spec.data.sources
    copies = tmp_path / "there"
    for name, path in source_files(one).items():
        (copies / one.name / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copies / one.name / name)
    here = prompts(spec, tokenizer_dir, tmp_path / "one")

    # When a process has only these, and the uri of another machine
    gone = one.model_copy(update={"uri": "hf://datasets/not/here"})
    data = spec.data.model_copy(update={"sources": [gone]})
    there = prompts(
        spec.model_copy(update={"data": data}), tokenizer_dir, tmp_path / "two", data_dir=copies
    )

    # Then it draws the same prompts
    assert there == here


def test_the_rows_left_out_do_not_depend_on_what_is_remembered(
    tmp_path: Path, tokenizer_dir: Path, cache: Path
) -> None:
    spec = spec_of("one_parquet", tmp_path)
    first = build_task_set(spec, tokenizer_dir)
    assert len(list(cache.iterdir())) == 1
    second = build_task_set(spec, tokenizer_dir)
    assert [first.problem(i) for i in range(len(first))] == [
        second.problem(i) for i in range(len(second))
    ]


def test_other_data_is_noticed_by_its_digest(tmp_path: Path) -> None:
    spec = laptop_spec()
    rows = make_rows(5)
    one = source("jsonl", write_jsonl(tmp_path / "rows.jsonl", rows))
    with_rows = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": [one]})})
    before = data_digest(with_rows)
    assert data_digest(spec) != before

    # The same contents elsewhere: the same digest
    elsewhere = tmp_path / "copies" / "rows"
    elsewhere.mkdir(parents=True)
    shutil.copyfile(tmp_path / "rows.jsonl", elsewhere / "rows.jsonl")
    assert data_digest(with_rows, tmp_path / "copies") == before
    compare_data_digests(before, before, whose="worker ab")

    # One digit of one row: another, and both sides are named
    rows[3]["verification_info"] = '{"ground_truth": "7"}'
    write_jsonl(elsewhere / "rows.jsonl", rows)
    after = data_digest(with_rows, tmp_path / "copies")
    assert after != before
    with pytest.raises(UserError, match=f"of worker ab are made from other data .{after[:12]}"):
        compare_data_digests(before, after, whose="worker ab")


def test_another_version_of_a_generator_is_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    before = data_digest(laptop_spec())
    monkeypatch.setattr("runspec.spec.source_files.version", lambda name: "0.0.1")
    assert data_digest(laptop_spec()) != before
