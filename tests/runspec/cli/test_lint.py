"""`runspec lint`: options, exit codes, and what goes to which stream."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli import main
from runspec.lint.registry import RULES, Context
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import DOCUMENTS, small_spec, write

BAD = "stepss: 4\nname: no\n"
"""An error and a warning, each with a fix."""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return small_spec(tmp_path, BAD)


def test_findings_go_to_standard_output_and_their_count_to_the_other(bad: Path) -> None:
    done = runspec("lint", bad)
    assert done.returncode == 1
    assert f"{bad}:2:1" in done.stdout
    assert "stepss" in done.stdout
    assert done.stderr == "1 error, 1 warning\n"


@pytest.mark.parametrize(
    ("level", "overlay", "code"),
    [("error", BAD, 1), ("error", "name: no", 0), ("warning", "name: no", 1), ("never", BAD, 0)],
)
def test_the_fail_level_decides(tmp_path: Path, level: str, overlay: str, code: int) -> None:
    done = runspec("lint", small_spec(tmp_path, overlay), "--fail-level", level)
    assert done.returncode == code
    assert "ambiguous-scalar" in done.stdout


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_checked(bad: Path) -> None:
    # given a spec with findings between two that are not there
    done = runspec("lint", "gone.yaml", bad, bad.parent, "--format", "compact")
    # then its findings are shown, and the exit code is that of the others
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 2
    assert "gone.yaml" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nowhere.yaml"],
        [TARGET_SHORT, "--profile", "mainframe"],
        [TARGET_SHORT, "--placement", "nowhere.yaml"],
        [TARGET_SHORT, "--set", "steps"],
        [],
        [TARGET_SHORT, "--wrong"],
        [TARGET_SHORT, "--format", "xml"],
        [TARGET_SHORT, "--fail-level", "info"],
        [TARGET_SHORT, "--select", "no-such-rule"],
        [TARGET_SHORT, "--ignore", ""],
    ],
)
def test_what_cannot_be_read_and_bad_usage_exit_2(arguments: list[str | Path]) -> None:
    done = runspec("lint", *arguments)
    assert done.returncode == 2, done
    assert done.stderr
    assert done.stdout == ""


def test_fix_mends_says_so_and_checks_again(bad: Path) -> None:
    # given a misspelt key whose value is of the wrong type, which shows once the key is right
    write(bad, 'extends: [base.yaml]\nstepss: "4" # four\nname: no\nseed: -1\n')
    done = runspec("lint", bad, "--fix", "--format", "compact")
    # then all that can be mended is, and the rest is shown
    assert bad.read_text() == 'extends: [base.yaml]\nsteps: 4 # four\nname: "no"\nseed: -1\n'
    assert done.stderr.count("mended: ") == 3
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["bad-value:"]
    assert done.returncode == 1
    write(bad, bad.read_text().replace("-1", "1"))
    assert runspec("lint", bad, "--fix").returncode == 0


def test_a_crash_is_no_finding(
    bad: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a rule with a fault
    def crash(context: Context) -> list[None]:
        raise ZeroDivisionError("the rule's own fault")

    monkeypatch.setitem(RULES, "versions-kept", replace(RULES["versions-kept"], check=crash))
    monkeypatch.setattr(sys, "argv", ["runspec", "lint", str(bad), "--format", "json"])
    # when a spec is checked, then the exit code says so and no finding is printed
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_colour_on_a_terminal_only(bad: Path, environ: dict[str, str], coloured: bool) -> None:
    # given a terminal as standard output
    master, slave = os.openpty()
    command = [sys.executable, "-m", "runspec", "lint", str(bad)]
    without = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        command, stdout=slave, stderr=subprocess.DEVNULL, env=without | environ, cwd=ROOT
    ) as process:
        assert process.wait(60) == 1
    os.close(slave)
    shown = os.read(master, 65536).decode()
    os.close(master)
    # then there is colour, unless the person wants none
    assert "stepss" in shown
    assert ("\x1b[" in shown) == coloured


LAPTOP = [TARGET_SHORT, "--profile", "laptop", "--format", "compact"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "samplers={volunteer: {replicas: 2}}",
            "--set:1:11: error unknown-name: samplers.volunteer: no 'volunteer' in the layers "
            "below, and a new one needs hardware, max_model_len, max_new_tokens (did you mean "
            "volunteers? A new name makes a new pool)",
        ),
        (
            "reward=[{name: lenght, targets: [8]}]",
            "--set:1:9: error unknown-name: reward.lenght: no 'lenght' in the layers below, and a "
            "new one needs kind (did you mean length? A new name makes a new reward term)",
        ),
        (
            "data.sources.spell_backwards.size=3",
            "--set:1:1: error unknown-name: data.sources.spell_backwards: no 'spell_backwards' in "
            "the layers below, and a new one needs kind (did you mean spell_backward? A new name "
            "makes a new source)",
        ),
        (
            "broadcast.relays={loca: {upstream: [origin]}}",
            "--set:1:19: warning unknown-name: broadcast.relays.loca: no 'loca' in the layers "
            "below (did you mean local? A new name makes a new relay)",
        ),
    ],
)
def test_a_misspelt_name_in_an_overlay_is_one_finding_where_it_stands(
    override: str, said: str
) -> None:
    done = runspec("lint", *LAPTOP, "--set", override)
    assert done.stdout.splitlines() == [said]
    assert done.returncode == (1 if " error " in said else 0)


def test_a_new_object_that_lacks_nothing_is_no_finding() -> None:
    done = runspec("lint", *LAPTOP, "--set", "broadcast.relays={local2: {upstream: [origin]}}")
    assert (done.returncode, done.stdout) == (0, "")


def test_an_unclosed_brace_is_shown_where_it_opens(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, "optimizer: {lr: 1e-3\nsteps: 4\nname: mine\n")
    done = runspec("lint", spec, "--format", "compact")
    assert done.returncode == 1
    assert done.stdout.startswith(f"{spec}:2:12: error yaml: broken YAML: the {{ that opens here")


@pytest.mark.parametrize(
    ("override", "said", "code"),
    [
        (
            "reward.spelling.kind=resoning_gym",
            "--set:1:22: error unknown-kind: reward.spelling.kind: no installed package offers the "
            "kind 'resoning_gym' in runspec.rewards (did you mean reasoning_gym?)",
            1,
        ),
        (
            "data.sources={spell_backward: null, mine: {kind: json, uri: spec.md}}",
            "--set:1:50: error unknown-kind: data.sources.mine.kind: no installed package offers "
            "the kind 'json' in runspec.sources (did you mean jsonl?)",
            1,
        ),
        (
            "reward={spelling: {kind: chess}}",
            "--set:1:26: warning unknown-kind: reward.spelling.kind: no installed package offers "
            "the kind 'chess' in runspec.rewards (install the package that offers it; installed: "
            "code, math, reasoning_gym, target_length)",
            0,
        ),
    ],
)
def test_a_kind_that_nothing_offers_is_found_without_importing_plugins(
    override: str, said: str, code: int
) -> None:
    done = runspec("lint", *LAPTOP, "--set", override)
    assert done.stdout.splitlines() == [said]
    assert done.returncode == code


@pytest.mark.parametrize("name", ["./gone", "../gone", "/gone", "~/gone", "gone/", "a/b/c"])
def test_a_path_of_a_model_is_never_taken_for_a_repository(tmp_path: Path, name: str) -> None:
    spec = small_spec(tmp_path, f"model: {{hf: {name}}}")
    done = runspec("lint", spec, "--format", "compact")
    base = "" if name == "/gone" else f" (relative to {tmp_path})"
    assert done.stdout == (
        f"{spec}:2:13: warning model-path: model.hf: no directory {name}{base} (mend the path, or "
        "name a repository of Hugging Face as org/name)\n"
    )


def test_a_family_that_is_not_supported_is_named_with_those_that_are(tmp_path: Path) -> None:
    spec = small_spec(tmp_path)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    done = runspec("lint", spec, "--format", "compact")
    assert done.returncode == 1
    assert "model_type 'gpt2' is not supported (use a model of one of these families: llama, " in (
        done.stdout
    )


PROBLEMS = ROOT / "runspec" / "lint" / "examples" / "problems"


def test_data_finds_a_task_type_that_nothing_grades() -> None:
    done = runspec("lint", "--data", PROBLEMS / "bad.yaml", "--format", "compact")
    assert done.returncode == 1
    base = PROBLEMS.parent / "base.yaml"
    assert done.stdout.splitlines() == [
        f"{base}:20:7: error problems: data.sources.words: task_type 'reasoning_gym' has no "
        "reward: 1000 of 1000 problems; rewards grade math (add a reward, or map it to one that "
        "has: task_types: {reasoning_gym: KIND})"
    ]
    assert runspec("lint", PROBLEMS / "bad.yaml").returncode == 0


def test_data_counts_the_problems_of_a_spec_that_is_right() -> None:
    done = runspec("lint", "--data", PROBLEMS / "good.yaml")
    assert (done.returncode, done.stdout) == (0, "")
    assert "source words: 1000 to train on" in done.stderr


def test_data_of_a_run_on_documents_is_opened(tmp_path: Path) -> None:
    # given a source whose file is no FASTQ
    reads = tmp_path / "reads.fastq"
    reads.write_text(">a\nACGT\n")
    source = f"data.sources={{reads: null, mine: {{kind: fastq, uri: {reads}}}}}"
    # then its place, its file and line are said
    done = runspec("lint", "--data", DOCUMENTS, "--set", source, "--format", "compact")
    assert done.returncode == 1
    assert "error problems: data.sources.mine" in done.stdout
    assert f"{reads}:1: not FASTQ" in done.stdout
    # and of one that is right, what there is
    done = runspec("lint", "--data", DOCUMENTS)
    assert (done.returncode, done.stdout) == (0, "")
    assert "source reads: 4,000 generated reads" in done.stderr


def test_data_of_a_spec_with_errors_is_not_read(bad: Path) -> None:
    done = runspec("lint", "--data", bad)
    assert done.returncode == 1
    assert "its problems are not read: it is no spec without errors" in done.stderr


def test_data_without_what_reads_it_is_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runspec.local.problems.MODULES", ("json", "no_such_module"))
    done = runspec("lint", "--data", PROBLEMS / "good.yaml")
    assert done.returncode == 2
    assert "--data: not installed here: no_such_module" in done.stderr
