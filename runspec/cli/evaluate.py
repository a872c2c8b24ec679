"""`runspec evaluate`: a run's version, or any Hugging Face directory, on a suite of problems.

A suite is a YAML file with the spec's own blocks: `data.sources` with `train: false`, the terms of
`reward` that grade them, and `evaluations`. It goes over the run's spec, or over a bare one for a
directory that no run made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from runspec.cli.evaluate_with import results_with
from runspec.cli.lifecycle import run_and_version
from runspec.cli.serve import bare_pool
from runspec.cli.shipped_suites import named_suite
from runspec.cli.spec_files import located
from runspec.cli.view import plain_table
from runspec.core.errors import UserError, one_line
from runspec.core.models.family import load_config
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.core.spec.resolved import dump_resolved, load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.lint.registry import Context
from runspec.lint.rules.evaluations import evaluation_names
from runspec.local.backend import EXIT_INTERRUPTED
from runspec.local.formatting import number
from runspec.local.machine import vllm_environment
from runspec.local.model_folders import published_version
from runspec.local.run_dir import find_run


def evaluate_command(
    what: str,
    suite: str | None,
    data: Path | None,
    overrides: Sequence[str],
    *,
    overlap: bool,
    as_json: bool,
    runs_dir: Path,
) -> int:
    """Evaluate and print the figures; return 0.

    Args:
        what: NAME, NAME@VERSION, or a Hugging Face directory.
        suite: name of a shipped suite, or a file; None: the run's own evaluations.
        data: the problems of a shipped suite.
        overrides: `path=value` each, over the suite.
        overlap: whether problems that the run trains on are named.
        as_json: whether the whole result is printed, as JSON.
        runs_dir: folder of runs.

    Raises:
        UserError: the weights are missing or damaged, or the suite has errors.
    """
    with tempfile.TemporaryDirectory(prefix="runspec-evaluate-") as folder:
        weights, base = _weights_and_base(what, runs_dir)
        own = {each["name"] for each in base.get("evaluations", ())}
        file: Path | None = None
        if suite is not None:
            file, more = named_suite(suite, data, Path(folder))
            overrides = [*more, *overrides]
        elif not own:
            raise UserError("no evaluation", place=what, remedy="name a suite with --suite")
        spec = suite_spec(base, file, overrides, Path(folder))
        names = [each.name for each in spec.evaluations if suite is None or each.name not in own]
        if not names:
            raise UserError("no evaluation", place=suite or what, remedy="give it `evaluations`")
        found = _evaluated(spec, weights, names, Path(folder), overlap=overlap)
    _print(found, as_json=as_json)
    return 0


def evaluate_with_command(
    what: str,
    tool: str,
    python: Path | None,
    task: str | None,
    more: Sequence[str],
    out: Path | None,
    *,
    as_json: bool,
    runs_dir: Path,
) -> int:
    """Evaluate by another project's tool and print its figures; return the exit code.

    The arguments and errors are those of `results_with`.
    """
    found = results_with(what, tool, python, task, more, out, runs_dir)
    if found is None:
        return EXIT_INTERRUPTED
    _print(found, as_json=as_json)
    return 0


def _weights_and_base(what: str, runs_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the weights, and the spec that a suite goes over."""
    weights = Path(what).absolute()
    if (weights / "config.json").is_file():
        return weights, bare_spec(weights, load_config(weights).max_position_embeddings)
    from bridge.published import require_published  # draws numpy

    name, version = run_and_version(what)
    run_dir = find_run(name, runs_dir)
    spec = load_resolved(run_dir)
    found = published_version(run_dir, spec, version)
    require_published(found.folder, found.manifest)
    return found.folder, spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def bare_spec(weights: Path, length: int) -> dict[str, Any]:
    """Return what a spec must have besides a suite, for weights of so many positions."""
    pool = bare_pool(length)
    return {
        "version": "runspec/v1",
        "name": "evaluated",
        "seed": 1,
        "steps": 1,
        "model": {"hf": str(weights), "max_context": length},
        "data": {"max_prompt_tokens": length - pool.max_new_tokens},
        "optimizer": {"lr": 1.0},
        "learner": {"hardware": {"kind": "cpu"}, "packing": {"tokens": length, "rows": 1}},
        "samplers": [pool.model_dump(mode="json", exclude_none=True)],
    }


def suite_spec(
    base: Mapping[str, Any], suite: Path | None, overrides: Sequence[str], folder: Path
) -> RunSpec:
    """Return the spec of base and suite; relative files of a suite lie beside it.

    Raises:
        UserError: it has errors.
    """
    layers, top = [folder / "base.yaml"], folder / "evaluated.yaml"
    layers[0].write_text(json.dumps(base))  # JSON is YAML
    layers += [suite.absolute()] if suite is not None else []
    top.write_text(json.dumps({"extends": [str(layer) for layer in layers]}))
    files = SpecFiles(top, overrides=overrides)
    spec = load_layers(files).require()
    for violation in evaluation_names(Context(spec, files)):
        raise UserError(
            violation.message,
            place=f"{suite or 'the run'}: {'.'.join(map(str, violation.location))}",
            remedy=violation.suggestion,
        )
    return spec if suite is None else located(spec, suite.absolute().parent)


def _evaluated(
    spec: RunSpec, weights: Path, names: Sequence[str], folder: Path, *, overlap: bool
) -> dict[str, Any]:
    resolved, out = folder / "spec.json", folder / "result.json"
    resolved.write_bytes(dump_resolved(spec))
    command = [sys.executable, "-m", "sampler", "suite", str(resolved), str(weights)]
    command += ["--out", str(out), *(word for name in names for word in ("--evaluation", name))]
    pool = evaluator_pool(spec)
    environment = vllm_environment(
        (), on_cpu=pool.hardware.kind == "cpu", tensor=pool.parallel.tensor
    )
    done = subprocess.run(
        [*command, *(["--overlap"] if overlap else [])],
        # The process ends without taking its engine apart, which multiprocessing would remark on.
        env={"PYTHONWARNINGS": "ignore:resource_tracker", **os.environ, **environment},
        check=False,
    )
    if done.returncode != 0 or not out.exists():
        raise UserError(
            f"the evaluation ended with exit code {done.returncode}",
            place=str(weights),
            remedy="the lines above say why",
        )
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def _print(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console(markup=False, highlight=False)
    for name, result in found.items():
        table = plain_table("figure", "mean", "95 % interval")
        for figure, (value, low, high) in result["figures"].items():
            between = "" if low is None else f"{number(low)} to {number(high)}"
            table.add_row(figure, number(value), between)
        count = result["count"] if "count" in result else len(result["problems"])
        print(f"{name}: {count} problems, {result['faults']} without a grade")
        if unanswered := result.get("unanswered"):
            print(f"  {unanswered} outputs have no answer in the form of data.thinking")
        console.print(table)
        for one in result.get("overlap", ()):
            how = "the same words as" if one["exact"] else "13 words in a row of"
            asked, trained = (one_line(one[name], 200) for name in ("problem_id", "trained"))
            print(f"  {asked} has {how} {trained}, which is trained on")
        if result.get("overlap") == []:
            print("  no problem overlaps the training problems")
