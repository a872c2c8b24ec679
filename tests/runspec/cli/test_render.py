"""`runspec render`: the resolved spec, which is a spec, and where each value is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.cli.render import render_command
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.lint.check import check_spec
from tests.runspec.core.spec.spec_files import SMALL, SPECS, small_spec, write

FILES = [
    *(SpecFiles(path) for path in sorted(SPECS.glob("*.yaml"))),
    SpecFiles(SPECS / "target_short.yaml", "laptop", overrides=["optimizer.eps=1.5e-9"]),
    SpecFiles(SPECS / "target_long.yaml", placement=SPECS / "placements" / "h200.yaml"),
]


def line_of(text: str) -> int:
    """Where the small spec says something."""
    return next(i for i, line in enumerate(SMALL.splitlines(), start=1) if text in line)


def rendered(files: SpecFiles, capsys: pytest.CaptureFixture[str], *, origin: bool = False) -> str:
    assert render_command(files, origin, "yaml") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("files", FILES, ids=lambda files: f"{files.path.stem}-{files.profile}")
@pytest.mark.parametrize("origin", [False, True])
def test_it_reads_back_the_same(
    files: SpecFiles, origin: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given what render prints of a spec
    again = tmp_path / "again.yaml"
    again.write_text(rendered(files, capsys, origin=origin), encoding="utf-8")
    # then it is a spec, and the same one
    layered = load_layers(SpecFiles(again))
    assert layered.findings == []
    assert layered.spec == check_spec(files).require()


def test_origins_are_files_lines_flags_and_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "profiles/fast.yaml", "checkpoints: {keep: 7}\nalgorithm: {kl: null}")
    site = "version: runspec/v1\nkind: Placement\nlearner:\n  hosts: 2\n"
    placement = write(tmp_path / "site.yaml", site)
    spec = small_spec(tmp_path, "steps: 4\nalgorithm: {kl: {coef: 0.5}}")
    files = SpecFiles(spec, "fast", placement, ["seed=9", "samplers.pool.replicas=2"])
    lines = rendered(files, capsys, origin=True).replace(f"{tmp_path}/", "").splitlines()
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


def test_json_with_and_without_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = SpecFiles(small_spec(tmp_path))
    assert render_command(files, False, "json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert render_command(files, True, "json") == 0
    both = json.loads(capsys.readouterr().out)
    assert both["spec"] == plain and plain["algorithm"]["fill"]["deadline"] == "90m"
    assert both["origin"]["samplers.pool.replicas"] == "default"
    assert both["origin"]["reward.length.alpha"] == f"{tmp_path}/base.yaml:{line_of('alpha')}"
