"""`runspec simulate`: a run on a virtual clock, with a population of workers."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runspec import cli
from runspec.cli.checks import sound_spec
from runspec.core.errors import UserError, duration, number
from runspec.core.files import write_atomic
from runspec.core.models.family import model_config
from runspec.estimate.broadcast import relays_needed
from runspec.local.machine import module_is_installed
from runspec.local.plots import Curve, Figure, draw
from runspec.simulate.population import read_swarm
from runspec.simulate.result import Result
from runspec.simulate.run import simulate


def simulate_command(
    file: cli.File,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    swarm: Annotated[
        Path | None, typer.Option("--swarm", help="Who works, comes, goes and attacks.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    as_json: cli.Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Writes an HTML page with plots.")
    ] = None,
) -> int:
    """Prints what a run with a population comes to; returns 1 where it stalls."""
    files = cli.files_named(file, profile, placement, overrides)
    if plot is not None and not module_is_installed("matplotlib"):
        raise UserError(
            "matplotlib is not installed",
            place="runspec simulate",
            remedy="install the extra `report` (docs/install.md)",
        )
    population = read_swarm(swarm) if swarm is not None else None
    spec = sound_spec(files)
    config = model_config(spec, files.path.parent)
    result = simulate(spec, config, population, seed=seed)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        console = Console(highlight=False)
        show_result(spec.name, result, console)
        workers, per_hour = sum(group.workers for group in result.groups), result.steps_per_hour
        if config is not None and per_hour:
            relays, upload = relays_needed(spec, config, workers, 3600.0 / per_hour)
            link = f"{upload / 1e9:g} Gbit/s each"
            _say(
                console, f"relays that send {workers:,} workers a version a step: {relays}, {link}"
            )
    if plot is not None:
        write_atomic(plot, page(spec.name, result).encode())
    return 1 if result.ended == "stalled" else 0


def show_result(name: str, result: Result, console: Console) -> None:
    """The result, for people."""
    ends = {
        "finished": "finished",
        "stalled": "stalled",
        "max_hours": "not finished: its time is over",
    }
    trained, time = len(result.trained), duration(result.seconds)
    console.print(Text(f"{name}: {trained} steps in {time}, {ends[result.ended]}", style="bold"))
    if result.ended != "finished":
        said = result.reason if result.ended == "stalled" else f"it waits for {result.reason}"
        _say(console, said, "red")
    if result.remedy:
        _say(console, f"remedy: {result.remedy}")
    _say(console, f"steps an hour: {number(result.steps_per_hour)}")
    _say(console, f"rollouts of honest workers that are wasted: {_share(result.wasted_share)}")
    idle = f"learner {_share(result.idle_learner)}, validators {_share(result.idle_validators)}"
    _say(console, f"idle: {idle}")
    waits = sorted(result.waits.items(), key=lambda item: -item[1])
    waited = (f"{what} {_share(seconds / result.seconds)}" for what, seconds in waits)
    _say(console, f"the next step to close waits for: {', '.join(waited)}")
    columns = (">accepted", ">rejected", ">withheld", ">trained", ">wasted", ">idle")
    table = cli.plain_table("workers", "", "strategy", *columns)
    for group in result.groups:
        counts = [group.accepted, group.rejected, group.withheld, group.trained, group.wasted]
        shown = (f"{count:,}" for count in counts)
        table.add_row(group.name, f"{group.workers}", group.strategy, *shown, _share(group.idle))
    console.print(table)
    if result.sanctions:
        console.print("\nQuarantines and bans")
        console.print(_sanctions(result))


def page(name: str, result: Result) -> str:
    """An HTML page with the time of each step, and what became of the groups that it leased."""
    ends = [0.0, *result.trained]
    times = [(step, (end - ends[step]) / 60.0) for step, end in enumerate(ends[1:])]
    lost = {
        label: [(step.number, float(getattr(step, label))) for step in result.steps]
        for label in ("rejected", "withheld", "filtered")
    }
    figures = (
        Figure("Time of a step, minutes", "", [Curve("", times)], bottom=0.0),
        Figure(
            "Groups that no step trains",
            "",
            [Curve(label, points, averaged=False) for label, points in lost.items()],
            bottom=0.0,
        ),
    )
    drawn = "\n".join(
        f"<figure><h2>{figure.title}</h2>\n{draw(figure)}</figure>" for figure in figures
    )
    title = html.escape(f"{name}, simulated with seed {result.seed}")
    style = resources.files("runspec.local.dashboard") / "page" / "style.css"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style.read_text(encoding="utf-8")}</style>
<header><h1>{title}</h1></header>
<main><div class="cols">
{drawn}
</div></main>
"""


def _sanctions(result: Result) -> Table:
    """How many workers of a group met what, from when to when."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for sanction in result.sanctions:
        group, why = sanction.worker.rpartition("-")[0], sanction.reason.partition(":")[0]
        found.setdefault((group, sanction.what, why), []).append(sanction.at)
    table = cli.plain_table("workers", "", "")
    for (group, what, why), times in found.items():
        span = f"{duration(times[0])} to {duration(times[-1])}"
        table.add_row(group, f"{len(times)} x {what}", f"{span}{f' ({why})' if why else ''}")
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _say(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(Text(f"  {text}", style=style), soft_wrap=True)
