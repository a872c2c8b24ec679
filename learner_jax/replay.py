"""Trains steps of a run again, and compares the end with the full state that the run kept.

    python -m learner_jax replay RUN 20-30 | 25 | sample:3

The unit is an interval between two full states that are there. A replay reads what the learner
read (the spec, signed batch manifests, the rollouts or documents that they name) and begins at the
state before. Where the program is the one that trained (`versions.fingerprint`), every bit of the
state at the end has to come out again. Elsewhere sums round otherwise: then the update of each
tensor is compared with the replayed one, and nothing is decided.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from learner_jax import checkpoint
from learner_jax.distributed import Peers
from learner_jax.full_states import model_digest, start_at
from learner_jax.leaves import HostLeaves, LeafPath
from learner_jax.recipes import recipe_of
from learner_jax.train import ProgramsOf, open_run
from learner_jax.versions import FINGERPRINTS_FILE, MadeOn, differences
from runspec.core.errors import UserError
from runspec.core.run_files import corpus_cache, initial_model, state_folder, step_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import load_resolved
from verify.formats.batch import FILE_NAME as BATCH_FILE

_LINKED = ("keys", "initial", "rollouts", SPEC_FILE)
"""What the learner reads of a run directory."""


@dataclass(frozen=True)
class Replayed:
    """What came of an interval."""

    first: int
    last: int
    """Steps first .. last - 1 were trained again, from the full state of `first`."""
    exact: bool
    """Whether the bits of the state at the end have to be equal."""
    why: list[str]
    """Differences of the programs, where they need not."""
    differing: list[str]
    """Leaves of the state at the end that are not equal."""
    slope: tuple[float, float]
    """Least and largest <claimed, replayed> / |replayed|^2 of a tensor's update."""
    residual: float
    """Largest |claimed - slope replayed| / |replayed| of a tensor's update."""

    @property
    def refuted(self) -> bool:
        """Whether the run's learner did something else."""
        return self.exact and bool(self.differing)

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last - 1}"
        if not self.differing:
            return f"{steps}: equal, every bit of the state after them"
        count, low, high = len(self.differing), *self.slope
        numbers = (
            f"updates {low:.6f} to {high:.6f} of the replayed ones, beside {self.residual:.2g}"
        )
        if self.exact:
            some = ", ".join(self.differing[:3])
            return f"{steps}: NOT what the records give: {count} tensors differ ({some}); {numbers}"
        return f"{steps}: not decided, another program trained ({'; '.join(self.why)}); {numbers}"


def intervals(run_dir: Path, what: str) -> list[tuple[int, int]]:
    """Return the intervals that a command line names: pairs of kept full states.

    Args:
        run_dir: the run directory.
        what: `A-B`, every interval between; `STEP`, the one that trains it; `sample:K`, K drawn at
            random.

    Raises:
        UserError: it is none of these, or no two full states are around the steps.
    """
    spec = load_resolved(run_dir)
    if spec.learner.islands is not None:
        raise UserError("steps of islands are not replayed", place="learner.islands")
    kept = sorted({0, *checkpoint.state_steps(state_folder(run_dir, spec))})
    known = [each for each in pairwise(kept) if _records_are_there(run_dir, spec, *each)]
    kind, _, count = what.partition(":")
    with suppress(ValueError):
        if known and kind == "sample" and int(count) > 0:
            return sorted(random.SystemRandom().sample(known, min(int(count), len(known))))
        first, _, last = what.partition("-")
        begin, end = int(first), int(last or first)
        found = [(a, b) for a, b in known if a <= end and b > begin]
        if last:
            found = [(a, b) for a, b in known if begin <= a and b <= end]
        if found:
            return found
    raise UserError(
        f"{what!r} names no interval between the full states {', '.join(map(str, kept))} whose "
        "manifests and rollouts are there",
        place=str(run_dir),
        remedy="name STEP, A-B or sample:K; checkpoints.keep and storage.rollouts keep more",
    )


def _records_are_there(run_dir: Path, spec: RunSpec, first: int, last: int) -> bool:
    """Return whether an interval has its manifests, and its rollouts were not removed."""
    folders = [step_folder(run_dir, step) for step in range(first, last)]
    if not all((folder / BATCH_FILE).exists() for folder in folders):
        return False
    if spec.supervised is not None:
        return True
    # The first step trains rollouts that were leased in it, or up to `async_level` steps before.
    leased = range(max(0, first - spec.grpo.async_level), first + 1)
    return any(any(step_folder(run_dir, step).glob("*.safetensors")) for step in leased)


def replay(run_dir: Path, first: int, last: int, log: logging.Logger) -> Replayed:
    """Train an interval again. Nothing is written to the run directory.

    Args:
        run_dir: of a run that lives, has ended, or was copied.
        first: step of a full state, or 0.
        last: step of a later one; `intervals` gives such pairs.
        log: told of the program's progress.

    Raises:
        UserError: a state, a manifest or a rollout is missing, damaged or not signed.
    """
    spec = load_resolved(run_dir)
    states = state_folder(run_dir, spec)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        copy = _copy(run_dir, Path(folder) / "runs")
        run, programs = open_run(copy, Peers(), None, log)
        recipe = recipe_of(run, programs, threading.Event())
        assert recipe.reader is not None, "process 0 has one"
        begun = checkpoint.check_state(states, first) if first else None
        claimed = checkpoint.check_state(states, last)
        digest = model_digest(initial_model(run.folder))
        start = start_at(run, programs, states, begun, digest, recipe.corpus)
        state, leaves = start.state, HostLeaves(start.state.params)
        before = {path: np.array(leaves[path]) for path in leaves}
        programs_of, trained = ProgramsOf(run, programs), None
        scored = spec.supervised is None and spec.grpo.old_logprobs == "recompute"
        for step in range(first, last):
            recipe.programs = programs_of(step)
            batch = recipe.feed.next(step, lambda whom: None)
            assert batch is not None, "nobody tells this process to end"
            published = recipe.programs.publish(state.params, start.base) if scored else None
            state = recipe.train(state, batch, start, published).state
            trained = batch.digest
            log.info("step %d is trained again", step)
        if trained != claimed.batch:
            place = f"{states}/step_{last}"
            raise UserError("the full state names another batch manifest", place=place)
        made_on = MadeOn(run.folder / "checkpoints" / FINGERPRINTS_FILE, run.fingerprint, run.peers)
        exact = all(made_on.same(version) for version in range(first + 1, last + 1))
        theirs = checkpoint.load_state(states, last, programs.abstract_state)
        why = differences(claimed.fingerprint, run.fingerprint) or ["for some of the steps"]
        return Replayed(
            *(first, last, exact, [] if exact else why),
            _differing(theirs, state),
            *_compared(before, HostLeaves(theirs.params), HostLeaves(state.params)),
        )


def _copy(run_dir: Path, runs: Path) -> Path:
    """Make a folder with links to what the learner reads; its own lines go into the copy."""
    copy = runs / run_dir.resolve().name
    (copy / "checkpoints").mkdir(parents=True)
    for name in _LINKED:
        (copy / name).symlink_to((run_dir / name).resolve())
    made_on = run_dir / "checkpoints" / FINGERPRINTS_FILE
    if made_on.exists():
        shutil.copy(made_on, copy / "checkpoints")
    cache = corpus_cache(run_dir.resolve()).parent
    if cache.is_dir():
        corpus_cache(copy).parent.symlink_to(cache)
    return copy


def _differing(claimed: Any, replayed: Any) -> list[str]:
    """Return the names of the leaves of two training states that are not equal, bit for bit."""
    ours = jax.tree.leaves(replayed)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, leaf), other in zip(jax.tree.leaves_with_path(claimed), ours, strict=True)
        if np.asarray(leaf).tobytes() != np.asarray(other).tobytes()
    ]


def _compared(
    before: dict[LeafPath, np.ndarray], claimed: HostLeaves, replayed: HostLeaves
) -> tuple[tuple[float, float], float]:
    """Return the least and largest slope of the tensors' updates, and the largest residual."""
    slopes, residuals = [1.0], [0.0]
    for path, at in before.items():
        then, now = ((each[path] - at).astype(np.float64).ravel() for each in (claimed, replayed))
        if square := float(now @ now):
            slopes.append(float(then @ now) / square)
            residuals.append(float(np.linalg.norm(then - slopes[-1] * now)) / square**0.5)
    return (min(slopes), max(slopes)), max(residuals)


def replay_command(run_dir: Path, what: str, log: logging.Logger) -> None:
    """Replay intervals and print a line for each.

    Raises:
        UserError: as `intervals` and `replay`; or an interval is refuted.
    """
    found = [replay(run_dir, *each, log) for each in intervals(run_dir, what)]
    for each in found:
        print(each, flush=True)
    if refuted := [each for each in found if each.refuted]:
        raise UserError(
            f"{len(refuted)} of {len(found)} intervals are not what the signed records give",
            place=str(run_dir),
            remedy="the learner trained something else, or its files were changed",
        )
