"""Declares the commands that look at runs and models: dashboard, evaluate, serve, chat, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runspec.cli.output import RUN, RUNS, Json, Overrides, RunsDir

app = typer.Typer()


@app.command(rich_help_panel=RUN)
def dashboard(
    runs: Annotated[
        list[str],
        typer.Argument(help="NAME, or the coordinator's URL; several lie over each other."),
    ],
    listen: Annotated[
        str, typer.Option("--listen", help="HOST:PORT; beyond this machine the page has a token.")
    ] = "127.0.0.1:8765",
    to_file: Annotated[
        Path | None, typer.Option("--export", help="Writes the page with its data to a file.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="The coordinator's key, for a URL.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Opens it in a browser.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Shows a run in the browser: curves, roles, who waits for whom, and every rollout."""
    from runspec.cli.dashboard import dashboard_command

    raise typer.Exit(dashboard_command(runs, listen, to_file, key, runs_dir, browse=browse))


@app.command(rich_help_panel=RUN, context_settings={"allow_extra_args": True})
def evaluate(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME|FILE", help="Else the run's own evaluations."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Problems of a shipped suite.")
    ] = None,
    overrides: Overrides = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Names problems that the run trains on.")
    ] = False,
    tool: Annotated[
        str | None,
        typer.Option("--with", metavar="TOOL", help="inspect-ai, lm-eval or verifiers."),
    ] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="Interpreter of the tool's environment.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="The tool's task; its options follow --.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new folder for the tool's files.")
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Evaluates a version of a run, or any model, on problems from files or by another tool."""
    from runspec.cli.evaluate import evaluate_command, evaluate_with_command
    from runspec.core.errors import BadUsage

    theirs = {"--python": python, "--task": task, "--out": out, "options after --": context.args}
    ours = {"--suite": suite, "--data": data, "--set": overrides, "--overlap": overlap}
    others = theirs if tool is None else ours
    if wrong := [name for name, value in others.items() if value]:
        how = "without --with" if tool is None else "beside --with"
        raise BadUsage(f"{wrong[0]} {how}", remedy="see `runspec evaluate --help`")
    if tool is None:
        code = evaluate_command(
            what, suite, data, overrides or (), overlap=overlap, as_json=as_json, runs_dir=runs_dir
        )
    else:
        code = evaluate_with_command(
            what, tool, python, task, context.args, out, as_json=as_json, runs_dir=runs_dir
        )
    raise typer.Exit(code)


@app.command(
    rich_help_panel=RUN,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen at.")] = 8000,
    follow: Annotated[
        bool, typer.Option("--follow", help="Moves to each new version of the run.")
    ] = False,
    hold: Annotated[
        float,
        typer.Option("--hold", min=0.1, help="Seconds that requests wait at most before a move."),
    ] = 60.0,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Serves a version by vLLM's OpenAI-compatible server; further options are vLLM's."""
    from runspec.cli.follow import follow_command
    from runspec.cli.serve import serve_command

    if follow:
        raise typer.Exit(follow_command(what, host, port, hold, context.args, runs_dir))
    raise typer.Exit(serve_command(what, host, port, context.args, runs_dir))


@app.command(rich_help_panel=RUN)
def chat(
    what: Annotated[str, typer.Argument(help="NAME, NAME@VERSION, or a Hugging Face directory.")],
    target: Annotated[
        int | None, typer.Option("--target", min=1, help="Tokens to think for.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", help="Another version, which answers too.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Talks to a version in the terminal."""
    from runspec.cli.chat import chat_command

    raise typer.Exit(chat_command(what, target, compare, max_tokens, runs_dir))


@app.command(rich_help_panel=RUN)
def export(
    run: Annotated[str, typer.Argument(help="NAME, or NAME@VERSION; else the newest.")],
    directory: Annotated[Path, typer.Argument(help="A new folder.")],
    runs_dir: RunsDir = RUNS,
) -> None:
    """Writes a published version as a Hugging Face directory with a model card."""
    from runspec.cli.lifecycle import export_command

    raise typer.Exit(export_command(run, directory, runs_dir))
