"""Whatever is in a spec file: findings or a result and one of the exit codes, never a traceback."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runspec.cli import main
from tests.fuzz.spec_texts import spec_texts

DONE, FINDINGS, UNREADABLE = 0, 1, 2
COMMANDS = [
    *[["lint"]] * 24,
    ["lint", "--format", "json"],
    ["lint", "--format", "sarif", "--fail-level", "warning"],
    ["lint", "--fix"],
    ["render"],
    ["render", "--show-origin"],
    ["plan", "--json"],
    ["migrate"],
    ["diff"],
]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """What the command exits with, and all that it printed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["runspec", *arguments])
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True)
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a spec names, and no run, is where the tests stand."""
    monkeypatch.chdir(folder)


@given(text=spec_texts(), command=st.sampled_from(COMMANDS))
def test_spec_texts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, command: list[str]
) -> None:
    (folder / "spec.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    code, printed = exit_code(monkeypatch, *command, "spec.yaml")
    assert code in (DONE, FINDINGS, UNREADABLE), printed
    assert "Traceback" not in printed
    assert code == DONE or printed, "a failure says why"


@given(data=st.binary(max_size=200))
def test_any_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    (folder / "spec.yaml").write_bytes(data)
    code, printed = exit_code(monkeypatch, "lint", "spec.yaml")
    assert code in (DONE, FINDINGS, UNREADABLE), printed
    assert "Traceback" not in printed
