"""The `runspec` command. Each command imports what it needs when it is called: help stays quick.

Exit codes:
    0: done, or clean.
    1: a finding, or something that a person can mend.
    2: a file that cannot be read, or bad usage.
    3: a fault of our own.
    4: a plan is stale, or a role says that the run cannot go on.
    5: the run is held elsewhere.
    6: `plan --exit-code` finds changes.
    130: interrupted.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from runspec.cli import machines, models
from runspec.cli.output import (
    RUN,
    RUNS,
    SPEC,
    Detach,
    File,
    Follow,
    Json,
    Overrides,
    Placement,
    Profile,
    Run,
    RunsDir,
    SpecRunsDir,
    TemplateName,
    Yes,
    duration,
    exit_code_of,
    files_named,
    outlive_readers,
)

app = typer.Typer(
    help="Decentralised reinforcement learning of language models, declared in one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(rich_help_panel=SPEC)
def init(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")] = Path(),
    template: Annotated[
        TemplateName,
        typer.Option("--template", "-t", metavar="NAME", help=", ".join(get_args(TemplateName))),
    ] = "laptop",
    name: Annotated[
        str | None, typer.Option("--name", help="Of the run.", show_default="the folder's name")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="DIR or ORG/NAME, of model, sft and node-8gpu."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Writes over files.")] = False,
) -> None:
    """Writes a commented spec, its pre-commit hook and a CI step."""
    from runspec.cli.init import init_command

    raise typer.Exit(init_command(folder, template, name, model, force))


@app.command(rich_help_panel=SPEC)
def lint(
    files: Annotated[list[Path], typer.Argument(help="Specs to check.")],
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mends what is safe to mend.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Reads every problem and tries the graders, too.")
    ] = False,
    select: Annotated[
        list[str] | None, typer.Option(help="Only these rules or groups, comma-separated.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Not these rules or groups, comma-separated.")
    ] = None,
    output: Annotated[
        Literal["pretty", "compact", "json", "github", "sarif"], typer.Option("--format")
    ] = "pretty",
    fail_level: Annotated[
        Literal["error", "warning", "never"], typer.Option(help="Exits 1 at or above.")
    ] = "error",
) -> None:
    """Checks specs. Exits 0 clean, 1 with findings, 2 on an unreadable file or bad usage."""
    from runspec.cli.lint import lint_command

    specs = [files_named(path, profile, placement, overrides) for path in files]
    code = lint_command(
        specs, select or [], ignore or [], fix=fix, data=data, output=output, fail_level=fail_level
    )
    raise typer.Exit(code)


@app.command(rich_help_panel=SPEC)
def explain(
    topic: Annotated[str | None, typer.Argument(help="A path of the schema, rule or kind.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Every path, rule and kind.")] = False,
) -> None:
    """Explains a field of the spec, a rule, or a kind of reward, source or monitor."""
    from runspec.cli.explain import explain_command

    raise typer.Exit(explain_command(topic, list_all))


@app.command(rich_help_panel=SPEC)
def render(
    file: File,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Says of each value where it is from.")
    ] = False,
    output: Annotated[Literal["yaml", "json"], typer.Option("--format")] = "yaml",
    backend: Annotated[
        Literal["kubernetes", "slurm"] | None,
        typer.Option("--backend", help="Writes what starts the run there."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where --backend writes.")] = None,
    runs_dir: SpecRunsDir = None,
) -> None:
    """Prints the resolved spec, every default written out, or writes what starts it elsewhere."""
    from runspec.cli.render import render_backend_command, render_command

    files = files_named(file, profile, placement, overrides)
    if backend is not None:
        raise typer.Exit(render_backend_command(files, backend, out, runs_dir))
    raise typer.Exit(render_command(files, show_origin, output))


@app.command(rich_help_panel=SPEC)
def lock(
    file: File,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    check: Annotated[
        bool, typer.Option("--check", help="Writes nothing; exits 1 where the lock is stale.")
    ] = False,
) -> None:
    """Pins model, tokenizer and data by commit and digest, in FILE.lock.yaml."""
    from runspec.cli.lock import lock_command

    raise typer.Exit(lock_command(files_named(file, profile, placement, overrides), check))


@app.command(rich_help_panel=SPEC)
def schema(
    draft: Annotated[Literal["07", "2020-12"], typer.Option(help="07 is for editors.")] = "07",
) -> None:
    """Prints the JSON Schema of the spec."""
    import json

    from runspec.core.schema.field_docs import json_schema

    print(json.dumps(json_schema(draft), indent=2, ensure_ascii=False))


@app.command(rich_help_panel=RUN)
def plan(
    file: File,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Saves it for apply.")] = None,
    as_json: Json = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exits 6 where there are changes.")
    ] = False,
    aot: Annotated[
        bool, typer.Option("--aot", help="Compiles the learner's step for its chips.")
    ] = False,
    runs_dir: SpecRunsDir = None,
) -> None:
    """Says what would change, what it needs, how long a step takes and what it costs."""
    from runspec.cli.plan import plan_command

    files = files_named(file, profile, placement, overrides)
    raise typer.Exit(plan_command(files, out, as_json, exit_code, aot, runs_dir))


@app.command(rich_help_panel=RUN)
def simulate(
    file: File,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    swarm: Annotated[
        Path | None, typer.Option("--swarm", help="Who works, comes, goes and attacks.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Writes an HTML page with plots.")
    ] = None,
) -> None:
    """Simulates a run with volunteers that come, go and attack. Exits 1 if it stalls."""
    from runspec.cli.simulate import simulate_command

    files = files_named(file, profile, placement, overrides)
    raise typer.Exit(simulate_command(files, swarm, seed, as_json, plot))


@app.command(rich_help_panel=RUN)
def diff(
    file: File,
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    runs_dir: SpecRunsDir = None,
) -> None:
    """Shows how a spec differs from the run's own. Exits 0 without differences, 1 with some."""
    from runspec.cli.diff import diff_command

    raise typer.Exit(diff_command(files_named(file, profile, placement, overrides), runs_dir))


@app.command(rich_help_panel=RUN)
def apply(
    file: Annotated[Path, typer.Argument(help="The spec, or a plan that `plan -o` saved.")],
    profile: Profile = None,
    placement: Placement = None,
    overrides: Overrides = None,
    detach: Detach = False,
    runs_dir: SpecRunsDir = None,
    resolved: Annotated[bool, typer.Option("--resolved", hidden=True)] = False,
) -> None:
    """Starts a run, changes it, or goes on with it where it was interrupted."""
    from runspec.cli.apply import apply_command, apply_resolved

    if resolved:  # what a backend carries to the machine that has the run directory
        raise typer.Exit(apply_resolved(detach, runs_dir))
    files = files_named(file, profile, placement, overrides)
    raise typer.Exit(apply_command(files, detach, runs_dir))


@app.command(rich_help_panel=RUN)
def status(
    run: Run,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Says it every two seconds while the run is alive.")
    ] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Says how far a run is, and what each of its roles does."""
    from runspec.cli.status import status_command

    raise typer.Exit(status_command(run, as_json, runs_dir, watch=watch))


@app.command(rich_help_panel=RUN)
def describe(run: Run, runs_dir: RunsDir = RUNS) -> None:
    """Says everything of a run: spec, conditions, roles, versions, checkpoints, events."""
    from runspec.cli.status import describe_command

    raise typer.Exit(describe_command(run, runs_dir))


@app.command(rich_help_panel=RUN)
def events(
    run: Run, follow: Follow = False, as_json: Json = False, runs_dir: RunsDir = RUNS
) -> None:
    """Prints what happened to a run, oldest first."""
    from runspec.cli.logs import events_command

    raise typer.Exit(events_command(run, follow, as_json, runs_dir))


@app.command(rich_help_panel=RUN)
def logs(
    run: Run,
    role: Annotated[str | None, typer.Option("--role", help="One role's log only.")] = None,
    follow: Follow = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only so many last lines of each.")
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Prints the roles' logs."""
    from runspec.cli.logs import logs_command

    raise typer.Exit(logs_command(run, role, follow, tail, runs_dir))


@app.command(rich_help_panel=RUN)
def wait(
    run: Run,
    condition: Annotated[
        str, typer.Option("--for", help="A condition: Ready, Finished, ..., or step=N.")
    ],
    timeout: Annotated[
        float,
        typer.Option(
            parser=duration, metavar="TIME", help="How long, like 30s.", show_default="10m"
        ),
    ] = 600.0,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Waits until a condition of a run holds. Exits 1 if it cannot any more, or in time."""
    from runspec.cli.logs import wait_command

    raise typer.Exit(wait_command(run, condition, timeout, runs_dir))


@app.command(rich_help_panel=RUN)
def pause(run: Run, runs_dir: RunsDir = RUNS) -> None:
    """Stops a run's roles in order; `resume` goes on from the newest checkpoint."""
    from runspec.cli.lifecycle import pause_command

    raise typer.Exit(pause_command(run, runs_dir))


@app.command(rich_help_panel=RUN)
def resume(run: Run, detach: Detach = False, runs_dir: RunsDir = RUNS) -> None:
    """Goes on with a run that was paused or interrupted, as it is."""
    from runspec.cli.lifecycle import resume_command

    raise typer.Exit(resume_command(run, detach, runs_dir))


@app.command(rich_help_panel=RUN)
def rollback(
    run: Run,
    to: Annotated[int, typer.Option("--to", min=0, help="The policy version to go back to.")],
    yes: Yes = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Takes a stopped run back to a checkpoint; what came after it is removed."""
    from runspec.cli.lifecycle import rollback_command

    raise typer.Exit(rollback_command(run, to, yes, runs_dir))


@app.command(rich_help_panel=RUN)
def delete(run: Run, yes: Yes = False, runs_dir: RunsDir = RUNS) -> None:
    """Removes a run's directory; refuses while the run is alive."""
    from runspec.cli.lifecycle import delete_command

    raise typer.Exit(delete_command(run, yes, runs_dir))


@app.command(rich_help_panel=RUN)
def monitor(
    run: Run,
    name: Annotated[str, typer.Argument(help="One of the spec's monitors.")],
    runs_dir: RunsDir = RUNS,
) -> None:
    """Sends what a monitor lacks of a run; `apply` starts one for each monitor by itself."""
    from runspec.cli.dashboard import monitor_command

    raise typer.Exit(monitor_command(run, name, runs_dir))


app.add_typer(models.app)
app.add_typer(machines.app)  # without a name, its commands become commands of `app`


def main() -> None:
    """Runs the command line and exits."""
    # What imports make stays: looking for cycles in it took a tenth of a cold `runspec lint`.
    gc.set_threshold(100_000)
    outlive_readers()
    sys.exit(exit_code_of(app))
