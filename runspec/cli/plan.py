"""`runspec plan` and `diff`: what applying a spec would change, and what its run needs.

Of a calibration profile `diff` shows the identity (who was measured, until when), not the tables.
"""

from __future__ import annotations

import difflib
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from runspec import cli
from runspec.cli.checks import located, sound_spec
from runspec.cli.estimate_view import estimate_here, show_estimate
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError, bad_usage, remedies_once, size
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.fields import CHANGE_CLASSES
from runspec.core.schema.findings import format_finding
from runspec.core.schema.load import (
    FILE_NAME,
    SpecFiles,
    dump_resolved,
    load_layers,
    load_resolved,
    parse_resolved,
    spec_digest,
)
from runspec.core.schema.role_names import island_names
from runspec.core.signed import BadSignature
from runspec.local.backend import LOCAL
from runspec.local.planning import STARTS_ANEW, RunPlan, make_plan, takes_any_change
from runspec.local.run_dir import run_directory
from runspec.local.site import ANY_MACHINE, BUNDLES, TRUNK_GROUP, Disk, groups_of
from runspec.local.supervisor import readers_names
from runspec.plan import (
    LIVE,
    AotReport,
    Change,
    SavedPlan,
    compile_step,
    difference,
    of_class,
    roles_to_restart,
    save_plan,
    severest,
    shown,
)
from runspec.plan.estimate import RunEstimate

EXIT_CHANGES = 6
_MARKS = {"add": ("+", "green"), "change": ("~", "yellow"), "remove": ("-", "red")}
_GRADED = {
    "required": "what follows </think>, and nothing without it,",
    "optional": "what follows </think>, or all of it without one,",
    "none": "all",
}
SITE = PurePath("SITE")
"""Stands for the folder that `runspec prepare` is to make."""


def plan_command(
    file: cli.File,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Saves it for apply.")] = None,
    as_json: cli.Json = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exits 6 where there are changes.")
    ] = False,
    aot: Annotated[
        bool, typer.Option("--aot", help="Compiles the learner's step for its chips.")
    ] = False,
    runs_dir: cli.SpecRunsDir = None,
) -> int:
    """Prints the plan, and saves it where asked; returns the exit code."""
    files = cli.files_named(file, profile, placement, overrides)
    spec = sound_spec(files)
    plan = make_plan(spec, run_directory(spec, runs_dir))
    config = model_config(spec, files.path.parent)
    estimate = estimate_here(spec, config)
    if aot and config is None:
        raise UserError(
            f"the shape of {spec.model.hf} is not known here, so its step cannot be compiled",
            place="model.hf",
            remedy="name a local directory with its config.json",
        )
    compiled = compile_step(spec, config) if aot and config is not None else None
    groups = role_groups(spec, files, runs_dir)
    if as_json:
        print(json.dumps(plan_json(plan, estimate, groups, compiled), indent=2))
    else:
        console = Console(highlight=False)
        show_plan(plan, console)
        show_limits(spec, console)
        show_estimate(estimate, console)
        if compiled is not None:
            show_compiled(compiled)
        console.print("\nWhere it runs")
        whole = not console.is_terminal
        for line in where_lines(spec, groups, files):
            to_copy = line.lstrip().startswith("runspec ")
            console.print(line, markup=False, soft_wrap=whole or to_copy)
        if plan.lacking:  # which may not matter: the spec may well be for another machine
            console.print("\nThis machine lacks:")
        remedies = remedies_once([item.remedy for item in plan.lacking])
        for item, words in zip(plan.lacking, remedies, strict=True):
            remedy = f" ({words})" if words else ""
            console.print(f"  {item.path}: {item.thing}{remedy}", markup=False, soft_wrap=whole)
    if compiled is not None and compiled.fits is False:
        raise does_not_fit(compiled)
    if out is not None:
        _save(out, plan)
        if not as_json:
            command = shlex.join(["runspec", "apply", *cli.words_of(SpecFiles(out), runs_dir)])
            print(f"\nSaved. To apply exactly this: {command}")
    return EXIT_CHANGES if exit_code and plan.changes else 0


def plan_json(
    plan: RunPlan,
    estimate: RunEstimate,
    groups: list[dict[str, Any]],
    compiled: AotReport | None = None,
) -> dict[str, Any]:
    """The plan for programs; keys are only ever added.

    `change_class` is that of the severest change, `new` for a run that is not there yet, null where
    nothing changes. `aot` is there where the step was compiled.
    """
    report = {
        "version": plan.spec.version,
        "run": plan.spec.name,
        "spec_digest": spec_digest(plan.spec),
        "serial": plan.seen.serial,
        "change_class": "new" if plan.new else severest(plan.changes),
        "changes": [asdict(change) for change in plan.changes],
        "estimate": estimate.to_json(),
        "groups": groups,
        "lacking": [asdict(item) for item in plan.lacking],
    }
    return report if compiled is None else {**report, "aot": asdict(compiled)}


def show_plan(plan: RunPlan, console: Console) -> None:
    """Print the changes, grouped by what they do."""
    console.print(Text(_headline(plan), style="bold"), soft_wrap=True)
    if not plan.new:
        for change_class, meaning in CHANGE_CLASSES.items():
            if changes := of_class(plan.changes, change_class):
                console.print()
                effect = _effect(plan, changes, meaning)
                console.print(Text(f"{change_class}: {effect}"), soft_wrap=True)
                for change in changes:
                    console.print(_line(change), soft_wrap=True)


def show_limits(spec: RunSpec, console: Console) -> None:
    """Print what of an output is graded, and the limits by which each pool is judged, where the
    spec names any."""
    if spec.supervised is None:
        thinking = spec.data.thinking or "required"
        graded = _GRADED[thinking]
        console.print(f"\nOf each output {graded} is graded (data.thinking: {thinking})")
    if spec.verify.profiles or spec.verify.thresholds:
        from verify.profile import PairLimits

        limits = PairLimits(spec)
        console.print("\nLimits that submissions are judged by:")
        for name in (pool.name for pool in spec.samplers):
            for devices in ("", *limits.measured(name)):
                who = f"{name} on {devices}" if devices else name
                source = limits.of(name, devices).source
                console.print(f"  {who}: {source}", markup=False, soft_wrap=True)


def _headline(plan: RunPlan) -> str:
    """Return what the plan is for, and how many changes it has."""
    name, count = plan.spec.name, len(plan.changes)
    if plan.new:
        return f"{name} is new: {plan.spec.steps} steps, to lie in {plan.run_dir}"
    at = f"the run at serial {plan.seen.serial}, which is {plan.state}"
    if not count:
        return f"{name}: no changes against {at}"
    return f"{name}: {count} change{'s' if count > 1 else ''} against {at}"


def _effect(plan: RunPlan, changes: Sequence[Change], meaning: str) -> str:
    """Describe what applying changes of one class does to the run as it is now."""
    change_class = changes[0].change_class
    if change_class == "newrun" and not takes_any_change(plan.run_dir):
        return f"{meaning}; apply refuses them"
    if change_class == "newrun" and plan.held_by is None:
        return STARTS_ANEW
    if plan.held_by is None:
        return "taken over when the run goes on"
    if change_class not in LIVE:
        return f"{meaning}; apply refuses them until `runspec pause {plan.run_dir}`"
    turns = ", ".join(readers_names(roles_to_restart(changes), plan.spec))
    return f"{meaning}: {turns}" if turns else meaning


def _line(change: Change) -> Text:
    """Return a change as one line, coloured by its kind."""
    mark, style = _MARKS[change.kind]
    before, after = shown(change.before), shown(change.after)
    values = {"add": after, "remove": before, "change": f"{before} -> {after}"}[change.kind]
    reason = f" ({change.reason})" if change.reason else ""
    return Text(f"  {mark} {change.path}: {values}{reason}", style=style)


def show_compiled(report: AotReport) -> None:
    """Print the compiler's figures of the learner's step, in bytes and FLOPs of one device."""
    print(f"\nThe learner's step, compiled for {report.where} in {report.compile_s:.0f} s:")
    for name, count in (
        ("arguments", report.argument_bytes),
        ("temporaries", report.temp_bytes),
        ("outputs", report.output_bytes),
        (f"needed in {report.worst}", report.hbm_bytes),
        ("memory", report.memory),
    ):
        print(f"  {name}: {_size(count)}")
    print(f"  FLOPs by XLA, the body of a loop once: {report.flops:.3g}")


def does_not_fit(report: AotReport) -> UserError:
    """The error, with the numbers and with the compiler's words on the programs it refuses."""
    refused = [
        f"\n  {name}: {program['does_not_fit']}"
        for name, program in report.programs.items()
        if "does_not_fit" in program
    ]
    needed = f"it needs {_size(report.hbm_bytes)}" if report.hbm_bytes else "the compiler refuses"
    return UserError(
        f"the step does not fit: {needed}, a device has {_size(report.memory)}{''.join(refused)}",
        place="learner",
        remedy="more devices on fsdp, shorter rows, or a remat that keeps less",
    )


def _size(count: int | None) -> str:
    return "not known" if count is None else size(count)


def _save(path: Path, plan: RunPlan) -> None:
    refused = not plan.new and of_class(plan.changes, "newrun")
    if refused and not takes_any_change(plan.run_dir):
        raise UserError(
            "apply would refuse these changes: the plan is not saved",
            place=str(path),
            remedy="plan a run of another name with --set name=NAME",
        )
    save_plan(path, SavedPlan(plan.spec, plan.seen, round(time.time(), 3)))


def role_groups(spec: RunSpec, files: SpecFiles, runs_dir: Path | None) -> list[dict[str, Any]]:
    """Each role group with its processes, the machine of each, and what starts them.

    `here` says whether `runspec apply` does, on this machine or the backend's; `commands` is then
    that command, else one for each process.
    """
    named, groups = spec.placement.roles, []
    apply = ["runspec", "apply", *cli.words_of(files, runs_dir)]
    for group in groups_of(spec):
        here = (
            named is None or spec.placement.backend != LOCAL or group.name in (TRUNK_GROUP, *named)
        )
        folder = run_directory(spec, runs_dir) if group.disk is Disk.RUN else None
        processes = [*group.members, *group.beside]
        alone = [group.command(process, SITE / BUNDLES, folder) for process in processes]
        groups.append(
            {
                "name": group.name,
                "processes": processes,
                "machine": group.machine,
                "devices": group.devices * len(group.members),
                "here": here,
                "commands": [shlex.join(words) for words in ([apply] if here else alone)],
            }
        )
    return groups


def where_lines(spec: RunSpec, groups: list[dict[str, Any]], files: SpecFiles) -> Iterator[str]:
    """Yield the groups of `role_groups` as lines."""
    backend = spec.placement.backend
    here = [group for group in groups if group["here"]]
    away = [group for group in groups if not group["here"]]
    starter = "this machine" if backend == LOCAL else f"machines of {backend}"
    if backend == LOCAL and away:
        devices = sum(group["devices"] for group in here)
        starter = f"one machine{f' of {devices} accelerators' if devices else ''}"
    yield f"  {starter}, by `apply`: {', '.join(map(_what, here))}"
    islands = island_names(spec)
    learner = f"island {islands[0]}, which is the learner" if islands else "the learner"
    yield f"    (the trunk: coordinator, publisher, origin, and {learner})"
    yield f"    {here[0]['commands'][0]}"
    for group in away:
        more = f", and {count - 1} more" if (count := len(group["commands"])) > 1 else ""
        yield f"  others: {_what(group)}"
        yield f"    {group['commands'][0]}{more}"
    if away:
        words = ["runspec", "prepare", *cli.words_of(files, None), "-o", str(SITE)]
        prepare = shlex.join(words)
        end = ";" if spec.samplers else ""
        yield f"  bundles come from `{prepare}`, whose trunk then takes the place of `apply`{end}"
        if spec.samplers:
            yield "  volunteers need none: they call `runspec join LINK` (docs/join.md)"


def _what(group: dict[str, Any]) -> str:
    """The group's name, and the accelerators of a process where it has some."""
    where = "" if group["machine"] == ANY_MACHINE else f" ({group['machine']})"
    return f"{group['name']}{where}"


EXIT_SAME, EXIT_DIFFERENT = 0, 1
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@bad_usage()
def diff_command(
    file: cli.File,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    runs_dir: cli.SpecRunsDir = None,
) -> int:
    """Prints the difference as `diff -u` does; returns the exit code."""
    files = cli.files_named(file, profile, placement, overrides)
    layered = load_layers(files)
    if layered.spec is None:
        found = "\n".join(format_finding(finding) for finding in layered.findings)
        raise UserError(f"no spec to compare:\n{found}", place=str(files.path))
    run_dir = run_directory(layered.spec, runs_dir)
    known = (run_dir / FILE_NAME).exists()
    old = load_resolved(run_dir) if known else None
    new = located(layered.spec, files.path.parent)
    before = _lines(old) if old else []
    there = str(run_dir / FILE_NAME) if known else "/dev/null"
    after = _lines(new)
    lines = list(difflib.unified_diff(before, after, there, str(files.path)))
    console = Console(highlight=False)
    for line in lines:
        # Titles look like added and removed lines: they are told by their place.
        style = "bold" if line in lines[:2] else _STYLES.get(line[0], "")
        console.print(Text(line.rstrip("\n"), style=style), soft_wrap=True)
    if old and of_class(difference(old, new), "newrun") and takes_any_change(run_dir):
        print(STARTS_ANEW, file=sys.stderr)  # no line of the difference
    return EXIT_DIFFERENT if lines else EXIT_SAME


def _lines(spec: RunSpec) -> list[str]:
    """The resolved spec as YAML, every default written out; of profiles, which they are."""
    # Through the form on disk, in which free maps are sorted: their order means nothing.
    on_disk = parse_resolved(dump_resolved(spec), place=FILE_NAME)
    tree = on_disk.model_dump(mode="json", by_alias=True)
    for profile in tree["verify"]["profiles"]:
        if profile["document"]:
            profile["document"] = profile_identity(profile["document"])
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).splitlines(keepends=True)


def profile_identity(document: str) -> dict[str, str | float]:
    """Identify a profile without trusting it: a validator checks its signature.

    Args:
        document: signed, or what was taken for it.

    Returns:
        digest (BLAKE3 of the document) and, where it is a profile, pool, validators, issued,
        expires (days, UTC), rate of false rejections a rollout; else unreadable, which says why.
    """
    from verify.profile import open_profile

    data = document.encode("utf-8", "replace")
    digest = digest_bytes(data)
    try:
        profile = open_profile(data, root_public_key=None, dated=False)
    except BadSignature as error:
        return {"digest": digest, "unreadable": str(error)}
    sampler, validator = profile.sampler, profile.validator
    return {
        "digest": digest,
        "pool": f"{sampler.engine}, {sampler.precision}, {sampler.hardware}",
        "validators": f"{validator.engine}, {validator.precision}, {validator.hardware}",
        "issued": _day(profile.issued),
        "expires": _day(profile.expires),
        "rate": profile.rate,
    }


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
