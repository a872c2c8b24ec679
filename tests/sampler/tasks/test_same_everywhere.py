"""Problems follow from the spec, the files and the tokenizer alone, in every process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec, SolveRate
from runspec.core.spec.source_files import compare_data_digests, data_digest, source_files
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.row_files import FORMS, make_rows, source, write_jsonl

PROMPTS_OF_LEASES = """\
import json, os, sys
from pathlib import Path
from runspec.core.spec.resolved import parse_resolved
from verify.formats.lease import Lease, assignments
from verify.plugins import load_task_set

def prompts(home, data_dir):
    os.environ["XDG_CACHE_HOME"] = home
    spec = parse_resolved((Path(home) / "spec.json").read_bytes(), place="spec")
    tasks = load_task_set(spec, Path(sys.argv[1]), Path(data_dir) if data_dir else None)
    drawn = []
    for index in range(8):
        lease = Lease(run="r", step=1, nonce="ab" * 32, worker="cd" * 32, pool="p", index=index,
            groups=4, version=0, manifest_digest="ef" * 32, issued=1.0, expires=2.0)
        for one in assignments(lease, n_problems=len(tasks), targets=tasks.targets):
            problem = tasks.problem(one.problem)
            drawn.append([problem.problem_id, tasks.prompt_tokens(one.problem, one.target)])
    return [tasks.data_digest, len(tasks), drawn]

print(json.dumps([prompts(*one) for one in json.load(sys.stdin)]))
"""
GENERATED = "reasoning_gym"
EVERY = [*FORMS, "gsm8k", GENERATED]
COPIED = ["one_jsonl", "shards_of_parquet", "saved_dataset_dict"]


def spec_of(form: str, folder: Path) -> RunSpec:
    """The laptop's spec with one source: rows in a form, GSM8K's, or a generator."""
    spec = laptop_spec("data.max_prompt_tokens=60")
    rows = make_rows(300)
    for i, row in enumerate(rows):
        row["prompt"] = f"add {i} and {'x' * (i % 40)}"
        row["task_type"] = "reasoning_gym"
    if form == "gsm8k":
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "gsm8k.jsonl"
        path.write_text(
            "".join(
                json.dumps({"question": row["prompt"], "answer": f"so\n#### {i}"}) + "\n"
                for i, row in enumerate(rows)
            )
        )
        one = source("gsm8k", path, task_types={"math": "reasoning_gym"})
    elif form == GENERATED:
        return spec
    else:
        bounds = SolveRate(field="rate", min=0.1, max=0.9)
        one = FORMS[form](folder, rows).model_copy(update={"solve_rate": bounds})
    data = spec.data.model_copy(update={"sources": [one]})
    return spec.model_copy(update={"data": data})


Drawn = dict[str, list[object]]
"""By form: digest of the data, number of problems, [problem_id, prompt tokens] of each draw."""


def drawn_elsewhere(
    specs: dict[str, RunSpec],
    tokenizer_dir: Path,
    home: Path,
    *,
    data: dict[str, Path] | None = None,
    seed: str = "1",
) -> Drawn:
    """What another process draws from each spec in turn, with nothing remembered."""
    asked = []
    for form, spec in specs.items():
        (home / form).mkdir(parents=True)
        (home / form / "spec.json").write_bytes(dump_resolved(spec))
        asked.append([str(home / form), str(data[form]) if data else None])
    done = subprocess.run(
        [sys.executable, "-c", PROMPTS_OF_LEASES, str(tokenizer_dir)],
        input=json.dumps(asked).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        timeout=240,
        check=True,
    )
    return dict(zip(specs, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunSpec]:
    """A spec of each form, and its files. The start of a process is most of what one takes."""
    return {form: spec_of(form, tmp_path_factory.mktemp(form) / "here") for form in EVERY}


@pytest.fixture(scope="module")
def first(
    specs: dict[str, RunSpec], tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drawn:
    return drawn_elsewhere(specs, tokenizer_dir, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def second(
    specs: dict[str, RunSpec], tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drawn:
    """Drawn in the other order, so that nothing follows from what was built before."""
    backwards = dict(reversed(specs.items()))
    home = tmp_path_factory.mktemp("second")
    return drawn_elsewhere(backwards, tokenizer_dir, home, seed="2")


@pytest.fixture(scope="module")
def copied(
    specs: dict[str, RunSpec], tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drawn:
    """Drawn from copies of the files under their names, with the uri of another machine."""
    renamed, copies = {}, {}
    for form in COPIED:
        spec, copies[form] = specs[form], tmp_path_factory.mktemp("there")
        [one] = spec.data.sources
        for name, path in source_files(one).items():
            (copies[form] / one.name / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copies[form] / one.name / name)
        gone = one.model_copy(update={"uri": "hf://datasets/not/here"})
        data = spec.data.model_copy(update={"sources": [gone]})
        renamed[form] = spec.model_copy(update={"data": data})
    home = tmp_path_factory.mktemp("copied")
    return drawn_elsewhere(renamed, tokenizer_dir, home, data=copies)


@pytest.mark.slow
@pytest.mark.parametrize("form", EVERY)
def test_two_processes_draw_the_same_prompts_from_the_same_leases(
    specs: dict[str, RunSpec], first: Drawn, second: Drawn, form: str
) -> None:
    # Given two processes that share nothing else and built the tasks of a spec and its files, then
    # leases mean the same prompts, and some rows were left out by both
    assert first[form] == second[form]
    digest, count, drawn = first[form]
    assert digest == data_digest(specs[form])
    assert isinstance(drawn, list)
    assert len(drawn) == 32
    assert form == GENERATED or (isinstance(count, int) and 50 < count < 290)


@pytest.mark.slow
@pytest.mark.parametrize("form", COPIED)
def test_a_volunteers_copy_of_the_files_means_the_same(
    first: Drawn, copied: Drawn, form: str
) -> None:
    assert copied[form] == first[form]


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
    monkeypatch.setattr("runspec.core.spec.source_files.version", lambda name: "0.0.1")
    assert data_digest(laptop_spec()) != before
