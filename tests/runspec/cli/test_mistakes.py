"""The mistakes of a first hour: each ends `apply` with one message, before a role is started.

A message names the thing, the place and the remedy. `apply` leaves no run directory behind.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from runspec.cli.init import initial_files
from tests.runspec.cli.in_process import runspec
from tests.sampler.tasks.grading.plugin import install

ROWS = [
    {
        "problem_id": f"add-{a}-{b}",
        "task_type": "math",
        "prompt": f"{a} + {b}",
        "verification_info": {"ground_truth": str(a + b)},
    }
    for a in range(2, 12)
    for b in range(2, 12)
]
LENGTH = "{name: length, kind: target_length, form: exact, alpha: 0.02, targets: [8, 16]}"


class Project:
    """A folder with a spec of one's own problems, which is right until a test makes it wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "spec.yaml"
        self.spec.write_text(initial_files("problems", "sums")["spec.yaml"])
        self.write_rows(ROWS)

    def replace(self, old: str, new: str) -> None:
        text = self.spec.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the spec"
        self.spec.write_text(text.replace(old, new))

    def write_rows(self, rows: list[dict[str, object]]) -> None:
        lines = [json.dumps(row) + "\n" for row in rows]
        (self.folder / "problems.jsonl").write_text("".join(lines))

    def apply(self, *arguments: str | Path) -> CompletedProcess[str]:
        return runspec("apply", self.spec, "--runs-dir", self.folder / "runs", *arguments)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path)


def says(done: CompletedProcess[str], *words: str) -> None:
    """The command failed, and every one of the words stands in its message."""
    said = " ".join(done.stderr.split())
    assert done.returncode in (1, 2), said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"
    assert "Traceback" not in said


MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "misspelt key": (
        "seed: 42",
        "sede: 42",
        ("spec.yaml:10:1", "sede", "did you mean seed"),
    ),
    "misspelt reward kind": (
        "- {name: math, kind: math}",
        "- {name: math, kind: maht}",
        ("spec.yaml:", "maht", "did you mean math"),
    ),
    "misspelt source kind": (
        "kind: jsonl",
        "kind: jsnol",
        ("spec.yaml:", "jsnol", "did you mean jsonl"),
    ),
    "unclosed brace": (
        "filters: {zero_variance: false}",
        "filters: {zero_variance: false",
        ("spec.yaml:54:12", "{", "not closed"),
    ),
    "a number as text": (
        "lr: 5e-4",
        'lr: "1e-6"',
        ("spec.yaml:", "optimizer.lr", "1e-6"),
    ),
    "data that is not there": (
        "uri: problems.jsonl",
        "uri: problem.jsonl",
        ("data.sources.problems", "problem.jsonl"),
    ),
    "a family that is not supported": (
        "model_type: qwen2",
        "model_type: gpt2",
        ("spec.yaml:", "model.shape.model_type", "gpt2", "qwen2"),
    ),
    "a reward for another task type": (
        "- {name: math, kind: math}",
        "- {name: code, kind: code}",
        ("math", "reward", "100"),
    ),
    "a mesh that does not divide": (
        "mesh: {fsdp: 2}",
        "mesh: {fsdp: 3}",
        ("spec.yaml:", "learner.mesh", "3", "2"),
    ),
    "prompts longer than the limit": (
        "max_prompt_tokens: 64",
        "max_prompt_tokens: 4",
        ("problems", "max_prompt_tokens", "4"),
    ),
    "targets above max_new_tokens": (
        "  - {name: math, kind: math}",
        f"  - {{name: math, kind: math}}\n  - {LENGTH}",
        ("spec.yaml:", "reward.length.targets", "16", "max_new_tokens = 16"),
    ),
    "a missing secret": (
        "budget: {max_hours: 1}",
        "secrets: {HF_TOKEN: {from: {env: NO_SUCH_SECRET}}}\nbudget: {max_hours: 1}",
        ("secrets.HF_TOKEN", "NO_SUCH_SECRET"),
    ),
}


@pytest.mark.parametrize(("right", "wrong", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_spec_ends_apply_with_its_place_and_remedy(
    project: Project, right: str, wrong: str, words: tuple[str, ...]
) -> None:
    # given a spec that is right but for one mistake
    project.replace(right, wrong)
    # when it is applied, then one message says what is wrong and where
    says(project.apply(), *words)
    # and nothing was made
    assert not (project.folder / "runs").exists()


def model(project: Project, hf: str) -> None:
    """Has the spec name a model instead of a shape."""
    text = project.spec.read_text()
    shape = text[text.index("  shape:") : text.index("data:")]
    project.spec.write_text(text.replace(shape, f"  hf: {hf}\n"))


@pytest.mark.parametrize("hf", ["./my-model", "/nowhere/my-model", "~/my-model", "my-model"])
def test_a_model_that_is_no_directory_is_not_looked_for_in_a_registry(
    project: Project, hf: str
) -> None:
    model(project, hf)
    done = project.apply()
    says(done, "model.hf", "my-model", "no directory")
    assert "hf download" not in done.stderr
    assert not (project.folder / "runs").exists()


def test_a_model_of_a_family_that_is_not_supported_is_named(project: Project) -> None:
    folder = project.folder / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 64}))
    model(project, str(folder))
    says(project.apply(), "gpt2", "qwen2", "llama")
    assert not (project.folder / "runs").exists()


def test_a_spec_that_is_not_there_is_named(project: Project) -> None:
    done = runspec("apply", project.folder / "spek.yaml")
    says(done, "spek.yaml", "no file")


def without(column: str) -> Callable[[list[dict[str, object]]], None]:
    def change(rows: list[dict[str, object]]) -> None:
        del rows[16][column]

    return change


def of_another_type(rows: list[dict[str, object]]) -> None:
    rows[16]["task_type"] = "poetry"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without("task_type"),
            ("sources.problems", "problems.jsonl:17", "task_type is missing"),
        ),
        (without("verification_info"), ("problems.jsonl", "17", "verification_info", "missing")),
        (of_another_type, ("poetry", "math", "reward")),
    ],
    ids=["no task_type", "no verification_info", "a task_type without a reward"],
)
def test_a_bad_row_is_named_with_its_number(
    project: Project, change: Callable[[list[dict[str, object]]], None], words: tuple[str, ...]
) -> None:
    rows = [dict(row) for row in ROWS]
    change(rows)
    project.write_rows(rows)
    says(project.apply(), *words)
    assert not (project.folder / "runs").exists()


RAISES = """\
class Term:
    role = "task"

    def __init__(self, reward):
        pass

    def score(self, problem, answer):
        return float(problem.verification["gold"] == answer)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_library\n" + RAISES, ("no_such_library", "own_rewards.py:1")),
        (RAISES, ("reward.mine", "kind mine", "answer ''", "KeyError: 'gold'", "own_rewards.py:8")),
    ],
    ids=["does not import", "raises on the first answer"],
)
def test_a_broken_reward_plug_in_is_found_before_a_role_starts(
    project: Project, monkeypatch: pytest.MonkeyPatch, source: str, words: tuple[str, ...]
) -> None:
    # given a package with a reward of one's own
    packages = project.folder / "packages"
    packages.mkdir()
    entry_points = "[runspec.rewards]\nmine = own_rewards:Term\n"
    install(packages, monkeypatch, "own_rewards", entry_points, source)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    # when problems are graded by it
    project.replace("- {name: math, kind: math}", "- {name: mine, kind: mine}")
    project.write_rows([{**row, "task_type": "mine"} for row in ROWS])
    # then apply ends with what it raises, and where
    says(project.apply(), *words)
    assert not (project.folder / "runs").exists()


def test_a_misspelt_pool_in_an_overlay_is_no_new_pool(project: Project) -> None:
    overlay = project.folder / "profiles" / "mine.yaml"
    overlay.parent.mkdir()
    overlay.write_text("samplers:\n  volunteer: {max_new_tokens: 40}\n")
    says(
        project.apply("--profile", "mine"),
        "mine.yaml:2:",
        "volunteer",
        "did you mean volunteers? A new name makes a new pool",
    )


def test_a_port_in_use_is_named(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        says(project.apply("--set", f"placement.base_port={port}"), f"port {port} is taken")
    assert not (project.folder / "runs").exists()


def test_a_folder_that_cannot_be_written_is_named_with_its_reason(project: Project) -> None:
    (project.folder / "runs").write_text("a file\n")
    says(project.apply(), str(project.folder / "runs"), "Not a directory")


def test_a_name_that_another_run_has_is_refused(project: Project, finished: Path) -> None:
    done = runspec("apply", project.spec, "--runs-dir", finished, "--set", "name=small")
    says(done, "small", "another", "name")
