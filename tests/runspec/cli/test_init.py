"""`runspec init`: what it writes is right at once, and it writes all or nothing."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest

from runspec.cli.checks import sound_spec
from runspec.cli.init import MODELINES, TEMPLATES
from runspec.core.models.family import named_model
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.core.schema.role_names import validator_names, worker_names
from runspec.core.schema.validate import to_python
from runspec.core.schema.yaml_nodes import parse_yaml
from runspec.lint.check import check_spec
from runspec.local.machine import look
from runspec.local.preflight import missing
from sampler.tasks.traces import TOKENIZER_CONFIG, build_tokenizer
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec
from tests.runspec.lock.repository import COMMIT, cache, write_model

pytestmark = pytest.mark.slow

WORKFLOW, HOOK = ".github/workflows/runspec.yaml", ".pre-commit-config.yaml"
FILES = [WORKFLOW, HOOK, "runspec.schema.json", "spec.yaml"]
ANYWHERE = ("laptop", "problems", "sums", "tools", "model", "pretrain", "sft")
"""Templates of runs that this machine can start."""
DISK = 1 << 40
"""Bytes that are free, whatever else lies on this machine's disk."""


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def yaml(path: Path) -> Any:
    document = parse_yaml(path.read_text(), str(path))
    assert document.findings == [] and document.root is not None
    return to_python(document.root)


def init(folder: Path, template: str, model: Path | str | None = None) -> CompletedProcess[str]:
    named = [] if model is None else ["--model", model]
    return runspec("init", folder, "--template", template, *named)


def spec_of(folder: Path) -> RunSpec:
    return check_spec(SpecFiles(folder / "spec.yaml")).require()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model's directory, whose chat template opens the thinking."""
    folder = write_model(tmp_path_factory.mktemp("models") / "mine")
    template = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<think>{% endif %}"
    config = {**TOKENIZER_CONFIG, "chat_template": template}
    tokenizer = build_tokenizer([], 1024)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {**(named_model("Qwen/Qwen3-4B") or {}), "num_hidden_layers": 2, "vocab_size": 1024}
    shape["eos_token_id"] = tokenizer.token_to_id("<eos>")
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_it_writes_is_clean_has_a_plan_and_starts_here(tmp_path, template, model):
    # given a new project
    folder, spec = tmp_path / "my-run", tmp_path / "my-run" / "spec.yaml"
    done = init(folder, template, model if template in ("model", "sft") else None)
    assert done.returncode == 0 and set(FILES) <= set(written(folder)), done.stderr
    # then its spec has no finding, and is what editors expect by the schema that it names
    assert spec_of(folder).name == "my-run"
    assert f"runspec lint {spec}" in done.stderr and runspec("lint", spec).stdout == ""
    assert spec.read_text().startswith(MODELINES)
    for line in MODELINES.splitlines():
        assert (folder / line.rpartition("./")[2]).name == "runspec.schema.json"
    schema = json.loads((folder / "runspec.schema.json").read_text())
    jsonschema.Draft7Validator(schema).validate(yaml(spec))
    # and it has a plan, and what is for this machine lacks nothing here
    assert runspec("plan", spec, "--runs-dir", tmp_path).returncode == 0
    here = replace(look(), free_bytes=lambda _: DISK)
    found = missing(sound_spec(SpecFiles(spec)), tmp_path / "runs", here)
    assert (found == []) == (template in ANYWHERE), found
    # and a file of problems of one's own has a part that is asked but not trained on
    if template in ("problems", "model"):
        made = spec_of(folder)
        assert made.holds_out and [each.source for each in made.evaluations] == [None]


def test_eight_gpus_are_divided_among_the_roles(tmp_path, monkeypatch, model):
    # given a node with 8 GPUs that the driver names
    gpus = ["NVIDIA H200"] * 8
    monkeypatch.setattr("runspec.cli.init.gpu_names", lambda: gpus)
    assert init(tmp_path / "node", "node-8gpu", model).returncode == 0
    spec = sound_spec(SpecFiles(tmp_path / "node" / "spec.yaml"))
    # then the spec asks for GPUs of that kind, every role has its own, and it can start there
    devices = spec.placement.devices
    assert spec.learner.hardware.kind == "h200-141g"
    assert sorted(number for numbers in devices.values() for number in numbers) == list(range(8))
    assert set(devices) == {"learner", *validator_names(spec), *worker_names(spec)}
    node = replace(look(), gpus=gpus, free_bytes=lambda _: DISK)
    assert missing(spec, tmp_path / "runs", node) == []


def test_lengths_follow_from_the_model(tmp_path, model):
    # given a model whose positions cover few tokens, and whose template opens no thinking
    small = write_model(tmp_path / "small", template="{{ messages }}")
    shape = {**json.loads((model / "config.json").read_text()), "max_position_embeddings": 128}
    (small / "config.json").write_text(json.dumps(shape))
    forms = ((model, 40960, 512, "required"), (small, 128, 128, "none"))
    for each, context, length, thinking in forms:
        assert init(tmp_path / f"{context}", "model", each).returncode == 0
        spec = spec_of(tmp_path / f"{context}")
        assert (spec.model.hf, spec.model.max_context) == (str(each), context)
        assert (spec.samplers[0].max_model_len, spec.data.thinking) == (length, thinking)
        assert not spec.data.think_prefill


def test_a_model_of_the_hub_is_pinned_where_it_is_in_the_cache(tmp_path, monkeypatch, model):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shutil.copytree(model, cache(tmp_path), dirs_exist_ok=True)
    for name, commit in (("some/model", COMMIT), ("other/model", None)):
        assert init(tmp_path / name, "model", name).returncode == 0
        found = spec_of(tmp_path / name).model
        assert (found.hf, found.revision) == (name, commit)


@pytest.mark.parametrize("name", ["1e5", "on"])
def test_a_name_stays_text(tmp_path, name):
    assert runspec("init", tmp_path, "--name", name).returncode == 0
    assert spec_of(tmp_path).name == name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["My Runs"], ["My Runs: 'My Runs' cannot be a run's name", "--name my-runs"]),
        (["x", "--name", "a/b"], ["--name: 'a/b' cannot be a run's name", "--name a-b"]),
        (["x", "-t", "model"], ["none is named", "--model DIR"]),
        (["x", "--model", "m"], ["the template laptop has a model", "--template model"]),
        (["x", "-t", "model", "--model", "./m"], ["no directory", "/m'", "ORG/NAME"]),
        (["x", "-t", "model", "--model", "."], ["no directory", "config.json"]),
        (["x", "-t", "model", "--model", "other"], ["mamba", "other/config.json"]),
        (["x", "-t", "modle"], ["modle", "node-8gpu"]),
        (["file/x"], ["cannot write", "file/x", "choose a folder"]),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is(tmp_path, monkeypatch, model, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "mamba"}')
    done = runspec("init", *words)
    assert done.returncode == 2
    assert [each for each in said if each not in done.stderr] == []
    assert {path.name for path in tmp_path.iterdir()} == {"file", "other"}


def test_files_that_are_there_stay_unless_forced(tmp_path):
    # given one file of the four
    (tmp_path / "spec.yaml").write_text("mine\n")
    done = runspec("init", tmp_path)
    assert done.returncode == 2
    assert "already there: spec.yaml" in done.stderr and "--force" in done.stderr
    assert (written(tmp_path), (tmp_path / "spec.yaml").read_text()) == (["spec.yaml"], "mine\n")
    # when it is forced, then all are written
    assert runspec("init", tmp_path, "--force").returncode == 0
    assert written(tmp_path) == FILES
    # and a file of data is kept and written over like them
    words = ("init", tmp_path / "own", "--template", "problems")
    rows = tmp_path / "own" / "problems.jsonl"
    rows.parent.mkdir()
    rows.write_text("mine\n")
    assert (runspec(*words).returncode, rows.read_text()) == (0, "mine\n")
    assert runspec(*words, "--force").returncode == 0
    lines = rows.read_text().splitlines()
    assert len({json.loads(line)["problem_id"] for line in lines}) == 500


def test_workflow_and_hooks_run_the_command_on_the_spec(tmp_path, monkeypatch):
    # given the step of CI, the hook that init writes, and the one that the repository offers
    runspec("init", tmp_path)
    steps = yaml(tmp_path / WORKFLOW)["jobs"]["lint"]["steps"]
    [local] = yaml(tmp_path / HOOK)["repos"][0]["hooks"]
    [offered] = yaml(ROOT / ".pre-commit-hooks.yaml")
    assert local["id"] == offered["id"] == "runspec-lint"
    step = shlex.split(steps[-1]["run"])
    hooks = [[*shlex.split(hook["entry"]), "spec.yaml"] for hook in (local, offered)]
    monkeypatch.chdir(tmp_path)
    # when the spec is right they pass, and when it is not they fail and say where
    for text, code in (("", 0), ("stepz: 3\n", 1)):
        with (tmp_path / "spec.yaml").open("a") as spec:
            spec.write(text)
        for program, *arguments in (step, *hooks):
            done = runspec(*arguments)
            assert (program, done.returncode) == ("runspec", code), done.stderr
            assert ("unknown-key" in done.stdout) == bool(code)
