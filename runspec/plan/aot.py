"""`runspec plan --aot`: compiles the learner's step for the spec's chips, and reports its memory.

    report = compile_step(spec, config)
    report.fits                     # None where the device's memory is not known

It runs `python -m learner_jax aot` in another process. TPUs need libtpu (`make aot`) but no chip, a
CPU needs nothing, GPUs need one GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import hf_config
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME, dump_resolved

DEADLINE_S = 1800.0
"""A step of 32B on 64 chips takes a minute on two cores, one of 512 chips some more."""
STEP = ("accumulate", "apply")
"""Forward pass, loss and backward pass; optimizer."""
_SHOWN_LINES = 20


@dataclass(frozen=True)
class AotReport:
    """Result of compiling a step. Bytes and FLOPs are those of one device.

    `argument_bytes`, `temp_bytes` and `output_bytes` describe `worst`, the program that needs the
    most memory. They are None if the compiler refused a program because it cannot fit.
    """

    devices: int
    argument_bytes: int | None
    """Arguments of `worst`: weights or state, and the batch."""
    temp_bytes: int | None
    """Temporaries and code of `worst`. On TPUs this is the peak of the buffers that libtpu assigns;
    the sum of temporaries in `programs` counts some of them twice."""
    output_bytes: int | None
    """Outputs of `worst`, without those written into donated arguments."""
    hbm_bytes: int | None
    """Memory that the run needs: all that the learner holds through a step, and the temporaries,
    code and new outputs of `worst`."""
    flops: float
    """FLOPs of `accumulate` and `apply` by XLA's count, which has the body of a loop once."""
    compile_s: float
    """Seconds for all programs, tracing included."""
    fits: bool | None
    """Whether `hbm_bytes` is within the device's memory; None where that is not known."""
    worst: str | None
    memory: int | None
    """Memory of the device in bytes."""
    where: str
    """Target of the compilation: v5p:4x4x4, cpu, ..."""
    programs: Mapping[str, Mapping[str, Any]]
    """Figures of each program, as `python -m learner_jax aot` prints them. `needed_bytes` is the
    program's `hbm_bytes`; `does_not_fit` has the compiler's words."""
    resident: Mapping[str, int]
    """Bytes that the learner holds, by kind."""


def compile_step(
    spec: RunSpec, config: ModelConfig, *, deadline_s: float = DEADLINE_S
) -> AotReport:
    """Compiles the programs of a run for its hardware.

    Args:
        spec: of the run, without errors of the linter.
        config: shape of its model (`runspec.core.models.family.model_config`).
        deadline_s: for the whole process.

    Raises:
        UserError: no learner or no libtpu is installed, there is no such topology or no GPU, or it
            took too long. That the step does not fit is no error: see `AotReport.fits`.
    """
    if find_spec("jax") is None or find_spec("learner_jax") is None:
        raise UserError(
            "the learner, which compiles, is not installed",
            place=sys.prefix,
            remedy=f"{install_command('learner')}, with `make aot` for TPUs",
        )
    with TemporaryDirectory(prefix="runspec-aot-") as name:
        folder = Path(name)
        (folder / FILE_NAME).write_bytes(dump_resolved(spec))
        shape = Path(spec.model.hf or "") / "config.json"
        if not shape.is_file():
            shape = folder / "config.json"
            fields = hf_config(config, dtype=spec.broadcast.dtype, eos_token_id=0, pad_token_id=0)
            shape.write_text(json.dumps(fields))
        command = [sys.executable, "-m", "learner_jax", "aot", str(folder)]
        command += ["--model-config", str(shape)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=deadline_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"the learner's step was not compiled within {deadline_s:g} s",
                place="python -m learner_jax aot",
                remedy="run that command by hand, with one of --programs",
            ) from error
    if not done.stdout:  # printed also where the run does not fit
        said = "\n".join(done.stderr.strip().splitlines()[-_SHOWN_LINES:])
        raise UserError(
            f"the learner's step cannot be compiled here (exit code {done.returncode}):\n{said}",
            place="python -m learner_jax aot",
        )
    report = json.loads(done.stdout)
    memory, programs = report["memory"], report["programs"]
    needed = memory["needed_bytes"]
    refused = any("does_not_fit" in program for program in programs.values())
    worst = None if refused else max(needed, key=lambda name: needed[name])
    program = None if worst is None else programs[worst]
    outputs = program and program["output_bytes"] - program["aliased_bytes"]
    return AotReport(
        devices=report["devices"],
        argument_bytes=program and program["argument_bytes"],
        temp_bytes=program and program["own_bytes"] - outputs,
        output_bytes=outputs,
        hbm_bytes=None if worst is None else needed[worst],
        flops=sum(programs[name].get("flops", 0.0) for name in STEP),
        compile_s=round(sum(p["lower_s"] + p["compile_s"] for p in programs.values()), 2),
        fits=memory["fits"],
        worst=worst,
        memory=memory["device_bytes"],
        where=report["topology"],
        programs={
            name: {**program, "needed_bytes": needed.get(name)}
            for name, program in programs.items()
        },
        resident=memory["resident_bytes"],
    )
