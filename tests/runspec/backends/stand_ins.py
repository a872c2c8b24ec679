"""Stand-ins for the commands of a Slurm cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cluster(folder: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job's script, in which stand-ins come first."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "PATH": path}
