"""Changes between two resolved specs, the effect of each on a run, and the roles to restart.

Specs hold references to secrets, never their values; so changes never show a secret.

A plan file has a plan, and the state of the run that it was made for.
`runspec plan -o FILE` writes one and `runspec apply FILE` does what it says, or refuses. It carries
the resolved spec, so that nothing but the file is needed; of secrets a spec holds references only.
Its digest tells an edited file from the one that was reviewed. It is no signature: whoever may
write the file can make another plan.

`runspec plan --aot` compiles the learner's step for the spec's chips, and reports its memory:

    report = compile_step(spec, config)
    report.fits                     # None where the device's memory is not known

It runs `python -m learner_jax aot` in another process. TPUs need libtpu (`make aot`) but no chip, a
CPU needs nothing, GPUs need one GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from runspec.core import entry_points
from runspec.core.canonical import canonical_json, digest_bytes, parse_object
from runspec.core.entry_points import install_command
from runspec.core.errors import BadUsage, UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.models import ModelConfig
from runspec.core.models.family import hf_config
from runspec.core.schema import RunSpec
from runspec.core.schema.fields import CHANGE_CLASSES, ChangeClass
from runspec.core.schema.load import FILE_NAME, dump_resolved, parse_resolved, spec_digest
from runspec.core.schema.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.schema.schema_fields import field_at

Kind = Literal["add", "change", "remove"]
LIVE: frozenset[ChangeClass] = frozenset({"hot", "rolling"})
"""Change classes that a run applies while it works."""
_ORDER_IS_LEARNT = ("data.sources", "reward")
"""Named lists whose order decides draws and sums."""
_ONLY_RAISED = {
    "steps": "some may be trained or sampled already",
    "groups_per_submission": "leases of more may be out",
}
"""Fields of class restart that are newrun if they are lowered: the reason by key."""
_NOTHING: tuple[Any, ...] = (None, {}, [])
"""Empty values, which equal no value."""
_LONGEST_SHOWN = 500

Readers = Literal["coordinator", "publisher", "validators", "samplers"]

ORDER: tuple[Readers, ...] = ("coordinator", "publisher", "validators", "samplers")
"""Order of restarts: the coordinator first, because it serves the spec to the others."""
READERS: dict[str, tuple[Readers, ...]] = {
    # Manifests tell those who serve and fetch versions.
    "broadcast.format": ("publisher",),
    "broadcast.anchor_every": ("publisher",),
    "verify.engine": ("coordinator", "validators"),
    "verify.admission": ("coordinator",),
    "verify.prefill_share": ("coordinator", "validators"),
    "verify.prefill_floor": ("coordinator", "validators"),
    "verify.newcomer_share": ("coordinator",),
    "verify.profiles": ("coordinator", "validators"),
    "verify.loosest": ("coordinator", "validators"),
    "verify.uncalibrated": ("coordinator",),
    "verify.thresholds": ("coordinator", "validators"),
    "verify.backlog": ("coordinator",),
    "verify.proxies": ("coordinator",),
    # It is also the time limit for fetching a version.
    "verify.lease_timeout": ("coordinator", "validators", "samplers"),
}
"""Roles that read a rolling field, or a block of them, by path."""


@dataclass(frozen=True)
class Change:
    """One value that differs."""

    path: str
    """Path with names for the items of named lists: `samplers.volunteers.replicas`."""
    before: Any
    """JSON value; None if there was none."""
    after: Any
    """JSON value; None if it was removed."""
    kind: Kind
    change_class: ChangeClass
    reason: str = ""
    """Reason why the class is not that of the field."""

    def __str__(self) -> str:
        before = "unset" if self.kind == "add" else shown(self.before)
        after = "unset" if self.kind == "remove" else shown(self.after)
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.path}: {before} there, {after} now{reason}"


def shown(value: Any) -> str:
    """Return a value as text; a long text, such as a profile, by its digest."""
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{len(value)} characters, BLAKE3 {digest_bytes(value.encode())[:16]}"
    return json.dumps(value)


def difference(old: RunSpec | None, new: RunSpec) -> list[Change]:
    """Return every changed value, in the order of the new spec; removed ones come last.

    Args:
        old: spec of the run; None for a new run: every value is added.
        new: the requested spec.
    """
    before, after = (
        {} if spec is None else dict(_leaves(spec.model_dump(mode="json", by_alias=True), ""))
        for spec in (old, new)
    )
    changes: list[Change] = []
    effect: ChangeClass
    for path in [*after, *(path for path in before if path not in after)]:
        then: Any = before.get(path)
        now: Any = after.get(path)
        if isinstance(then, tuple) or isinstance(now, tuple):
            # The order of those items of a named list that are in both.
            then, now = then or (), now or ()
            then, now = [n for n in then if n in now], [n for n in now if n in then]
            if then != now:
                effect = "newrun" if path in _ORDER_IS_LEARNT else "restart"
                changes.append(Change(path, then, now, "change", effect, "another order"))
        elif path not in before and now not in _NOTHING:
            list_name, _, name = path.partition(".")
            pools = before.get("samplers") if list_name == "samplers" else None
            pool = pools is not None and name.partition(".")[0] not in pools
            effect = "restart" if pool else _class(path)  # nobody has sampled for a new pool
            changes.append(Change(path, None, now, "add", effect))
        elif path not in after and then not in _NOTHING:
            changes.append(Change(path, then, None, "remove", _class(path)))
        elif path in before and path in after and then != now:
            change_class, reason = _class(path), _ONLY_RAISED.get(path.rpartition(".")[2])
            if change_class == "restart" and reason and now < then:
                change_class, reason = "newrun", f"{reason}: it may only be raised"
            elif new.supervised is not None and path == "learner.packing.tokens":
                change_class, reason = "newrun", "rows of documents have this length"
            else:
                reason = None
            changes.append(Change(path, then, now, "change", change_class, reason or ""))
    return changes


def severest(changes: Sequence[Change]) -> ChangeClass | None:
    """Return the most severe class of changes; None without any."""
    order = list(CHANGE_CLASSES)
    return max((change.change_class for change in changes), key=order.index, default=None)


def of_class(changes: Sequence[Change], change_class: ChangeClass) -> list[Change]:
    return [change for change in changes if change.change_class == change_class]


def _class(path: str) -> ChangeClass:
    field = field_at(path)
    assert field is not None, f"{path} of a resolved spec is in the schema"
    return field.change


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the leaves under a path; for a named list also the tuple of names."""
    named = isinstance(value, list) and all(isinstance(v, dict) and "name" in v for v in value)
    if named and value:
        names = tuple(item["name"] for item in value)
        yield path, names
        value = dict(zip(names, value, strict=True))
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def roles_to_restart(changes: Sequence[Change]) -> tuple[Readers, ...]:
    """Return the roles that a set of changes restarts one by one, in order."""
    readers: set[Readers] = set()
    for change in of_class(changes, "rolling"):
        at = next(path for path in READERS if f"{change.path}.".startswith(f"{path}."))
        readers.update(READERS[at])
    return tuple(reader for reader in ORDER if reader in readers)


KIND = "Plan"
MAX_BYTES = MAX_SPEC_BYTES + 64 * 1024
_MARK = re.compile(rb'"kind"\s*:\s*"Plan"')


class BadPlan(BadUsage):
    """Error: a file declares itself a plan and is not valid."""


@dataclass(frozen=True)
class Seen:
    """State of a run that a plan was made for."""

    serial: int
    """0 for a run that did not exist."""
    spec_digest: str | None
    """Digest of the run's spec; None for a run that did not exist."""


@dataclass(frozen=True)
class SavedPlan:
    """Plan that `apply` carries out, and the state of the run that it needs."""

    spec: RunSpec
    seen: Seen
    created: float
    """Seconds since the epoch."""


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["Plan"]
    version: str
    runspec: str
    run: str
    created: float
    serial: NonNegativeInt
    state_digest: _Digest | None
    spec_digest: str
    spec: dict[str, Any]
    digest: str


def save_plan(path: Path, plan: SavedPlan) -> None:
    """Write a plan atomically, readable by its owner alone.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "kind": KIND,
        "version": plan.spec.version,
        "runspec": version(entry_points.NAME),
        "run": plan.spec.name,
        "created": plan.created,
        "serial": plan.seen.serial,
        "state_digest": plan.seen.spec_digest,
        "spec_digest": spec_digest(plan.spec),
        "spec": parse_object(dump_resolved(plan.spec), max_bytes=MAX_SPEC_BYTES),
    }
    whole = {**content, "digest": digest_bytes(canonical_json(content))}
    write_atomic(path, canonical_json(whole) + b"\n", mode=0o600)


def read_plan(path: Path) -> SavedPlan | None:
    """Read a plan; None for another file, like a spec.

    Raises:
        BadPlan: it was edited, is damaged, or was made by another version of runspec.
        UserError: it is larger than any plan.
        OSError: it cannot be read.
    """
    data = read_bounded(path, MAX_BYTES)
    if not data.lstrip().startswith(b"{") or _MARK.search(data) is None:
        return None
    try:
        content = parse_object(data, max_bytes=MAX_BYTES)
        made_by, ours = content.get("runspec"), version(entry_points.NAME)
        if made_by != ours:
            raise ValueError(f"made by runspec {str(made_by)[:40]!r}, this is {ours!r}")
        said = _Document.model_validate(content)
        signed = {name: value for name, value in content.items() if name != "digest"}
        if digest_bytes(canonical_json(signed)) != said.digest:
            raise ValueError("its content was edited: the digest is another")
        spec = parse_resolved(canonical_json(said.spec), place=str(path))
        if (said.run, said.spec_digest) != (spec.name, spec_digest(spec)):
            raise ValueError("what it says of its spec does not fit the spec")
    except (ValueError, UserError) as error:
        reason = error.thing if isinstance(error, UserError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}"
        raise BadPlan(
            f"not a plan that can be applied: {reason}",
            place=str(path),
            remedy="make a new one with `runspec plan -o`",
        ) from error
    return SavedPlan(spec, Seen(said.serial, said.state_digest), said.created)


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
