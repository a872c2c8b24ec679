"""`runspec lint`: options, exit codes, what goes to which stream, and findings in overlays."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from runspec.cli import main
from runspec.lint import RULES, Context
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.schema.spec_files import small_spec, write

BAD = "stepss: 4\nname: no\n"
"""An error and a warning, each with a fix."""
PROBLEMS = ROOT / "runspec" / "lint" / "examples" / "problems"


@pytest.fixture
def bad(tmp_path):
    return small_spec(tmp_path, BAD)


@pytest.mark.parametrize(
    ("level", "overlay", "code"),
    [("error", BAD, 1), ("error", "name: no", 0), ("warning", "name: no", 1), ("never", BAD, 0)],
)
def test_findings_go_to_standard_output_and_the_fail_level_decides(tmp_path, level, overlay, code):
    spec = small_spec(tmp_path, overlay)
    done = runspec("lint", spec, "--fail-level", level)
    assert done.returncode == code
    assert f"{spec}:{3 if overlay == BAD else 2}:7: warning ambiguous-scalar" in done.stdout
    assert done.stderr == ("1 error" if overlay == BAD else "0 errors") + ", 1 warning\n"


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_checked(bad):
    done = runspec("lint", "gone.yaml", "lost.yaml", bad, bad.parent, "--format", "compact")
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 2
    assert "gone.yaml" in done.stderr and "lost.yaml" in done.stderr
    # and what both need is said once, and of a folder the spec in it is named
    assert done.stderr.count("remedy: name a YAML file that can be read") == 1
    assert f"remedy: name the file in it: {bad}" in done.stderr


def test_a_clean_spec_is_said_to_be_clean(tmp_path):
    done = runspec("lint", small_spec(tmp_path, "steps: 4"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "0 errors, 0 warnings\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "mainframe"], ["--placement", "nowhere.yaml"], ["--set", "steps"],
        ["--format", "xml"], ["nowhere.yaml"], ["--select", "no-such-rule"], ["--ignore", ""],
    ],
)  # fmt: skip
def test_what_cannot_be_read_and_bad_usage_exit_2(arguments):
    done = runspec("lint", TARGET_SHORT, *arguments)
    assert (done.returncode, done.stdout, bool(done.stderr)) == (2, "", True), done


def test_fix_mends_says_so_and_checks_again(bad):
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


def test_a_crash_is_no_finding(bad, monkeypatch, capsys):
    # given a rule with a fault
    def crash(context: Context) -> list[None]:
        raise ZeroDivisionError("the rule's own fault")

    monkeypatch.setitem(RULES, "versions-kept", replace(RULES["versions-kept"], check=crash))
    monkeypatch.setattr(sys, "argv", ["runspec", "lint", str(bad), "--format", "json"])
    # when a spec is checked, then the exit code says so and no finding is printed
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, capsys.readouterr().out) == (3, "")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("samplers={volunteer: {replicas: 2}}", "11: error unknown-name: samplers.volunteer: no "
         "'volunteer' in the layers below, and a new one needs hardware, max_model_len, "
         "max_new_tokens (did you mean volunteers? A new name makes a new pool)"),
        ("data.sources.spell_backwards.size=3",
         "1: error unknown-name: data.sources.spell_backwards: no 'spell_backwards' in the layers"),
        ("broadcast.relays={loca: {upstream: [origin]}}", "19: warning unknown-name: "
         "broadcast.relays.loca: no 'loca' in the layers below (did you mean local? A new name "),
        ("reward.spelling.kind=resoning_gym", "22: error unknown-kind: reward.spelling.kind: no "
         "installed package offers the kind 'resoning_gym' in runspec.rewards (did you mean reas"),
        ("reward={spelling: {kind: chess}}", "26: warning unknown-kind: reward.spelling.kind: no "
         "installed package offers the kind 'chess' in runspec.rewards (install the package that "),
    ],
)  # fmt: skip
def test_a_misspelt_name_or_kind_in_an_overlay_is_one_finding_where_it_stands(override, said):
    words = (TARGET_SHORT, "--profile", "laptop", "--format", "compact", "--set", override)
    done = runspec("lint", *words)
    [line] = done.stdout.splitlines()
    assert line.startswith(f"--set:1:{said}")
    assert done.returncode == (1 if ": error " in line else 0)


@pytest.mark.parametrize("name", ["./gone", "/gone", "~/gone", "gone/", "a/b/c"])
def test_a_path_of_a_model_is_never_taken_for_a_repository(tmp_path, name):
    done = runspec("lint", small_spec(tmp_path, f"model: {{hf: {name}}}"), "--format", "compact")
    base = "" if name == "/gone" else f" (relative to {tmp_path})"
    assert done.stdout == (
        f"{tmp_path}/spec.yaml:2:13: warning model-path: model.hf: no directory {name}{base} "
        "(mend the path, or name a repository of Hugging Face as org/name)\n"
    )


def test_data_finds_a_task_type_that_nothing_grades_and_counts_what_is_right():
    done = runspec("lint", "--data", PROBLEMS / "bad.yaml", "--format", "compact")
    assert done.returncode == 1
    assert done.stdout == (
        f"{PROBLEMS.parent}/base.yaml:21:7: error problems: data.sources.words: task_type "
        "'reasoning_gym' has no reward: 1000 of 1000 problems; rewards grade math (add a reward, "
        "or map it to one that has: task_types: {reasoning_gym: KIND})\n"
    )
    assert runspec("lint", PROBLEMS / "bad.yaml").returncode == 0
    done = runspec("lint", "--data", PROBLEMS / "good.yaml")
    assert (done.returncode, done.stdout) == (0, "")
    assert "source words: 1000 to train on" in done.stderr


def test_data_that_cannot_be_read_is_said(bad, monkeypatch):
    done = runspec("lint", "--data", bad)
    assert done.returncode == 1
    assert "its problems are not read: it is no spec without errors" in done.stderr
    monkeypatch.setattr("runspec.local.planning.MODULES", ("json", "no_such_module"))
    done = runspec("lint", "--data", PROBLEMS / "good.yaml")
    assert done.returncode == 2
    assert "--data: not installed here: no_such_module" in done.stderr
