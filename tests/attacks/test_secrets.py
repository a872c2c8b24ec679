"""Secrets planted in the environment: nothing that runspec writes or prints ever holds one.

Real commands, the real supervisor and the real command lines of every role; only the interpreter
that the roles are started with is a fake, which says whether it was given the secret, and dies.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

import runspec.local.prepare as backend
from runspec.cli import app
from runspec.local.apply import RunFailed, supervise
from runspec.local.machine import Machine
from tests.runspec.local.fake_run import TARGET_SHORT, prepared, small_spec
from tests.runspec.local.test_supervise import Watch

pytestmark = pytest.mark.slow

CANARY = "hush-9f3b7c51e2"
"""Of no form that a linter could know a secret by."""
VARIABLE = "PLANTED_TOKEN"
DECLARED = f"secrets=[{{name: HF_TOKEN, from: {{env: {VARIABLE}}}}}]"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, CANARY)
    monkeypatch.setenv("SOMEBODY_ELSES_PASSWORD", CANARY)


def run(*words: str | Path) -> Result:
    """A command as typed; what it would print of an error is part of its output."""
    return CliRunner().invoke(app, [str(word) for word in words])


def assert_silent(result: Result) -> None:
    assert CANARY not in result.output
    assert CANARY not in str(result.exception or "")
    assert result.exit_code in range(7), result.output


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec file that declares the secret."""
    path = tmp_path_factory.mktemp("spec") / "small.yaml"
    said = {
        "version": "runspec/v1",
        "name": "small",
        "extends": [str(TARGET_SHORT), str(TARGET_SHORT.parent / "profiles" / "laptop.yaml")],
        "secrets": [{"name": "HF_TOKEN", "from": {"env": VARIABLE}}],
    }
    path.write_text(yaml.safe_dump(said))
    return path


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of a run whose every role was given the secret and died, and what it died of."""
    runs_dir = tmp_path_factory.mktemp("runs")
    interpreter = runs_dir / "fake_python"
    interpreter.write_text('#!/bin/sh\necho "the secret is ${HF_TOKEN:+here}"\nexit 1\n')
    interpreter.chmod(0o755)
    machine = Machine(str(interpreter), (0,), {VARIABLE: CANARY})
    spec = small_spec("small", 5, DECLARED, "placement.restarts=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, CANARY)
        patch.setattr(backend, "this_machine", lambda: machine)
        with prepared(spec, runs_dir) as opened:
            (opened.directory / "initial").mkdir()
            (opened.directory / "initial" / "config.json").write_text("{}")
            with pytest.raises(RunFailed) as failure:
                supervise(opened, Watch(), lambda: 0)
    yield runs_dir, str(failure.value)


def test_roles_have_the_secret_and_no_file_does(failed_run: tuple[Path, str]) -> None:
    runs_dir, error = failed_run
    logs = [path.read_text() for path in sorted((runs_dir / "small" / "logs").glob("*.log"))]
    # given roles that were all started with the secret
    assert len(logs) == 8
    assert all("the secret is here" in text for text in logs if "the secret is" in text)
    assert "the secret is here" in "".join(logs)
    # then neither the error nor any file of the run holds it
    assert CANARY not in error
    for path in sorted((runs_dir / "small").rglob("*")):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    # nor any row of the state, the part in its write-ahead log included
    state = sqlite3.connect(runs_dir / "small" / "state.db")
    assert CANARY not in "\n".join(state.iterdump())
    state.close()


OVER_A_RUN = ["status", "status --json", "describe", "events", "events --json", "logs", "pause"]
OVER_A_RUN += ["wait --for Finished", "rollback --to 3 --yes"]
OVER_A_SPEC = ["lint", "render", "render --show-origin --format json", "plan", "plan --json"]
OVER_A_SPEC += ["diff", "doctor"]


@pytest.mark.parametrize("words", [*OVER_A_RUN, *OVER_A_SPEC])
def test_no_command_prints_it(spec_file: Path, failed_run: tuple[Path, str], words: str) -> None:
    (command, *options), runs = words.split(), failed_run[0]
    over_runs = [] if command in (*OVER_A_RUN, "lint", "render") else ["--runs-dir", runs]
    of = runs / "small" if words in OVER_A_RUN else spec_file
    assert_silent(run(command, of, *options, *over_runs))


@pytest.mark.parametrize(
    "override",
    [
        "data.sources.spell_backward.dataset=${PLANTED_TOKEN}",
        "name=${PLANTED_TOKEN}",
        "steps=${PLANTED_TOKEN}",
        "model.nothing=${PLANTED_TOKEN}",
        "secrets=[{name: HF_TOKEN, from: {env: PLANTED_TOKEN, value: x}}]",
        "secrets=[{name: HF_TOKEN, from: {env: NOT_PLANTED}}]",
    ],
)
def test_no_error_about_the_spec_quotes_it(spec_file: Path, tmp_path: Path, override: str) -> None:
    for command in ("lint", "render", "plan", "apply"):
        runs = [] if command in ("lint", "render") else ["--runs-dir", tmp_path / "runs"]
        result = run(command, spec_file, "--set", override, *runs)
        assert_silent(result)
        if "NOT_PLANTED" not in override:
            assert result.exit_code != 0
    assert not (tmp_path / "runs").exists()
