"""`runspec diff`: as `diff -u` of the run's spec and the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.cli.diff import diff_command
from runspec.core.errors import BadUsage
from runspec.core.hashing import digest_bytes
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.core.spec.resolved import with_profiles
from tests.harness import TARGET_SHORT
from tests.runspec.local.fake_run import prepared, small_spec
from tests.verify.profiles import document, made_profile


def diff(runs_dir: Path, *overrides: str) -> int:
    sets = ["name=small", "steps=5", *overrides]
    return diff_command(SpecFiles(TARGET_SHORT, "laptop", None, sets), runs_dir)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with prepared(small_spec(), tmp_path):
        pass
    return tmp_path


def test_the_same_spec_prints_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs) == 0
    assert capsys.readouterr().out == ""


def test_a_difference_is_shown_as_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs, "seed=7", "samplers.volunteers.replicas=2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"--- {runs / 'small' / 'spec.json'}", f"+++ {TARGET_SHORT}"]
    changed = [line for line in lines[2:] if line[0] in "+-"]
    assert changed == ["-seed: 42", "+seed: 7", "-  replicas: 1", "+  replicas: 2"]


def test_without_a_run_everything_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- /dev/null"
    assert all(line.startswith("+") for line in lines[3:])


def test_what_cannot_be_read_is_no_difference(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="steps"):
        diff(tmp_path, "steps=many")
    with pytest.raises(BadUsage):
        diff_command(SpecFiles(tmp_path / "none.yaml"), tmp_path)


def test_a_profile_is_shown_by_what_it_is_and_not_by_its_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that is judged by one profile, and a spec whose file is another
    file = tmp_path / "profile.json"
    entry = f"verify.profiles=[{{name: measured, file: {file}}}]"
    issued = 1_767_225_600.0  # 2026-01-01
    old, new = (
        made_profile(issued=issued, expires=issued + days * 86400.0, rate=rate)
        for days, rate in ((30, 1e-6), (31, 1e-5))
    )
    file.write_text(document(old))
    sets = ["name=small", "steps=5", entry]
    spec = load_layers(SpecFiles(TARGET_SHORT, "laptop", None, sets)).spec
    assert spec is not None
    with prepared(with_profiles(spec, tmp_path), tmp_path):
        pass
    assert diff(tmp_path, entry) == 0
    file.write_text(document(new))

    # when they are compared
    assert diff(tmp_path, entry) == 1

    # then the lines say who was measured, how long it holds and how strict it is
    out = capsys.readouterr().out
    changed = [line.strip() for line in out.splitlines()[2:] if line[0] in "+-"]
    digests = [digest_bytes(document(each).encode()) for each in (old, new)]
    assert changed == [
        f"-      digest: {digests[0]}",
        f"+      digest: {digests[1]}",
        "-      expires: '2026-01-31'",
        "-      rate: 1.0e-06",
        "+      expires: '2026-02-01'",
        "+      rate: 1.0e-05",
    ]
    assert "      pool: vllm, float32, cpu\n" in out
    assert "mismatch_share" not in out and "signature" not in out
