"""A report with everything that a format must show."""

from __future__ import annotations

from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import Unreadable, check_files
from runspec.lint.report import Report
from tests.runspec.core.spec.spec_files import small_spec

OVERLAY = """\
name: no
seed: -1
algorithm: {grop_size: "8, <&> ]]> 100%"}
"""
FINE = """\
data: {length_prompt: "é {target}"}   # a text
broadcast: {keep_versions: 3}   # runspec: ignore[versions-kept] reason="a <test>, 100%"
"""


def full_report(folder: Path) -> Report:
    """Two errors and a warning in one file, one suppressed in another, one of `--set`, one gone."""
    broken, fine = folder / "broken", folder / "fine, 100%: a"
    specs = [
        SpecFiles(small_spec(broken, OVERLAY)),
        SpecFiles(small_spec(fine, FINE)),
        SpecFiles(fine / "spec.yaml", overrides=["algorithm.updates_per_step=3"]),
    ]
    checked = check_files(specs)
    gone = Unreadable(str(folder / "gone.yaml"), UserError("no file\nhere", remedy="make one"))
    return Report(
        [*(str(spec.path) for spec in specs[:2]), gone.file],
        checked.findings,
        checked.suppressed,
        [gone],
    )
