"""Everything that keeps a run from starting on this machine, found before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from urllib.parse import urlsplit

from bridge.config import ModelConfig, load_config
from runspec.estimate.model import model_config
from runspec.estimate.parameters import WIDTH, parameter_count, trained_count
from runspec.local.identity import pinned_root_problem
from runspec.local.machine import (
    find_model,
    free_bytes,
    gpu_names,
    module_is_installed,
    this_machine,
    tpu_chips,
)
from runspec.local.processes import Machine
from runspec.spec.plugins import PREFILL_GROUP, installed_kinds, missing_plugins
from runspec.spec.schema import Hardware, RunSpec

GIB = 2**30
_ROOM_BYTES = GIB // 2
"""For logs, rollouts and the environment's own files."""
_THIS_HOST = ("127.0.0.1", "localhost", "::1")
_ROLE_MODULES = {
    "learner": ("jax", "orbax.checkpoint", "tensorstore"),
    "sampler": ("vllm", "tokenizers"),
    "verify": ("numpy", "pyarrow"),
    "report": ("matplotlib",),
}


@dataclass(frozen=True)
class Missing:
    """One thing that the run needs and this machine lacks."""

    path: str
    """Where the spec asks for it."""
    thing: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What was seen of this machine."""

    machine: Machine
    gpus: Sequence[str]
    tpus: int
    free_bytes: int
    has_module: Callable[[str], bool]
    prefill_engines: Sequence[str]


def look(folder: Path) -> Facts:
    """Looks at this machine; `folder` is where runs lie."""
    return Facts(
        machine=this_machine(),
        gpus=gpu_names(),
        tpus=tpu_chips(),
        free_bytes=free_bytes(folder.absolute()),
        has_module=module_is_installed,
        prefill_engines=installed_kinds(PREFILL_GROUP),
    )


def missing(spec: RunSpec, run_dir: Path, facts: Facts) -> list[Missing]:
    """What the run lacks here, most telling first; empty when it can start."""
    return [
        *_hardware(spec, facts),
        *_model(spec, facts),
        *_plugins(spec, facts),
        *_secrets(spec, facts),
        *_identity(spec, run_dir, facts),
        *_relays(spec),
        *_modules(facts),
        *_disk(spec, facts),
    ]


def _hardware(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    asked = [("learner.hardware", spec.learner.hardware, 1)]
    asked += [
        (f"samplers.{pool.name}.hardware", pool.hardware, pool.replicas) for pool in spec.samplers
    ]
    lacking = [(path, _lack(hardware, processes, facts)) for path, hardware, processes in asked]
    yield from (Missing(path, thing) for path, thing in lacking if thing)
    learner = spec.learner
    if learner.hosts > 1 and learner.hardware.kind != "cpu":
        yield Missing(
            "learner.hosts",
            f"{learner.hosts} machines with {learner.hardware.kind}; this is one",
            "start the learner's processes there by hand, see docs/learner_jax.md",
        )
    if lacking[0][1]:
        model = spec.model.hf or "the model"
        yield Missing(
            "verify.validators",
            f"{spec.verify.validators} with engine {spec.verify.engine} recompute rollouts of "
            f"{model}: they need accelerators too",
        )


def _lack(hardware: Hardware, processes: int, facts: Facts) -> str:
    """What is wanted and what is here; empty where it suffices."""
    if hardware.kind == "cpu":
        return ""
    if hardware.kind.startswith("tpu"):
        chips = hardware.count or prod(int(side) for side in (hardware.topology or "1").split("x"))
        wanted, here, unit = chips, facts.tpus, "TPU chips"
    else:
        family = hardware.kind.split("-")[0].lower()
        wanted = (hardware.count or 1) * processes
        here, unit = sum(family in name.lower() for name in facts.gpus), f"{family.upper()} GPUs"
    if here >= wanted:
        return ""
    shape = hardware.topology or f"x {wanted}"
    return f"{hardware.kind} {shape} ({wanted} {unit}); this machine has {here or 'none'}"


def _model(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    if spec.model.hf is None:
        return
    if find_model(spec.model.hf, spec.model.revision, facts.machine.env) is None:
        at = f" at {spec.model.revision}" if spec.model.revision else ""
        yield Missing(
            "model.hf",
            f"no weights of {spec.model.hf}{at} on this machine",
            f"hf download {spec.model.hf}",
        )


def _plugins(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    for sentence in missing_plugins(spec):
        path, thing = sentence.split(": ", 1)
        yield Missing(path, thing)
    if spec.verify.engine not in facts.prefill_engines:
        offered = ", ".join(facts.prefill_engines) or "none"
        yield Missing(
            "verify.engine", f"no prefill engine {spec.verify.engine!r}; installed: {offered}"
        )


def _secrets(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    for secret in spec.secrets:
        if not facts.machine.env.get(secret.source.env):
            yield Missing(
                f"secrets.{secret.name}", f"the environment variable {secret.source.env} is not set"
            )


def _identity(spec: RunSpec, run_dir: Path, facts: Facts) -> Iterator[Missing]:
    problem = pinned_root_problem(run_dir, spec)
    if problem is not None:
        yield Missing(problem.place, problem.thing, problem.remedy)
    elif spec.identity.root_public_key is None and any(_hardware(spec, facts)):
        yield Missing(
            "identity.root_public_key",
            "unset: workers on other machines pin the root that signs roles.json",
        )


def _relays(spec: RunSpec) -> Iterator[Missing]:
    here = {*_THIS_HOST, spec.placement.host}
    for relay in spec.broadcast.relays:
        if relay.url is not None and urlsplit(relay.url).hostname not in here:
            yield Missing(
                f"broadcast.relays.{relay.name}.url", f"{relay.url} is not on this machine"
            )


def _modules(facts: Facts) -> Iterator[Missing]:
    for extra, modules in _ROLE_MODULES.items():
        absent = [name for name in modules if not facts.has_module(name)]
        if absent:
            yield Missing(
                "placement.backend",
                f"Python packages not installed here: {', '.join(absent)} ({extra})",
                "make install",
            )


def _disk(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    needed = disk_bytes(spec, facts)
    if needed > facts.free_bytes:
        yield Missing(
            "checkpoints",
            f"about {needed / GIB:.1f} GiB of disk are needed, "
            f"{facts.free_bytes / GIB:.1f} are free",
            "free some, keep less (checkpoints.keep), or use another --runs-dir",
        )


def disk_bytes(spec: RunSpec, facts: Facts) -> int:
    """About how much disk a run fills, in bytes.

    With P parameters of b bytes published: weights as directory, at the origin and at each relay,
    `keep_versions` + 1 of each; full states (masters and two moments of what is trained, 12 P in
    float32), `checkpoints.keep` + 1 of them; and room for logs and rollouts. Room alone where the
    model's shape is not known.
    """
    config = _config(spec, facts)
    if config is None:
        return _ROOM_BYTES
    learner, versions = spec.learner, spec.broadcast.keep_versions + 1
    weights = parameter_count(config) * WIDTH[spec.broadcast.dtype] * versions
    copies = 2 + len(spec.broadcast.relays)
    number = WIDTH[learner.master_dtype] + 2 * WIDTH["float32"]
    states = trained_count(config, learner.lora) * number * (spec.checkpoints.keep + 1)
    return weights * copies + states + _ROOM_BYTES


def _config(spec: RunSpec, facts: Facts) -> ModelConfig | None:
    """The model's shape; None where neither the spec nor this machine knows it."""
    config = model_config(spec)
    if config is not None or spec.model.hf is None:
        return config
    folder = find_model(spec.model.hf, spec.model.revision, facts.machine.env)
    return None if folder is None else load_config(folder)
