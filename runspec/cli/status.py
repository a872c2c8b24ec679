"""`runspec status` and `runspec describe`: how far a run is, and everything known of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from broadcast.layout import manifest_name
from broadcast.manifest import MAX_BYTES
from runspec import cli
from runspec.core.address import is_loopback
from runspec.core.canonical import digest_bytes
from runspec.core.errors import duration, latency, number, per_second, share, size
from runspec.core.files import read_bounded
from runspec.core.schema import RunSpec
from runspec.core.schema.load import spec_digest
from runspec.estimate.assumed import hourly_price
from runspec.local import metrics
from runspec.local.diagnosis import newest, result_line, summarise_evaluations
from runspec.local.endpoints import run_link
from runspec.local.machine import free_bytes
from runspec.local.metrics import Row
from runspec.local.model_folders import folder_bytes, full_states, trained_model
from runspec.local.run_dir import find_run
from runspec.local.run_view import Condition, RunView, budget_limits, look_at
from runspec.local.state import RoleRow, RunState

EVENTS = 20
WATCH_S = 2.0
_CLEAR = "\033[H\033[2J"
"""Clears a terminal."""
_OF_ROLLOUTS = ("LogprobAlarm", "NothingSolved", "SetAside", "GraderFaults")
"""Conditions that a run on documents does not have."""
_FOLDERS = ("checkpoints", "weights", "store", "rollouts", "work", "logs")


def status_command(
    run: cli.Run,
    as_json: cli.Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Says it every two seconds while the run is alive.")
    ] = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Prints the status; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    if as_json:
        print(json.dumps(read_status(run_dir), indent=2))
        return 0
    seen = look_at(run_dir)
    _show(seen)
    while watch and seen.alive:
        time.sleep(WATCH_S)
        seen = look_at(run_dir)
        print(_CLEAR if sys.stdout.isatty() else "")
        _show(seen)
    return 0


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the status of a run, from its directory alone.

    Keys: name, directory, state, reason, held_by, step, steps, wall_s, newest (the last row of
    metrics.jsonl), training (`training_figures` of a supervised run, else null), islands
    (`island_figures` of the newest row, null for one learner), published (the newest version that
    is out), join (the link that volunteers are sent), conditions, roles (by name), events. A run
    whose supervisor died without a word is `interrupted`. A role whose process went with its
    supervisor is `ended`. A role's `stage` is what it is at that takes long, like `loading vLLM`,
    or null.
    """
    seen = look_at(run_dir)
    return {
        "name": seen.spec.name,
        "directory": str(run_dir),
        "state": seen.state,
        "reason": seen.reason,
        "held_by": seen.held_by,
        "step": seen.trained,
        "steps": seen.spec.steps,
        "wall_s": round(seen.wall_s, 3),
        "newest": seen.newest or None,
        "training": training_figures(seen.rows) if seen.spec.supervised is not None else None,
        "islands": metrics.island_figures(seen.newest),
        "published": seen.published,
        "evaluations": summarise_evaluations(seen.results),
        "diagnosis": [asdict(cause) for cause in seen.causes],
        "join": str(link) if (link := run_link(run_dir, seen.spec)) else None,
        "conditions": [asdict(each) for each in seen.conditions.values()],
        "roles": {
            role.name: {**asdict(role), "stage": seen.stages.get(role.name)} for role in seen.roles
        },
        "events": [asdict(event) for event in seen.events],
    }


def training_figures(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return figures of a supervised run that its newest row may not have.

    Keys: held_out_nll and held_out_bits_per_byte, of the newest measurement, and input_wait_share,
    the share of the newest step's time that the learner waited for its input.
    """
    return {
        "held_out_nll": metrics.last_known(rows, "held_out_nll"),
        "held_out_bits_per_byte": metrics.last_known(rows, "held_out_bits_per_byte"),
        "input_wait_share": metrics.input_wait_share(rows[-1]) if rows else None,
    }


def _show(seen: RunView) -> None:
    console = cli.console()
    console.print(headline(seen))
    if seen.held_by:
        console.print(f"held by {seen.held_by}")
        show_link(seen.directory, seen.spec)
    if seen.rows:
        left = left_text(seen.rows, seen.spec.steps) if seen.alive else ""
        console.print(step_line(seen.rows, seen.spec.steps) + (f"  {left}" if left else ""))
        if seen.spec.supervised is not None and seen.published is not None:
            console.print(f"version {seen.published} is published")
        if waited := latency_line(seen.newest):
            console.print(waited)
        for name, text in metrics.island_pairs(seen.newest):
            console.print(f"{name}: {text}")
    for name, result in newest(seen.results).items():
        console.print(f"{name}, {result_line(result)}")
    if missing := _missing_islands(seen):
        console.print(f"waits {missing}")
    for cause in seen.causes:
        console.print(cause.line)
    holding = [each for each in seen.conditions.values() if each.status != "False"]
    console.print(condition_table(holding))
    console.print(role_table(seen.roles, seen.stages))
    for event in seen.events:
        console.print(str(event))


def show_link(run_dir: Path, spec: RunSpec) -> None:
    """Print how strangers join a run, where they may and can: not at an address of this machine."""
    if all(pool.trust == "trusted" for pool in spec.samplers):
        return
    link = run_link(run_dir, spec)
    if link is None or is_loopback(urlsplit(link.coordinator).hostname or ""):
        return
    if spec.verify.admission == "invite":
        print(f"invite others with: runspec invite {run_dir}")
    else:
        print(f"join with: runspec join '{link}' --key FILE")


def headline(seen: RunView) -> str:
    """A run's name, its state and why, and how long it was up."""
    reason = f" ({seen.short_reason})" if seen.short_reason else ""
    return f"{seen.spec.name}: {seen.state}{reason}, up for {duration(seen.wall_s)}"


def condition_table(shown: Sequence[Condition]) -> Table:
    table = cli.plain_table("condition", "status", "reason", "since", "message")
    for each in shown:
        table.add_row(each.type, each.status, each.reason, clock(each.since), each.message)
    return table


_COLOURS = {
    "running": "green",
    "starting": "cyan",
    "renewing": "cyan",
    "backoff": "yellow",
    "failed": "red",
    "finished": "blue",
    "waiting": "bright_black",
    "stopped": "bright_black",
    "ended": "bright_black",
}


def step_line(rows: Sequence[Row], steps: int) -> str:
    """One line on the newest step; `rows` are not empty."""
    row = rows[-1]
    commit = metrics.commit_text(row)
    islands = f"  {commit}" if commit else ""
    if metrics.is_supervised(row):
        nll = number(metrics.last_known(rows, "held_out_nll"))
        bits = number(metrics.last_known(rows, "held_out_bits_per_byte"))
        waited = f"waited for input {share(metrics.input_wait_share(row))}"
        if metrics.island_figures(row) is not None:
            whom = row.get("waited_for") or "islands"
            waited = f"waited {share(metrics.wait_share(row))}, most for the {whom}"
        return (
            f"step {row['step'] + 1}/{steps}  loss {number(row.get('loss'))}  "
            f"held out {nll} ({bits} bits a byte)  {per_second(metrics.tokens_per_s(row))} tok/s  "
            f"MFU {share(row.get('mfu'))}  {waited}{islands}"
        )
    error = row.get("length_error")  # of a run with target lengths
    return (
        f"step {row['step'] + 1}/{steps}  task {number(row.get('task_reward'))}  "
        f"reward {number(row.get('reward'))}  "
        f"{'' if error is None else f'length error {number(error)}  '}"
        f"lag {number(row.get('lag_mean'), 2)}  {per_second(row.get('sampler_tokens_per_s'))} tok/s"
        f"{islands}"
    )


def latency_line(row: Row) -> str:
    """How long submissions waited of late; empty where a step's row does not say."""
    if row.get("verdict_latency_p50") is None:
        return ""
    verdict, manifest = (
        "{} (p99 {})".format(*latency(row, name)) for name in ("verdict", "manifest")
    )
    return f"from a submission to its verdict {verdict}, to the batch that trains it {manifest}"


def left_text(rows: Sequence[Row], steps: int) -> str:
    """Return about how long the run will go on; empty where that is not known, or it is over."""
    left = metrics.time_left_s(rows, steps)
    return f"about {duration(left)} left" if left else ""


def role_table(roles: Sequence[RoleRow], stages: Mapping[str, str] | None = None) -> Table:
    """The roles, with what those are at that are at a long stage, by name."""
    table = cli.plain_table("role", "state", "restarts", "process", "since")
    for role in roles:
        state, process = Text(role.state, style=_COLOURS[role.state]), str(role.pid or "")
        if stages and role.name in stages:
            state.append(f", {stages[role.name]}", style="cyan")
        table.add_row(role.name, state, str(role.restarts), process, clock(role.since))
    return table


def clock(at: float | None) -> str:
    """The time of day, with the date where that is not today."""
    if at is None:
        return ""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def describe_command(run: cli.Run, runs_dir: cli.RunsDir = cli.RUNS) -> int:
    """Prints the sections; returns the exit code."""
    seen = look_at(find_run(run, runs_dir), events=None)
    with closing(RunState(seen.directory)) as state:
        applied, sessions = state.applied(), state.sessions()
    console = cli.console()
    print(headline(seen))
    show_link(seen.directory, seen.spec)
    started = f", first {clock(seen.run.started)}" if seen.run else ""
    pairs = {
        "directory": seen.directory,
        "held by": seen.held_by or "nobody",
        "serial": applied[-1].serial if applied else 0,
        "sessions": f"{sessions}{started}",
        "steps trained": f"{seen.trained} of {seen.spec.steps}",
    }
    _section("Run", pairs.items())
    _section("Spec", _spec(seen))
    changes = []
    for row in applied:
        changes.append(f"serial {row.serial}, {clock(row.time)}: {'' if row.what else 'started'}")
        changes += [f"  {text}" for text in row.what]
    _lines("Changes", changes)
    print("\nConditions")
    left_out = _OF_ROLLOUTS if seen.spec.supervised is not None else ()
    shown = [each for each in seen.conditions.values() if each.type not in left_out]
    console.print(condition_table(shown))
    print("\nRoles")
    console.print(role_table(seen.roles, seen.stages))
    exits = {event.role: event for event in seen.events if event.exit_code is not None}
    _lines("Last exits", [*map(str, exits.values())])
    _lines("Versions published", _versions(seen))
    _lines("Trained model", trained_model(seen.directory, seen.spec))
    states = []
    for each in full_states(seen.directory, seen.spec):
        text = "" if each.bytes is None else f"  {size(each.bytes)}"
        states.append(f"step {each.step}{text}  {each.path}")
    _lines("Full states", states)
    there = [name for name in _FOLDERS if (seen.directory / name).exists()]
    disk = {name: size(folder_bytes(seen.directory / name)) for name in there}
    _section("Disk", {**disk, "free": size(free_bytes(seen.directory))}.items())
    _section("Budget", _budget(seen))
    _section("Newest step", _figures(seen))
    if seen.spec.learner.islands is not None:
        waits = _missing_islands(seen) or "for nobody"
        _section("Islands", [*metrics.island_pairs(seen.newest), ("waits", waits)])
    _lines("Events", [str(event) for event in seen.events[-EVENTS:]])
    return 0


def _section(title: str, pairs: Iterable[tuple[str, object]]) -> None:
    _lines(title, [f"{name + ':':<22}{text}" for name, text in pairs])


def _lines(title: str, lines: Sequence[str]) -> None:
    print(f"\n{title}")
    for line in lines or ["none"]:
        print(f"  {line}")


def _spec(seen: RunView) -> Iterator[tuple[str, str]]:
    spec = seen.spec
    yield "digest", spec_digest(spec)
    if spec.model.hf is not None:
        yield "model", f"{spec.model.hf} at {spec.model.revision or 'no pinned revision'}"
    elif spec.model.shape is not None:
        shape = spec.model.shape
        layers, width = shape.num_hidden_layers, shape.hidden_size
        yield "model", f"a {shape.model_type} of {layers} layers, {width} wide, made by the run"
    if (supervised := spec.supervised) is not None:
        updates, tokens = supervised.updates_per_step, supervised.tokens_per_update
        yield "kind", spec.algorithm.kind
        yield "a step", f"{updates:,} x {tokens:,} tokens"
        yield "a version", f"every {supervised.publish_every:,} steps"
    else:
        yield "a step", f"{spec.grpo.prompts_per_step} x {spec.grpo.group_size} rollouts"
        yield "async level", str(spec.grpo.async_level)
    if (islands := spec.learner.islands) is not None:
        quorum = islands.quorum or len(islands.members)
        names = ", ".join(member.name for member in islands.members)
        yield "islands", f"{names}; {quorum} make a step; shares as {islands.codec.kind}"
    for pool in spec.samplers:
        yield f"pool {pool.name}", f"{pool.replicas} x {pool.hardware.kind}, {pool.trust}"
    if spec.secrets:
        yield "secrets", ", ".join(f"{s.name} (from {s.source.env})" for s in spec.secrets)


def _versions(seen: RunView) -> list[str]:
    store, lines = seen.directory / "store" / "origin", []
    for version in seen.versions:
        try:
            manifest = read_bounded(store / manifest_name(seen.spec.name, version), MAX_BYTES)
        except FileNotFoundError:  # pruned meanwhile
            continue
        lines.append(f"v{version}  {digest_bytes(manifest)}")
    return lines


def _budget(seen: RunView) -> Iterator[tuple[str, str]]:
    yield "up for", duration(seen.wall_s)
    if (price := hourly_price(seen.spec)) is not None:
        cost, most = price * seen.wall_s / 3600.0, seen.spec.budget.max_cost
        yield "cost so far", f"{cost:.2f}{'' if most is None else f' of {most:g}'}"
    for path, hours in budget_limits(seen.spec).items():
        left = max(0.0, hours * 3600.0 - seen.wall_s)
        yield path, f"{hours:g} h, {duration(left)} left"


def _missing_islands(seen: RunView) -> str:
    """Return for which islands the others wait now, by the coordinator; empty if for none."""
    return (
        metrics.missing_text(seen.coordinator.get("islands")) if seen.spec.learner.islands else ""
    )


def _figures(seen: RunView) -> Iterator[tuple[str, str]]:
    """Yield the figures of the newest step; those that the run does not have are left out."""
    row = seen.newest
    if not row:
        return
    if seen.spec.supervised is not None:
        keys = ("loss", "nll", "bits_per_byte", "grad_norm", "learning_rate", "epoch", "mfu")
        figures = {**{key: row.get(key) for key in keys}, **training_figures(seen.rows)}
        for key, value in figures.items():
            if value is not None:
                yield key.replace("_", " "), number(value)
        yield "tokens/s", per_second(row.get("tokens_per_s"))
        return
    for name, key in (
        ("task reward", "task_reward"),
        ("reward", "reward"),
        ("length error", "length_error"),
        ("lag, mean", "lag_mean"),
        ("lag, largest", "lag_max"),
        ("MFU", "mfu"),
    ):
        if row.get(key) is not None:
            yield name, number(row[key])
    yield "trained tokens/s", per_second(row.get("tokens_per_s"))
    yield "sampled tokens/s", per_second(row.get("sampler_tokens_per_s"))
    for name in ("verdict", "manifest") if latency_line(row) else ():
        yield f"submission to {name}", ", p99 ".join(latency(row, name))
