"""An environment as a volunteer has it: our wheel, and no checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from runspec.core.entry_points import WHEEL
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
JOIN = f"from runspec.cli import machines, main; machines.LEAVE_S = {HANG_S}; main()"
"""Code of the command `runspec`, whose worker may take long to leave."""


def environment_with_wheel(folder: Path) -> Path:
    """Builds the wheel from the tracked files, and installs it into a new environment.

    The libraries that it needs are those of the Python that runs the tests, found by their path.
    The checkout, which is installed there by a .pth file, is not among them.

    Returns:
        The folder of its `python` and `runspec`.
    """
    source, built = folder / "source", folder / "dist"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    packages = ("runspec", "learner_jax", "bridge", "broadcast", "sampler", "verify")
    for name in filter(None, listed.split("\0")):
        if name.startswith(tuple(f"{package}/" for package in packages)) or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    _run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, source)
    _run("-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    _run("-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-index", built / WHEEL)
    libraries = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def _run(*words: str | Path) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
