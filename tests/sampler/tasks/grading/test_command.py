"""`python -m sampler grade` and `rewards`, as a person or a script calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sampler.__main__ import main
from sampler.tasks.grading.command import read_lines
from tests.processes import with_word
from tests.sampler.tasks.grading.plugin import install, install_term
from tests.waiting import eventually

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]


def row(completion: str, truth: str = "18", **more: Any) -> dict[str, Any]:
    info = {"ground_truth": truth}
    return {"task_type": "math", "completion": completion, "verification_info": info, **more}


def written(directory: Path, *lines: object) -> str:
    path = directory / "answers.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def test_each_line_gets_a_reward_or_an_error_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a file of good lines, blank ones and every kind of bad one
    program = {"inputs": ["1"], "outputs": ["1"]}
    path = written(
        tmp_path,
        row("<think>17?</think>18", id="first"),
        {**row("18"), "verification_info": json.dumps({"ground_truth": "18"})},
        "",
        "not json",
        "[1]",
        row("19"),
        {**row("18"), "task_type": "chess"},
        {**row("18"), "task_type": "target_length"},
        {**row("18"), "verification_info": 5},
        {**row("18"), "verification_info": {}},
        {**row("18"), "completion": None},
        row("18", timeout="soon"),
        {"task_type": "code", "completion": "print(input())", "verification_info": program},
        {
            "task_type": "code",
            "completion": "while True: pass",
            "verification_info": program,
            "timeout": 1,
        },
        row("18", timeout=1e-5),
    )
    # When it is graded
    code = main(["grade", path, "--json"])

    # Then each line has its own, in order, and the exit code says that some are errors
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 1
    assert [r["line"] for r in rows] == [1, 2, *range(4, 16)]
    assert rows[0] == {"line": 1, "id": "first", "reward": 1.0, "reason": ""}
    assert rows[1]["reward"] == 1.0
    assert "no JSON" in rows[2]["error"]
    assert "no JSON object" in rows[3]["error"]
    assert rows[4]["reward"] == 0.0 and "19" in rows[4]["reason"]
    assert "no plug-in offers kind 'chess'" in rows[5]["error"]
    assert "grades lengths" in rows[6]["error"]
    assert rows[7]["error"].startswith("verification_info")
    assert "no ground_truth" in rows[8]["error"]
    assert rows[9]["error"] == "completion: missing"
    assert rows[10]["error"].startswith("timeout")
    assert rows[11]["reward"] == 1.0
    assert rows[12]["reward"] == 0.0 and "too long" in rows[12]["reason"]
    assert "timeout: 1e-05 is not in 0.001 to 3600 s" in rows[13]["error"]


def test_a_person_reads_a_table_and_the_exit_code_is_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", written(tmp_path, row("18"), row("19", id="b"))]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "1"]
    assert second.split()[:3] == ["2", "b", "0"]
    assert total == "2 graded, 0 errors"


def test_bad_usage_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["grade", str(tmp_path)]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["grade"])
    assert stopped.value.code == 2


def test_the_plug_ins_are_listed_with_who_offers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_term(tmp_path, monkeypatch)
    assert main(["rewards"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["math"][1:] == ["task", "grader", "process", "no", "runspec-rl", "0.1.0"]
    assert lines["code"][1:4] == ["task", "sandbox", "of"]
    assert lines["target_length"][1] == "length"
    assert lines["chess"][-2:] == ["chess-rewards", "1.5"]


def test_an_installed_package_grades_the_lines_of_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_term(tmp_path, monkeypatch)
    path = written(
        tmp_path, {**row("0.5"), "task_type": "chess"}, {**row("nan"), "task_type": "chess"}
    )
    assert main(["grade", path, "--json"]) == 1
    good, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert good["reward"] == 0.5
    assert "returned nan" in bad["error"]


def test_a_package_that_does_not_import_is_the_error_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = "[runspec.rewards]\nchess = chess_of_nobody:Term\n"
    install(tmp_path, monkeypatch, "chess_of_nobody", point, "import a_board_that_is_not_there")
    path = written(tmp_path, row("0.5"), {**row("0.5"), "task_type": "chess"})
    assert main(["grade", path, "--json"]) == 1
    _, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "kind chess cannot be loaded: ModuleNotFoundError" in bad["error"]
    assert "a_board_that_is_not_there" in bad["error"]


def test_an_over_long_line_is_named_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.tasks.grading.command.MAX_LINE_BYTES", 200)
    path = written(tmp_path, row("x" * 1000), row("18"), row("y" * 300))
    with Path(path).open("rb") as file:
        lines = list(read_lines(file))
    assert [(line.number, line.error[:11]) for line in lines] == [
        (1, "longer than"),
        (2, ""),
        (3, "longer than"),
    ]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, row("\ud800 18"))
    with Path(path).open("rb") as file:
        (line,) = read_lines(file)
    assert line.answer is not None and line.answer.text == "\ufffd 18"


def test_what_a_file_says_is_one_printable_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("18", id="a\nb\x1b[31m"), row("18", id="\ud800é")]
    assert main(["grade", written(tmp_path, *rows)]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", r"a\nb\x1b[31m", "1"]
    assert second.split() == ["2", r"\ud800é", "1"]


@pytest.mark.parametrize("command", [["grade", "-"], ["rewards"]])
def test_a_reader_that_leaves_ends_the_command_without_a_word(command: list[str]) -> None:
    # Given a pipe that nobody reads
    reader, writer = os.pipe()
    os.close(reader)
    # When a command prints into it
    done = subprocess.run(
        [sys.executable, "-m", "sampler", *command],
        input=(json.dumps(row("18")) + "\n").encode(),
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        timeout=120,
    )
    os.close(writer)
    # Then it ends, and blames nothing
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_ends_the_command_at_once_and_the_program_that_runs() -> None:
    # Given a program that is graded for a minute
    name = f"left-{os.getpid()}"
    program = (
        "import os, sys\nif sys.argv[-1] != 'x':\n"
        f"    os.execv(sys.executable, [sys.executable, __file__, {name!r}, 'x'])\nwhile True: pass"
    )
    tests = {"inputs": [""], "outputs": ["1"]}
    line = {"task_type": "code", "completion": program, "verification_info": tests}
    with subprocess.Popen(
        [sys.executable, "-m", "sampler", "grade", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as command:
        assert command.stdin and command.stderr
        command.stdin.write(json.dumps(line).encode() + b"\n")
        command.stdin.close()
        eventually(lambda: with_word(name), "the start of the program")
        # When it is interrupted
        command.send_signal(signal.SIGINT)
        # Then it says so, and nothing of the program is left
        assert command.wait(30) == 130
        assert command.stderr.read() == b"interrupted\n"
    eventually(lambda: not with_word(name), "the end of the program")
