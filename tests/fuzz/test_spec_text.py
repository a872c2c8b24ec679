"""Whatever is in a spec file: findings or a result and one of the exit codes, never a traceback."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from runspec.cli import main
from tests.fuzz.campaign import campaign
from tests.fuzz.spec_texts import spec_texts
from tests.runspec.lint.generated import valid_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DONE, FINDINGS, UNREADABLE = 0, 1, 2
COMMANDS = [
    *[["lint", "spec.yaml"]] * 24,
    ["lint", "--format", "json", "spec.yaml"],
    ["lint", "--format", "sarif", "--fail-level", "warning", "spec.yaml"],
    ["lint", "--format", "github", "spec.yaml", "sound.yaml"],
    ["lint", "--fix", "spec.yaml"],
    ["lint", "sound.yaml", "--placement", "spec.yaml"],
    ["render", "spec.yaml"],
    ["render", "--show-origin", "spec.yaml"],
    ["plan", "--json", "spec.yaml"],
    ["lock", "--check", "spec.yaml"],
    ["diff", "spec.yaml"],
]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """What the command exits with, and all that it printed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["runspec", *arguments])
    collected = gc.get_threshold()  # `main` is for a process of its own, and sets another
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
        finally:
            gc.set_threshold(*collected)
    return 0, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    (made / "sound.yaml").write_text(yaml.safe_dump(valid_spec(1)))
    return made


@pytest.fixture(autouse=True)
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a spec names, and no run, is where the tests stand, and no network is asked."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@campaign
@given(text=spec_texts(), command=st.sampled_from(COMMANDS))
def test_spec_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, command: list[str]
) -> None:
    (folder / "spec.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    code, printed = exit_code(monkeypatch, *command)
    assert code in (DONE, FINDINGS, UNREADABLE), printed
    assert "Traceback" not in printed
    assert code == DONE or printed, "a failure says why"


@campaign
@given(data=st.binary(max_size=200))
def test_any_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    (folder / "spec.yaml").write_bytes(data)
    code, printed = exit_code(monkeypatch, "lint", "spec.yaml")
    assert code in (DONE, FINDINGS, UNREADABLE), printed
    assert "Traceback" not in printed
