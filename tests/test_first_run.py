"""What docs/first-run.md shows is run as it stands: its files are written, its commands called.

Commands that need a run with engines are those of `tests/e2e/test_own_problems.py`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner_jax.corpus.tokenizer import train_tokenizer
from runspec.cli.init import SUMS_ASKED, SUMS_SHOWN, data_files, initial_files, sums, worked
from runspec.core.models.family import named_model
from runspec.core.schema.load import SpecFiles, load_layers
from runspec.core.schema.validate import to_python
from runspec.core.schema.yaml_nodes import parse_yaml
from tests.first_run_page import blocks, commands, files
from tests.runspec.lock.repository import write_model

NEED_A_RUN = ("runspec apply", "runspec status", "runspec describe", "runspec logs")
NEED_AN_ENGINE = ("python -m sampler solve-rates",)
SHORTENED = {
    "runspec apply carries/spec.yaml": [
        f"--set algorithm.{value}" for value in ("updates_per_step=1", "publish_every=17")
    ]
}
"""Runs without engines, and what makes them short."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment of its own, which has all that this one has."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    libraries = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    ours = sysconfig.get_path("purelib")
    (libraries / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    python = folder / "bin" / "python"
    offline = "--no-deps --no-index --no-build-isolation"
    pip = f'{sys.executable} -m pip --python {python} "$@" {offline}'
    for name, command in (("runspec", f'{python} -m runspec "$@"'), ("pip", pip)):
        (folder / "bin" / name).write_text(f"#!/bin/sh\nexec {command}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, environment: Path) -> dict[str, str]:
    """What each command printed, called in order in one folder with the page's files."""
    folder = tmp_path_factory.mktemp("first-run")
    for name, text in files():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    # given what the page takes as there: a model, and the file that `solve-rates` writes
    write_model(folder / "my-model")
    shape = {**(named_model("Qwen/Qwen3-4B") or {}), "num_hidden_layers": 2, "vocab_size": 1024}
    (folder / "my-model" / "config.json").write_text(json.dumps(shape))
    row = {"problem_id": "1", "task_type": "math", "prompt": "1 + 1", "verification_info": "{}"}
    pq.write_table(pa.Table.from_pylist([row | {"solve_rate": 0.5}]), folder / "rates.parquet")
    results = {}
    for command in commands():
        if command.startswith(NEED_A_RUN + NEED_AN_ENGINE) and command not in SHORTENED:
            continue
        done = subprocess.run(
            " ".join([command, *SHORTENED.get(command, [])]),
            shell=True,
            cwd=folder,
            env={"PATH": f"{environment}:/usr/bin:/bin", "HOME": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        results[command] = done.stdout + done.stderr
    return results


@pytest.mark.nightly
def test_every_command_of_the_page_works(printed: dict[str, str]) -> None:
    assert len(printed) >= 11
    for command, text in printed.items():
        if " lint " in command:
            assert "0 errors, 0 warnings" in text, f"{command}: {text}"
        if " plan " in command:
            assert "is new: " in text


@pytest.mark.nightly
def test_the_second_run_starts_from_the_model_of_the_first(
    printed: dict[str, str],
) -> None:
    # given that the first run has ended, its model is the one that the second spec names
    said = printed["runspec apply carries/spec.yaml"]
    model = re.search(r"Hugging Face directory: (\S+)", said)
    assert model is not None and Path(model[1]).match("first-run*/runs/carries/weights/v17")
    assert "no directory" not in printed["runspec lint --data carries/rl.yaml"]


def test_the_sums_of_the_page_are_those_of_the_template() -> None:
    # given the files of the template, no sum is in two of them
    files = {
        name: [json.loads(line) for line in text.splitlines()]
        for name, text in data_files(seed=0).items()
    }
    talks = files["sft.jsonl"]
    asked = [talk["messages"][0]["content"] for talk in talks]
    asked += [row["prompt"] for name in ("problems", "held_out") for row in files[f"{name}.jsonl"]]
    assert len(asked) == len(set(asked)) == 4500
    # then the page shows one as `worked` writes them, and the answer is right in each
    [shown] = [json.loads(text) for text in blocks("json") if "messages" in text]
    assert shown["messages"][1]["content"] == worked(37, 48)
    for talk in talks:
        question, answer = (each["content"] for each in talk["messages"])
        a, b = map(int, question.rstrip("=").split("+"))
        *carries, last = answer.partition("</think>")[0].split(";")
        assert answer == worked(a, b) and answer.endswith(f"</think>{a + b}")
        for said in (*carries, last):
            terms, total = said.split("=")
            assert sum(map(int, terms.split("+"))) == int(total)


def test_the_tokenizer_of_the_template_is_made_of_its_sums() -> None:
    texts = [worked(*pair) for pair in sums(seed=0)[: SUMS_SHOWN + SUMS_ASKED]]
    made = json.loads(train_tokenizer(texts, 264, "text").to_str())
    assert made == json.loads(initial_files("sums", "x")["tokenizer/tokenizer.json"])


@pytest.mark.nightly
def test_the_package_is_found_and_grades_as_the_page_says(printed: dict[str, str]) -> None:
    near = next(
        line for line in printed["python -m sampler rewards"].splitlines() if "near" in line
    )
    assert "my-tasks 0.1" in near and "task" in near
    grades = printed["python -m sampler grade answers.jsonl"].splitlines()
    assert [line.split() for line in grades[:2]] == [["1", "0.9"], ["2", "0"]]


def test_the_lines_that_the_page_shows_of_the_spec_are_those_of_the_template(
    tmp_path: Path,
) -> None:
    [shown] = [text for text in blocks("yaml") if text.startswith("model:")]
    assert len(shown.splitlines()) == 15
    document = parse_yaml(shown, "page")
    assert document.root is not None
    subprocess.run(
        [sys.executable, "-m", "runspec", "init", tmp_path / "sums", "--template", "problems"],
        check=True,
        capture_output=True,
    )
    spec = load_layers(SpecFiles(tmp_path / "sums" / "spec.yaml")).require()

    def holds(part: object, whole: object) -> bool:
        if isinstance(part, dict) and isinstance(whole, dict):
            return all(holds(value, whole.get(key)) for key, value in part.items())
        if isinstance(part, list) and isinstance(whole, list):
            return len(part) == len(whole) and all(map(holds, part, whole))
        return part == whole

    assert holds(to_python(document.root), spec.model_dump(mode="json"))


def test_a_table_becomes_problems(tmp_path: Path) -> None:
    script = dict(files())["rows.py"]
    (tmp_path / "sums").mkdir()
    (tmp_path / "table.csv").write_text("question,answer\nWhat is 7 + 5?,12\n")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    written = json.loads((tmp_path / "sums" / "problems.jsonl").read_text())
    [shown] = [text for text in blocks("json") if "problem_id" in text]
    assert written | {"problem_id": "1"} == json.loads(shown)
