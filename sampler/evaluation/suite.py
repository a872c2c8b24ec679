"""`python -m sampler suite`: evaluates a directory of weights, without a run around it."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.process import stop_event
from runspec.core.spec.evaluations import evaluator_pool
from runspec.core.spec.resolved import MAX_BYTES, parse_resolved
from runspec.core.spec.schema import RunSpec

NAME = "suite"


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `python -m sampler`."""
    parser = commands.add_parser(NAME, help="evaluate a directory of weights")
    parser.set_defaults(call=run)
    parser.add_argument("spec", metavar="SPEC.json", type=Path, help="a resolved spec")
    parser.add_argument("weights", metavar="WEIGHTS", type=Path, help="a Hugging Face directory")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="gets the result")
    parser.add_argument("--evaluation", action="append", required=True, metavar="NAME")
    parser.add_argument("--overlap", action="store_true", help="name problems that are trained on")


def run(options: argparse.Namespace) -> int:
    """Evaluate; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        found = evaluate(options, logging.getLogger(NAME), stop_event())
        write_atomic(options.out, json.dumps(found, indent=1).encode() + b"\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def evaluate(
    options: argparse.Namespace, log: logging.Logger, stop: threading.Event
) -> dict[str, Any]:
    """Return the results by evaluation: figures, problems and, where asked for, overlaps.

    Raises:
        UserError: the weights, the problems or this machine cannot be used, or it was stopped.
    """
    # Imported here: they take seconds, and `python -m sampler --help` has no use for them.
    from sampler.engine.engine import Engine
    from sampler.evaluation.ask import Questions, ask, overlaps, summary
    from sampler.tasks.task_set import build_evaluation_set

    spec = parse_resolved(read_bounded(options.spec, MAX_BYTES), place=str(options.spec))
    chosen = [each for each in spec.evaluations if each.name in options.evaluation]
    found: dict[str, Any] = {}
    with closing(Engine(evaluator_pool(spec), probe=False)) as engine:
        engine.load(options.weights, 0)
        for evaluation in chosen:
            began, name = time.monotonic(), evaluation.name
            with closing(build_evaluation_set(spec, evaluation, options.weights)) as tasks:
                questions = Questions.of(spec, evaluation, tasks)
                total = questions.count
                log.info("%s: %d problems, %d answers each", name, total, evaluation.samples)
                results = ask(questions, engine, stop, log, name)
                if results is None:
                    raise UserError("stopped before all problems were answered", place=name)
                figures, _, faults = summary(results)
                found[name] = {
                    "figures": {k: [f.value, f.low, f.high] for k, f in figures.items()},
                    "unanswered": questions.unanswered,
                    "faults": faults,
                    "wall_s": round(time.monotonic() - began, 3),
                    "problems": [asdict(each) for each in results],
                }
                if options.overlap:
                    asked, trained = _texts(tasks, total), _trained(spec, options.weights)
                    found[name]["overlap"] = [asdict(one) for one in overlaps(asked, trained)]
    return found


def _texts(tasks: Any, count: int) -> Iterator[tuple[str, str]]:
    for index in range(count):
        problem = tasks.problem(index)
        yield problem.problem_id, problem.prompt


def _trained(spec: RunSpec, tokenizer_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield id and text of all problems that the run trains on."""
    from sampler.tasks.prompts import PromptCodec
    from sampler.tasks.task_set import Problems, problem_filter

    if any(source.train for source in spec.data.sources):
        codec = PromptCodec.read(tokenizer_dir, spec.data)
        problems = Problems(spec, problem_filter(spec, codec, "train"))
        yield from _texts(problems, len(problems))
