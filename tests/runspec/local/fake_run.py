"""A supervised run of small roles, here or as `python -m tests.runspec.local.fake_run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from runspec.cli.apply import PlainView
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import evaluation_file
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.core.signed import SigningKey
from runspec.lint.check import check_spec
from runspec.local import endpoints
from runspec.local.apply import drive
from runspec.local.backend import StopSignals
from runspec.local.fleet import Outcome, RestartPolicy
from runspec.local.planning import make_plan
from runspec.local.prepare import prepare_run
from runspec.local.processes import PreparedRun, RoleSpec
from runspec.local.run_dir import run_directory
from runspec.local.state import RunState
from runspec.local.supervisor import Watcher
from tests.runspec.supervised import supervised_spec
from verify.formats.documents import Evaluated, Figure, sign_evaluation

ROOT = Path(__file__).resolve().parents[3]
TARGET_SHORT = ROOT / "specs" / "target_short.yaml"
SCRIPT = Path(__file__).with_name("role.py")


def small_spec(name: str = "small", steps: int = 5, *overrides: str) -> RunSpec:
    sets = [f"name={name}", f"steps={steps}", *overrides]
    return check_spec(SpecFiles(TARGET_SHORT, profile="laptop", overrides=sets)).require()


def island_run(*members: dict[str, object], **placement: object) -> RunSpec:
    """A run on documents with islands a and b, or with those that are named."""
    listed = list(members or ({"name": "a"}, {"name": "b"}))
    return supervised_spec(learner={"islands": {"members": listed}}, placement=placement)


FIGURES = {"mean": Figure(0.25, 0.2, 0.3), "length": Figure(20.0, None, None)}
FIGURES |= {"pass-4": Figure(0.5, 0.4, 0.6), "pass-2": Figure(0.4, 0.3, 0.5)}
ZERO = Evaluated("small", "held-out", 0, "a" * 64, FIGURES, 0, [], 1.7e9, 2.0, cpu_s=1.5)
"""A result of the evaluator."""


def store(run_dir: Path, *results: Evaluated) -> None:
    """Puts results where the evaluator does."""
    key = SigningKey.generate()
    for result in results:
        path = evaluation_file(run_dir, result.evaluation, result.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, sign_evaluation(result, key))


@contextmanager
def prepared(spec: RunSpec, runs_dir: Path) -> Iterator[PreparedRun]:
    """A run on ports that no run of another process of tests draws."""
    first = 12_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    plan = make_plan(spec, run_directory(spec, runs_dir))
    with patch.object(endpoints, "PORTS", range(first, first + 1000)), prepare_run(plan) as run:
        yield run


def role(behaviour: str, run_dir: Path, *arguments: str, name: str | None = None) -> RoleSpec:
    command = (sys.executable, str(SCRIPT), behaviour, str(run_dir), *arguments)
    return RoleSpec(
        name or behaviour,
        command,
        {"PYTHONPATH": str(ROOT)},
        policy=RestartPolicy(
            ends_run=behaviour in ("learner", "warm_start"),
            ends_when_sampled=behaviour == "worker",
            server=behaviour == "server",
        ),
    )


def usual_roles(run: PreparedRun) -> list[RoleSpec]:
    """A learner, a worker, and a server at the place of the coordinator."""
    host, port = run.endpoints.coordinator.removeprefix("http://").split(":")
    server = role("server", run.directory, f"{host}:{port}")
    return [
        replace(server, listen=(host, int(port))),
        role("learner", run.directory),
        role("worker", run.directory),
    ]


def drive_roles(
    run: PreparedRun,
    roles: Sequence[RoleSpec],
    watcher: Watcher,
    stop_requests=lambda: 0,
    stages: Sequence[RoleSpec] = (),
) -> Outcome:
    with closing(RunState(run.directory)) as state:
        return drive(run, stages, lambda run: roles, state, watcher, stop_requests)


def main(runs_dir: Path, steps: int, *extra: str) -> int:
    spec = small_spec(steps=steps)
    with prepared(spec, runs_dir) as run, StopSignals() as requests:
        roles = usual_roles(run) + [role(behaviour, run.directory) for behaviour in extra]
        drive_roles(run, roles, PlainView(spec.steps, sys.stdout), requests)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
