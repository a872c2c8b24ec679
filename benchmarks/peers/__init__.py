"""TRL and Tunix, in environments of their own: `benchmarks/peers.txt` pins them, nothing here is
ever in the lock.

    python -m benchmarks.peers install DIR      # DIR/trl and DIR/tunix, 4 GB
    RUNSPEC_PEERS=DIR python -m benchmarks.learner_peers --quick
    RUNSPEC_PEERS=DIR pytest tests/learner_jax/parity

`trl_*.py` and `tunix_*.py` are programs for those environments: they import nothing of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEERS = ("trl", "tunix")
VARIABLE = "RUNSPEC_PEERS"
HERE = Path(__file__).resolve().parent


def python_of(peer: str, directory: Path | None = None) -> Path | None:
    """The interpreter of a peer's environment, None where there is none.

    Args:
        peer: "trl" or "tunix".
        directory: of the environments; that of the variable RUNSPEC_PEERS when None.
    """
    where = directory or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    python = where / peer / "bin" / "python" if where else None
    return python if python and python.exists() else None


def run(peer: str, program: str, arguments: Sequence[str], directory: Path | None = None) -> str:
    """Runs `peers/<program>.py` in the peer's environment and returns what it printed.

    Raises:
        FileNotFoundError: there is no such environment.
        subprocess.CalledProcessError: it failed; its stderr has been shown.
    """
    python = python_of(peer, directory)
    if python is None:
        raise FileNotFoundError(f"no environment of {peer}: python -m benchmarks.peers install DIR")
    command = [str(python), str(HERE / f"{program}.py"), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def computed(peer: str, given: dict[str, Any], directory: Path | None = None) -> dict[str, Any]:
    """What a peer makes of `given`, live."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "given.json"), Path(folder, "found.json")
        source.write_text(json.dumps(given))
        run(peer, f"{peer}_record", [str(source), str(target)], directory)
        return json.loads(target.read_text())
