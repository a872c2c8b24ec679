"""`runspec init`: what it writes is right at once, and it writes all or nothing."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from runspec.cli.init import MODELINES, TEMPLATES, initial_files
from runspec.cli.spec_files import sound_spec
from runspec.core.models.spec_model import named_model
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.role_names import validator_names, worker_names
from runspec.core.spec.schema_fields import schema_fields
from runspec.core.spec.validate import to_python
from runspec.core.spec.yaml_nodes import parse_yaml
from runspec.lint.check import check_spec
from runspec.local.preflight import look, missing
from sampler.tasks.traces import build_tokenizer, tokenizer_config
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SPECS
from tests.runspec.lock.repository import COMMIT, cache, write_model

FILES = [
    ".github/workflows/runspec.yaml",
    ".pre-commit-config.yaml",
    "runspec.schema.json",
    "spec.yaml",
]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def yaml(path: Path) -> object:
    document = parse_yaml(path.read_text(), str(path))
    assert document.findings == []
    assert document.root is not None
    return to_python(document.root)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's directory, whose chat template opens the thinking."""
    folder = write_model(tmp_path_factory.mktemp("models") / "mine")
    template = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}<think>"
    config = {**tokenizer_config(), "chat_template": template}
    tokenizer = build_tokenizer([], 1024)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {**(named_model("Qwen/Qwen3-4B") or {}), "num_hidden_layers": 2, "vocab_size": 1024}
    shape["eos_token_id"] = tokenizer.token_to_id("<eos>")
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def arguments(template: str, model: Path) -> list[str | Path]:
    return ["--template", template, *(["--model", model] if template in ("model", "sft") else [])]


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_it_writes_is_clean_fits_its_schema_and_has_a_plan(
    tmp_path: Path, template: str, model: Path
) -> None:
    # given a new project
    folder = tmp_path / "my-run"
    done = runspec("init", folder, *arguments(template, model))
    rows = {
        **{name: ["problems.jsonl"] for name in ("problems", "model", "node-8gpu")},
        "pretrain": ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"],
        "sft": ["conversations.jsonl"],
        "sums": [
            *("rl.yaml", "sft.jsonl", "problems.jsonl", "held_out.jsonl"),
            *(f"tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json")),
            "tokenizer/chat_template.jinja",
        ],
    }.get(template, [])
    assert (done.returncode, written(folder)) == (0, sorted([*FILES, *rows])), done.stderr
    # then its spec has no finding, and is what editors expect by the schema that it names
    spec = folder / "spec.yaml"
    checked = check_spec(SpecFiles(spec))
    assert checked.findings == []
    assert checked.require().name == "my-run"
    assert spec.read_text().startswith(MODELINES)
    for line in MODELINES.splitlines():
        assert (folder / line.rpartition("./")[2]).name == "runspec.schema.json"
    schema = json.loads((folder / "runspec.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(yaml(spec))
    # and the commands that it names next take it
    assert f"runspec lint {spec}" in done.stderr
    assert runspec("lint", spec).returncode == 0
    assert runspec("plan", spec, "--runs-dir", tmp_path).returncode == 0


@pytest.mark.parametrize("template", ["laptop", "problems", "sums", "model", "pretrain", "sft"])
def test_what_is_for_this_machine_starts_on_it(tmp_path: Path, template: str, model: Path) -> None:
    folder = tmp_path / "here"
    assert runspec("init", folder, *arguments(template, model)).returncode == 0
    # when it is asked what `apply` would say is missing here
    done = runspec("doctor", folder / "spec.yaml", "--runs-dir", tmp_path / "runs")
    # then nothing is
    assert "this machine has everything that it needs" in done.stdout


def test_eight_gpus_are_divided_among_the_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    # given a node with 8 GPUs that the driver names
    gpus = ["NVIDIA H200"] * 8
    monkeypatch.setattr("runspec.cli.init.gpu_names", lambda: gpus)
    folder = tmp_path / "node"
    assert runspec("init", folder, "-t", "node-8gpu", "--model", model).returncode == 0
    spec = sound_spec(SpecFiles(folder / "spec.yaml"))
    # then the spec asks for GPUs of that kind, every role has its own, and it can start there
    devices = spec.placement.devices
    assert spec.learner.hardware.kind == "h200-141g"
    assert sorted(number for numbers in devices.values() for number in numbers) == list(range(8))
    assert set(devices) == {"learner", *validator_names(spec), *worker_names(spec)}
    assert missing(spec, tmp_path / "runs", replace(look(), gpus=gpus)) == []


def test_lengths_follow_from_the_model(tmp_path: Path, model: Path) -> None:
    # given a model whose positions cover few tokens, and whose template opens no thinking
    small = write_model(tmp_path / "small", template="{{ messages }}")
    shape = {**json.loads((model / "config.json").read_text()), "max_position_embeddings": 128}
    (small / "config.json").write_text(json.dumps(shape))
    for folder, each in (("a", model), ("b", small)):
        assert runspec("init", tmp_path / folder, "-t", "model", "--model", each).returncode == 0
    found = [check_spec(SpecFiles(tmp_path / name / "spec.yaml")).require() for name in "ab"]
    assert [spec.model.hf for spec in found] == [str(model), str(small)]
    assert [spec.model.max_context for spec in found] == [40960, 128]
    assert [spec.samplers[0].max_model_len for spec in found] == [512, 128]
    assert [spec.data.think_prefill for spec in found] == [False, True]


def test_a_model_of_the_hub_is_pinned_where_it_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shutil.copytree(model, cache(tmp_path), dirs_exist_ok=True)
    for name in ("some/model", "other/model"):
        folder = tmp_path / name.replace("/", "-")
        assert runspec("init", folder, "-t", "model", "--model", name).returncode == 0
        spec = check_spec(SpecFiles(folder / "spec.yaml")).require()
        assert (spec.model.hf, spec.model.revision) == (
            name,
            COMMIT if name == "some/model" else None,
        )


def test_problems_that_are_there_stay(tmp_path: Path) -> None:
    # given a person's own file
    (tmp_path / "problems.jsonl").write_text("mine\n")
    done = runspec("init", tmp_path, "-t", "problems")
    assert done.returncode == 0 and "problems.jsonl" not in done.stdout
    assert runspec("init", tmp_path, "-t", "problems", "--force").returncode == 0
    assert (tmp_path / "problems.jsonl").read_text() == "mine\n"
    # and without one there are 500 that the task set can read
    runspec("init", tmp_path / "new", "-t", "problems")
    lines = (tmp_path / "new" / "problems.jsonl").read_text().splitlines()
    assert len({json.loads(line)["problem_id"] for line in lines}) == 500


@pytest.mark.parametrize("name", ["2026", "1e5", "null", "on", "a-b_c"])
def test_a_name_stays_text(tmp_path: Path, name: str) -> None:
    assert runspec("init", tmp_path, "--name", name).returncode == 0
    assert check_spec(SpecFiles(tmp_path / "spec.yaml")).require().name == name


def test_a_model_that_the_learner_cannot_compute_is_said(tmp_path: Path, model: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "config.json").write_text('{"model_type": "mamba"}')
    done = runspec("init", tmp_path / "x", "-t", "model", "--model", other)
    assert done.returncode == 2
    assert "mamba" in done.stderr and str(other / "config.json") in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["My Runs"], ["My Runs: 'My Runs' cannot be a run's name", "--name my-runs"]),
        (["x", "--name", "a/b"], ["--name: 'a/b' cannot be a run's name", "--name a-b"]),
        (["x", "-t", "model"], ["none is named", "--model DIR"]),
        (["x", "--model", "m"], ["the template laptop has a model", "--template model"]),
        (["x", "-t", "model", "--model", "./m"], ["no directory", "/m'", "ORG/NAME"]),
        (["x", "-t", "model", "--model", "m"], ["no directory", "/m'", "ORG/NAME"]),
        (["x", "-t", "model", "--model", "."], ["no directory", "config.json"]),
        (["x", "-t", "modle"], ["modle", "node-8gpu"]),
        (["file/x"], ["cannot write", "file/x", "choose a folder"]),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    done = runspec("init", *words)
    assert done.returncode == 2
    for each in said:
        assert each in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("template", "shipped", "profile"),
    [("laptop", "target_short", "laptop"), ("tpu-and-volunteers", "target_long", None)],
)
def test_it_learns_what_the_shipped_spec_learns(
    template: str, shipped: str, profile: str | None, tmp_path: Path
) -> None:
    # given what init writes, and the shipped spec that it is made after
    runspec("init", tmp_path / "run", "--template", template)
    ours = check_spec(SpecFiles(tmp_path / "run" / "spec.yaml")).require()
    theirs = check_spec(SpecFiles(SPECS / f"{shipped}.yaml", profile)).require()
    # then every field that another run would be needed for is the same
    for path, field in schema_fields().items():
        if field.change == "newrun" and "." not in path and path != "name":
            assert getattr(ours, path) == getattr(theirs, path), path


def test_files_that_are_there_stay_unless_forced(tmp_path: Path) -> None:
    # given one file of the four
    (tmp_path / "spec.yaml").write_text("mine\n")
    done = runspec("init", tmp_path)
    assert done.returncode == 2
    assert "already there: spec.yaml" in done.stderr
    assert "--force" in done.stderr
    assert (written(tmp_path), (tmp_path / "spec.yaml").read_text()) == (["spec.yaml"], "mine\n")
    # when it is forced, then all are written
    assert runspec("init", tmp_path, "--force").returncode == 0
    assert written(tmp_path) == FILES


def test_the_workflow_runs_the_command_on_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runspec("init", tmp_path)
    workflow = yaml(tmp_path / ".github/workflows/runspec.yaml")
    steps = workflow["jobs"]["lint"]["steps"]  # type: ignore[index]
    command = shlex.split(steps[-1]["run"])
    assert command[0] == "runspec"
    monkeypatch.chdir(tmp_path)
    assert runspec(*command[1:]).returncode == 0


def hooks() -> list[tuple[str, dict[str, str]]]:
    """The hook that the repository offers to others, and the one that init writes."""
    [offered] = yaml(ROOT / ".pre-commit-hooks.yaml")  # type: ignore[misc]
    content = parse_yaml(
        initial_files("laptop", "laptop")[".pre-commit-config.yaml"], "config"
    ).root
    assert content is not None
    [local] = to_python(content)["repos"][0]["hooks"]
    return [("offered", offered), ("local", local)]


@pytest.mark.parametrize(("name", "hook"), hooks(), ids=[name for name, _ in hooks()])
def test_the_hook_runs_as_pre_commit_runs_it(
    tmp_path: Path, name: str, hook: dict[str, str]
) -> None:
    # given the entry of a hook, with the files of a commit as arguments
    runspec("init", tmp_path)
    program, *arguments = shlex.split(hook["entry"])
    assert (program, hook["id"]) == ("runspec", "runspec-lint")
    # when the spec is right it passes, and when it is not it fails and says where
    for text, code in (("", 0), ("stepz: 3\n", 1)):
        with (tmp_path / "spec.yaml").open("a") as spec:
            spec.write(text)
        done = runspec(*arguments, tmp_path / "spec.yaml")
        assert done.returncode == code, done.stderr
        assert ("unknown-key" in done.stdout) == bool(code)
