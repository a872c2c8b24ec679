"""Runs on other machines: the note that says who reaches them, and commands that are carried."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runspec.cli import app
from runspec.cli.output import exit_code_of
from runspec.core.errors import UserError
from runspec.local import run_dir
from runspec.local.backend import backend
from runspec.local.run_dir import note_site, read_site


class FakeBackend:
    """Notes what is carried to it."""

    def __init__(self, code: int = 0) -> None:
        self.carried: list[str] = []
        self._code = code

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        self.carried = list(arguments)
        return self._code


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    note_site(tmp_path / "runs" / "far", {"backend": "fake", "run": "far", "address": "x"})
    fake = FakeBackend()
    monkeypatch.setattr(run_dir, "backend", {"fake": fake}.__getitem__)
    monkeypatch.chdir(tmp_path)
    return fake


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["runspec", *words])
    try:
        return exit_code_of(app)
    except SystemExit as end:  # of a command that ends here
        return int(str(end.code))


@pytest.mark.parametrize("named", ["far", "runs/far"])
def test_a_command_goes_where_the_run_directory_is(there, monkeypatch, tmp_path, named: str):
    # when a command names the run, by its name or by its folder here
    assert command(monkeypatch, "logs", named, "--role", "learner") == 0
    # then it names the run there
    runs = ["--runs-dir", str(tmp_path / "runs")]
    assert there.carried == ["logs", "far", "--role", "learner", *runs]


def test_delete_takes_the_note_along(there, monkeypatch, tmp_path):
    assert command(monkeypatch, "delete", "far", "--yes") == 0
    assert not (tmp_path / "runs" / "far").exists()


def test_a_delete_that_was_refused_keeps_it(there, monkeypatch, tmp_path):
    there._code = 5
    assert command(monkeypatch, "delete", "far", "--yes") == 5
    assert read_site(tmp_path / "runs" / "far") is not None


def test_ctrl_c_while_the_command_is_carried_ends_it(there, monkeypatch, capsys):
    def interrupted(*given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(there, "command", interrupted)
    assert command(monkeypatch, "logs", "far") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_damaged_note_is_named(tmp_path):
    (tmp_path / "site.json").write_text("{")
    with pytest.raises(UserError, match=r"site\.json: cannot be read"):
        read_site(tmp_path)


def test_a_backend_that_nobody_offers_is_named():
    with pytest.raises(UserError, match=r"no backend 'slurp'; there is local, .*ray"):
        backend("slurp")
