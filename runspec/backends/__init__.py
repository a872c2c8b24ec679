"""Backends that start a run on several machines; each is an entry point of `runspec.backends`.

Here is the sbatch script of a run, for Slurm: it starts Ray on the nodes of an allocation, and
`runspec apply` there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import resources
from math import ceil
from pathlib import Path
from string import Template

from runspec.core.errors import UserError
from runspec.core.schema import RunSpec
from runspec.core.schema.role_names import island_names, island_role, programs
from runspec.local.site import TRUNK_GROUP, groups_started

STOP_S = 300
"""Seconds before the time limit at which the run is paused."""
RAY_PORT = 6379
GONE_S = 30
"""Seconds after which Ray on the other nodes takes the first one's for ended, and ends too. While
`ray stop` runs on the first node, `ray symmetric-run` must not take it for ended."""
LAST_S = 120
"""Seconds after the first node's end at which `srun` kills the others, which fails the job."""
WAIT_S = 600
"""How long Ray waits for the nodes of the allocation."""


def sbatch_script(spec: RunSpec, words: Sequence[str], run_dir: Path) -> str:
    """A script that starts or continues the run, each time that it is submitted.

    Args:
        spec: its hardware says how many nodes, and which devices.
        words: the spec's file and options, as `runspec apply` takes them.
        run_dir: the run's directory, for the pause before the time is up.

    Raises:
        UserError: a process needs more devices than a learner's host has.
    """
    devices, nodes = allocation(spec)
    options = [
        f"--job-name={spec.name}",
        f"--output={spec.name}-%j.log",
        f"--nodes={nodes}",
        *("--ntasks-per-node=1", "--exclusive", "--requeue", "--open-mode=append"),
        f"--signal=B:TERM@{STOP_S}",
    ]
    options += [f"--gpus-per-node={devices}"] if devices else []
    script = (resources.files("runspec.backends") / "sbatch.sh").read_text(encoding="utf-8")
    return Template(script).substitute(
        options="\n".join(f"#SBATCH {option}" for option in options),
        apply=shlex.join(["runspec", "apply", *words, "--set", "placement.backend=ray"]),
        pause=shlex.quote(shlex.join(["runspec", "pause", str(run_dir)])),
        wait_s=WAIT_S,
        gone_s=GONE_S,
        last_s=LAST_S,
        ray_port=RAY_PORT,
    )


def allocation(spec: RunSpec) -> tuple[int, int]:
    """GPUs of a node and number of nodes, if every node is like a host of the learner.

    Raises:
        UserError: a process needs more devices than such a node has, or the spec asks for TPUs.
    """
    groups = groups_started(spec)
    for group in groups:
        if group.hardware is not None and group.hardware.kind.startswith("tpu"):
            raise UserError(
                f"{group.name} asks for {group.hardware.kind}, which Slurm does not allocate",
                place="hardware",
                remedy="use --backend kubernetes, or a placement with GPUs",
            )
    trained = {TRUNK_GROUP, "learners", *map(island_role, island_names(spec)[1:])}
    a_node = max(group.devices for group in groups if group.name in trained)
    a_node = a_node or max(group.devices for group in groups)
    beside = 0
    for group in groups:
        if group.devices > a_node:
            raise UserError(
                f"{group.name} needs {group.devices} devices on a node, "
                f"the learner's have {a_node}",
                place="learner.hosts",
                remedy="take fewer hosts with more devices each",
            )
        if group.devices and group.name not in (TRUNK_GROUP, "learners"):
            beside += ceil(len(group.members) / (a_node // group.devices))
    # The hosts of one program are apart, also where they have no GPUs.
    hosts = max(len(names) for names in programs(spec).values())
    return a_node, max(spec.learner.hosts + beside, hosts)
