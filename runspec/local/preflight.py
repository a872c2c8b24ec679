"""Everything that keeps a run from starting on this machine, found before anything is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from urllib.parse import urlsplit

from runspec.core.entry_points import install_command, list_command, machine_kind
from runspec.core.errors import UserError, size
from runspec.core.files import expand_user
from runspec.core.models import ModelConfig, device_count
from runspec.core.models.family import load_config, model_config
from runspec.core.models.parameters import (
    WIDTH,
    parameter_count,
    trained_count,
)
from runspec.core.run_files import checkpoints_folder, numbered, state_folder, versions_in
from runspec.core.schema import Hardware, RunSpec, role_names
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import evaluator_pool, island_names, island_spec
from runspec.core.schema.source_files import missing_plugins, source_files
from runspec.estimate import state_bytes
from runspec.estimate.broadcast import VersionSize, version_size
from runspec.estimate.speed import published_states_bytes
from runspec.lint.rules.samplers import unsupported_heads
from runspec.local.backend import LOCAL
from runspec.local.identity import pinned_root_problem
from runspec.local.machine import Facts, ModelFiles, devices_here, find_files
from runspec.local.model_folders import require_fitting
from runspec.local.site import Disk, Group
from runspec.lock import TOKENIZER, WEIGHTS, require_files

STORED_VERSIONS = 3
"""What a sampler has: the version that is sampled from, the newest, and one on its way."""
_ROOM_BYTES = 2**30 // 2
"""For logs, rollouts and the environment's own files."""


def disk_bytes(spec: RunSpec, config: ModelConfig | None) -> int:
    """About how much disk a run fills, in bytes.

    Weights as directories, `keep_versions` + 1 of them, with their deltas where the run sends such;
    as many bytes of whole versions at the origin and at each relay. Where they hold deltas, that is
    those of `keep_versions` and of the way back to the newest anchor, and the anchors on it. The
    folder that samplers and validators share: the version of each sampler and the newest, but at
    most `async_level` + 2, as many with a validator, and one more on its way. Full states (masters
    and moments of what is trained, 12 P with adamw in float32, P parameters), `checkpoints.keep` +
    1 of them, and what `audit` publishes; and room for logs and rollouts. Room alone where the
    model's shape is not known. Left out: versions that are kept longer because somebody reads them,
    and the packed rows of documents, which lie in the learner's cache.
    """
    if config is None:
        return _ROOM_BYTES
    one, versions = version_size(spec, config), spec.broadcast.keep_versions + 1
    directories = versions * one.whole
    if one.follower < one.whole:
        directories += round(versions * one.delta)
    away = role_names.elsewhere(spec)
    stores = _store_bytes(spec, one) * (1 + len(set(role_names.relay_names(spec)) - away))
    samplers = len(set(role_names.worker_names(spec)) - away)
    validators = len(set(role_names.validator_names(spec)) - away)
    read = 0
    if spec.supervised is None and (samplers or validators):
        most = spec.grpo.async_level + 3
        read = one.whole * (most if validators else min(samplers + 2, most))
    states = states_bytes(spec, config) + published_states_bytes(spec, config)
    return directories + stores + read + states + _ROOM_BYTES


def _store_bytes(spec: RunSpec, one: VersionSize) -> int:
    """What the origin or a relay keeps."""
    kept, every = spec.broadcast.keep_versions, spec.broadcast.anchor_every
    if one.follower == one.whole:
        return (kept + 1) * one.whole
    anchors = min(kept + 1, kept // every + 2)
    return round(anchors * one.whole + (kept + every) * one.delta)


def own_disk_bytes(spec: RunSpec, config: ModelConfig, group: Group) -> int:
    """About how much a member of a role group writes to a folder of its own, in bytes.

    Relays what they serve, samplers three versions and validators as many as the lag allows and one
    on its way, an evaluator two, an island its versions, shares of four bytes a parameter and full
    states.
    """
    one, versions = version_size(spec, config), 0
    if group.name in role_names.relay_names(spec):
        return _store_bytes(spec, one) + _ROOM_BYTES
    if group.name == "validators":
        versions = 3 if spec.supervised is not None else spec.grpo.async_level + 3
    elif group.name in {pool.name for pool in spec.samplers}:
        versions = STORED_VERSIONS
    elif group.name in role_names.evaluator_names(spec):
        versions = 2
    elif group.disk is Disk.OWN:
        versions = spec.broadcast.keep_versions + 1
        shares = 4 * trained_count(config, spec.learner.lora) * versions
        return versions * one.whole + shares + states_bytes(spec, config) + _ROOM_BYTES
    return versions * one.whole + _ROOM_BYTES


def states_bytes(spec: RunSpec, config: ModelConfig | None) -> int:
    """About how much of it the full states are; 0 where the model's shape is not known."""
    if config is None:
        return 0
    return state_bytes(spec, config) * (spec.checkpoints.keep + 1)


_PREPARE = "see `runspec prepare` and docs/site.md"
_THIS_HOST = ("127.0.0.1", "localhost", "::1")
ROLE_MODULES = {
    "learner": ("jax", "orbax.checkpoint", "tensorstore"),
    "sampler": ("vllm", "tokenizers"),
    "verify": ("numpy", "rpds"),
}
"""Modules that each part of a run imports, by the extra that installs them."""
MONITOR_EXTRAS = ("tensorboard", "wandb")
"""Kinds of monitors that import a package, which has their name, as has the extra."""
ENGINE_MODULES = {"jax": ("jax",), "torch": ("torch", "transformers")}
"""Modules that our own prefill engines import."""


@dataclass(frozen=True)
class Missing:
    """One thing that the run needs and this machine lacks."""

    path: str
    """Where the spec asks for it."""
    thing: str
    remedy: str = ""


def missing(spec: RunSpec, run_dir: Path, facts: Facts) -> list[Missing]:
    """Return what the run lacks here, the most important first; empty when it can start."""
    found = find_files(spec.model, facts.machine.env)
    config = model_config(spec)
    if config is None and found.model is not None:
        config = load_config(found.model)
    return [
        *_hardware(spec, facts),
        *_validators(spec, facts),
        *_devices(spec, facts),
        *_model(spec, found),
        *_heads(spec, config),
        *_tokenizer(spec, found),
        *_inputs(spec, run_dir, facts),
        *_servers(spec),
        *_modules(spec, facts),
        *_checkpoints(spec, run_dir),
        *_disk(spec, run_dir, config, facts.free_bytes),
        *_memory(spec, config, facts.memory()),
    ]


def _heads(spec: RunSpec, config: ModelConfig | None) -> Iterator[Missing]:
    for each in unsupported_heads(spec, config) if config is not None else ():
        yield Missing(".".join(map(str, each.location)), each.message, each.suggestion)


def _hardware(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    learner, here = spec.learner, _groups_here(spec)
    parts = learner.hosts if learner.hosts > 1 and "learners" not in here else 1
    asked = [("learner.hardware", learner.hardware, Fraction(1, parts), learner.mesh.slices)]
    for name in role_names.island_processes(spec):
        if role_names.island_role(name) in here:
            own, path = island_spec(spec, name).learner, f"learner.islands.members.{name}.hardware"
            asked.append((path, own.hardware, Fraction(1), own.mesh.slices))
    asked += [
        (f"samplers.{pool.name}.hardware", pool.hardware, Fraction(pool.replicas), 1)
        for pool in spec.samplers
        if pool.name in here
    ]
    if role_names.EVALUATOR in here:
        path = f"samplers.{evaluator_pool(spec).name}.hardware"
        path = "evaluator.hardware" if spec.evaluator.hardware else path
        asked.append((path, evaluator_pool(spec).hardware, Fraction(1), 1))
    if spec.verify.hardware is not None and spec.verify.validators and "validators" in here:
        count = Fraction(spec.verify.validators)
        asked.append(("verify.hardware", spec.verify.hardware, count, 1))
    taken: Counter[str] = Counter()
    for path, hardware, processes, slices in asked:
        thing = _lack(hardware, processes, slices, facts, taken)
        if thing:
            yield Missing(path, thing)
    if "learners" in here and learner.hosts > 1 and learner.hardware.kind != "cpu":
        yield Missing(
            "learner.hosts",
            f"{learner.hosts} machines with {learner.hardware.kind}; this is one",
            _PREPARE,
        )


def _lack(
    hardware: Hardware, processes: Fraction, slices: int, facts: Facts, taken: Counter[str]
) -> str:
    """Return what is wanted and what is here; empty where it suffices.

    Args:
        hardware: of one process.
        processes: how many there are, or the part of one that is here.
        slices: of the hardware.
        facts: of this machine.
        taken: devices of others by what they are called, to which these are added.
    """
    if hardware.kind == "cpu":
        return ""
    here, unit = devices_here(hardware, facts.gpus, facts.tpus)
    wanted = int((device_count(hardware, slices) or 1) * processes)
    others = taken[unit]
    taken[unit] += wanted
    if here >= wanted + others:
        return ""
    whole = processes >= 1
    shape = hardware.topology if hardware.topology and whole else f"x {wanted}"
    many = f"{slices} slices of " if slices > 1 and whole else ""
    beside = f" beside {others} of other roles" if others else ""
    has = f"this machine has {here or 'none'}"
    return f"{many}{hardware.kind} {shape} ({wanted} {unit}{beside}); {has}"


def _validators(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    verify = spec.verify
    graded = spec.supervised is None
    if graded and not verify.validators and spec.identity.root_public_key is None:
        yield Missing(
            "verify.validators",
            "0: nobody checks and grades what workers send, and no step fills",
            "ask for one at least, or pin a root whose roles.json names validators elsewhere",
        )
    if not verify.validators or "validators" not in _groups_here(spec):
        return
    if verify.engine not in facts.prefill_engines:
        offered = ", ".join(facts.prefill_engines) or "none"
        yield Missing("verify.engine", f"no prefill engine {verify.engine!r}; installed: {offered}")
    needed = ENGINE_MODULES.get(verify.engine, ())
    if absent := [name for name in needed if not facts.has_module(name)]:
        thing = f"engine {verify.engine} imports {', '.join(absent)}, not installed here"
        yield Missing("verify.engine", thing, _install(facts))


def _devices(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    here, away = max(len(facts.gpus), facts.tpus), role_names.elsewhere(spec)
    for role, numbers in spec.placement.devices.items():
        beyond = [number for number in numbers if number >= here]
        if beyond and role not in away:
            listed = ", ".join(str(number) for number in beyond)
            yield Missing(
                f"placement.devices.{role}",
                f"no device {listed}: this machine has {here or 'none'}",
            )


def _install(facts: Facts) -> str:
    return list_command(machine_kind(facts.gpus, facts.tpus))


def _groups_here(spec: RunSpec) -> Container[str]:
    """Return the parts of `placement.roles` that start here."""
    if spec.placement.backend != LOCAL:
        return ()  # it finds machines for them
    return role_names.placeable(spec) if spec.placement.roles is None else spec.placement.roles


def _model(spec: RunSpec, found: ModelFiles) -> Iterator[Missing]:
    model = spec.model
    if model.hf is None:
        return
    if found.model is None:
        yield _not_here("model.hf", "weights", WEIGHTS, model.hf, model.revision)
    elif model.tokenizer is None and not (found.model / TOKENIZER).is_file():
        yield Missing(
            "model.hf",
            f"the directory {found.model} has no {TOKENIZER}",
            "`save_pretrained` of the tokenizer writes it; or name one with model.tokenizer",
        )


def _not_here(
    path: str, what: str, patterns: Sequence[str], hf: str, revision: str | None
) -> Missing:
    try:
        require_files(hf, Path(), patterns)
    except UserError as error:
        return Missing(path, error.thing, error.remedy)
    at = f" at {revision}" if revision else ""
    return Missing(path, f"no {what} of {hf}{at} on this machine", f"hf download {hf}")


def _tokenizer(spec: RunSpec, found: ModelFiles) -> Iterator[Missing]:
    asked = spec.model.tokenizer
    drawn = spec.model.shape is not None and spec.supervised is not None
    if asked is None:
        if drawn:
            yield Missing(
                "model.tokenizer",
                "a model of random weights has no tokenizer of its own",
                "name one; `python -m learner_jax tokenizer train` makes one",
            )
        return
    if spec.model.hf is None and not drawn:
        yield Missing(
            "model.tokenizer",
            "a model that the run makes has the tokenizer of its warm start",
            "leave it out, or name a model with model.hf",
        )
    elif found.tokenizer is None:
        yield _not_here("model.tokenizer", TOKENIZER, [TOKENIZER], asked.hf, asked.revision)
    elif found.model is not None:
        try:
            require_fitting(found.tokenizer, found.model)
        except UserError as error:
            yield Missing("model.tokenizer", f"{error.place}: {error.thing}", error.remedy)


def _inputs(spec: RunSpec, run_dir: Path, facts: Facts) -> Iterator[Missing]:
    """Plug-ins, files of the sources, secrets, and the files of a pinned root.

    The coordinator and the validators, which read problems, are here, and so is the learner, which
    reads documents.
    """
    for plugin in missing_plugins(spec):
        yield Missing(plugin.path, str(plugin), plugin.remedy)
    for source in spec.data.sources:
        try:
            source_files(source)
        except UserError as error:
            yield Missing(error.place, error.thing, error.remedy)
    for secret in spec.secrets:
        name = secret.source.env
        if not facts.machine.env.get(name):
            yield Missing(f"secrets.{secret.name}", f"the environment variable {name} is not set")
    if (problem := pinned_root_problem(run_dir, spec)) is not None:
        yield Missing(problem.place, problem.thing, problem.remedy)


def _servers(spec: RunSpec) -> Iterator[Missing]:
    here, away = {*_THIS_HOST, spec.placement.host}, role_names.elsewhere(spec)
    urls = {"broadcast.origin.url": spec.broadcast.origin.url}
    for relay in spec.broadcast.relays:
        path = f"broadcast.relays.{relay.name}.url"
        if f"relay-{relay.name}" not in away:
            urls[path] = relay.url
        elif relay.url is None:
            yield Missing(path, "null: another machine starts this relay, and nobody knows where")
    for path, url in urls.items():
        parts = urlsplit(url or "")
        if parts.scheme == "http" and parts.hostname not in here:  # https: a proxy before it
            origin = "leave it out, and let readers elsewhere reach the origin through relays"
            remedy = origin if path == "broadcast.origin.url" else _PREPARE
            yield Missing(path, f"{url} is not on this machine", remedy)


def _modules(spec: RunSpec, facts: Facts) -> Iterator[Missing]:
    samples = any(pool.name in _groups_here(spec) for pool in spec.samplers)
    for extra, modules in ROLE_MODULES.items():
        absent = [name for name in modules if not facts.has_module(name)]
        if absent and (extra != "sampler" or samples):
            yield Missing(
                "placement.backend",
                f"Python packages not installed here: {', '.join(absent)} ({extra})",
                _install(facts),
            )

    for each in spec.monitors:
        path = f"monitors.{each.name}"
        if each.kind in MONITOR_EXTRAS and not facts.has_module(each.kind):
            thing = f"Python package not installed here: {each.kind}"
            yield Missing(path, thing, install_command(each.kind))
        if each.python is not None and not expand_user(Path(each.python)).is_file():
            remedy = "`make trackio` makes .venv/trackio/bin/python"
            yield Missing(f"{path}.python", f"no such file: {each.python}", remedy)


def _checkpoints(spec: RunSpec, run_dir: Path) -> Iterator[Missing]:
    """A new run must not go on from the full states or versions of an earlier one of its name."""
    folder = checkpoints_folder(run_dir, spec)
    known = (run_dir / SPEC_FILE).exists()
    if spec.checkpoints.dir is None or (
        known and checkpoints_folder(run_dir, load_resolved(run_dir)) == folder
    ):
        return
    own = (state_folder(run_dir, spec, name) for name in island_names(spec)[1:])
    states = (folder / "state", *own)
    if any(numbered(each, "step_") for each in states) or versions_in(folder / "params"):
        yield Missing(
            "checkpoints.dir",
            f"{folder} holds full states of an earlier run of this name",
            "remove them, or give the run another name",
        )


def _memory(spec: RunSpec, config: ModelConfig | None, free: float | None) -> Iterator[Missing]:
    """Weights that nobody has trained are drawn on the trunk's host, in float32."""
    if config is None or free is None or spec.model.shape is None:
        return
    needed = WIDTH["float32"] * parameter_count(config)
    if needed > free:
        yield Missing(
            "model.shape",
            f"version 0 is drawn in {size(needed)} of main memory, {size(free)} is free",
            "start the run on a machine with more, or name weights in model.hf",
        )


def _disk(
    spec: RunSpec, run_dir: Path, config: ModelConfig | None, free_bytes: Callable[[Path], int]
) -> Iterator[Missing]:
    states, others = states_bytes(spec, config), disk_bytes(spec, config)
    remedy = "free some, keep less (checkpoints.keep), or use another --runs-dir"
    needs = [("checkpoints", others, free_bytes(run_dir), remedy)]
    if spec.checkpoints.dir is not None:
        at = checkpoints_folder(run_dir, spec).parent
        remedy = "free some, or keep less (checkpoints.keep, broadcast.keep_versions)"
        needs = [("storage", others - states, free_bytes(run_dir), remedy)]
        if isinstance(at, Path):
            needs.append(("checkpoints.dir", states, free_bytes(at.absolute()), remedy))
    for path, needed, free, remedy in needs:
        if needed > free:
            yield Missing(
                path,
                f"about {size(needed)} of disk needed, {size(free)} free",
                remedy,
            )
