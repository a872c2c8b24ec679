"""Trains steps of a run again, and compares the end with the full state that the run kept.

    python -m learner_jax replay RUN 20-30 | 25 | sample:3 [--json]

The unit is an interval between two full states that are there. A replay reads what the learner
read (the spec, signed batch manifests, the rollouts or documents that they name) and begins at the
state before. Where the program is the one that trained (`versions.fingerprint`), every bit of the
state at the end has to come out again, and of each policy version that was published on the way.

Elsewhere sums round otherwise. How far that leads is measured on the same steps: they are trained
a second time with other microbatches, so that sums are taken in another order. The change
that is claimed of a parameter may be `WITHIN` times as far from the replayed one as that took any
parameter; the same holds of moments and counters.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from bridge.tensors import tree_digests
from broadcast.manifest import MAX_BYTES, open_manifest
from learner_jax import checkpoint
from learner_jax.distributed import LearnerRun, Peers
from learner_jax.full_states import check_run, model_digest, start_at
from learner_jax.leaves import HostLeaves
from learner_jax.recipes import recipe_of
from learner_jax.step import TrainState
from learner_jax.train import ProgramsOf, open_run
from learner_jax.versions import MadeOn, differences
from runspec.core import run_files
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.run_files import corpus_cache, initial_model, state_folder, step_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import dump_resolved, load_resolved
from runspec.core.signed import BadSignature
from verify.audit.replay import choose
from verify.formats.batch import FILE_NAME as BATCH_FILE

_LINKED = ("keys", "initial", "rollouts")
"""What the learner reads of a run directory."""


WITHIN = 10.0
"""Honest updates of unlike programs were up to four times as far away (docs/audit.md)."""

Outcome = Literal["equal", "consistent", "refuted"]


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
    """Leaves of the state at the end, and tensors of versions, that are not equal; of an unlike
    program the tensors whose updates are too far away."""
    slope: float
    """<claimed, replayed> / |replayed|^2 of the update of all tensors."""
    far: float
    """Largest |claimed - replayed| / |replayed| of a tensor's update."""
    noise: float = 0.0
    """The same between the two replays, where there are two."""

    @property
    def outcome(self) -> Outcome:
        """`refuted` where the run's learner did something else."""
        if self.differing:
            return "refuted"
        return "equal" if self.exact else "consistent"

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last - 1}"
        if self.outcome == "equal":
            return f"{steps}: equal, every bit of the state after them"
        numbers = f"slope of the update {self.slope:.6f}, a tensor's up to {self.far:.2g} away"
        if not self.exact:
            numbers += f" ({self.noise:.2g} between two replays; {'; '.join(self.why)})"
        if self.outcome == "consistent":
            return f"{steps}: consistent, another program trained; {numbers}"
        count, some = len(self.differing), ", ".join(self.differing[:3])
        return f"{steps}: NOT what the records give: {count} tensors differ ({some}); {numbers}"


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
    remedy = "name STEP, A-B or sample:K; checkpoints.keep and storage.rollouts keep more"
    return choose(what, known, kept, str(run_dir), remedy)


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
    again = _train(run_dir, spec, first, last, log)
    if again.exact:
        differing = [*again.published, *_differing(again.claimed, again.state)]
        slope, far = _compared(again.before, again.claimed, again.state)
        furthest = max(each for name, each in far.items() if _kind_of(name) == "params")
        return Replayed(first, last, True, [], differing, slope, furthest)
    log.info(
        "another program trained: once more with other microbatches, to see what rounding does"
    )
    second = _train(run_dir, _other_sums(spec), first, last, log)
    slope, far = _compared(again.before, again.claimed, again.state)
    _, noise = _compared(again.before, second.state, again.state)
    # By chance a leaf's own noise may be tiny; that of moments is not that of parameters.
    most = {
        kind: max(noise[n] for n in noise if _kind_of(n) == kind) for kind in map(_kind_of, noise)
    }
    differing = [n for n, each in far.items() if not each <= WITHIN * most[_kind_of(n)]]  # or NaN
    ours = {n: each for n, each in far.items() if _kind_of(n) == "params"}
    return Replayed(
        *(first, last, False, again.why, differing, slope),
        *(max(ours.values()), most["params"]),
    )


def _kind_of(leaf: str) -> str:
    """Return the part of a training state that a leaf is in: `params`, `optimizer`, a counter."""
    return leaf.partition("/")[0]


@dataclass(frozen=True)
class _Trained:
    """Steps that were trained again."""

    before: dict[str, np.ndarray]
    """The leaves of the state before the first."""
    state: TrainState
    claimed: TrainState
    """The run's own after the last."""
    exact: bool
    why: list[str]
    published: list[str]
    """Tensors of policy versions that were published with other bits."""


def _other_sums(spec: RunSpec) -> RunSpec:
    """Return a spec by which the same numbers are added up in another order."""
    learner, packing = spec.learner, spec.learner.packing
    halves = packing.rows % (2 * learner.mesh.data * learner.mesh.fsdp) == 0
    rows = packing.rows // 2 if halves else packing.rows * 2
    packing = packing.model_copy(update={"rows": rows})
    return spec.model_copy(update={"learner": learner.model_copy(update={"packing": packing})})


def _train(run_dir: Path, spec: RunSpec, first: int, last: int, log: logging.Logger) -> _Trained:
    """Train an interval again, by a spec that may have other microbatches than the run's."""
    states = state_folder(run_dir, spec)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        copy = _copy(run_dir, spec, Path(folder) / "runs")
        run, programs = open_run(copy, Peers(), None, log)
        recipe = recipe_of(run, programs, threading.Event())
        assert recipe.reader is not None, "process 0 has one"
        begun = checkpoint.check_state(states, first) if first else None
        claimed = checkpoint.check_state(states, last)
        digest = model_digest(initial_model(run.folder))
        for info in (begun, claimed):
            if info is not None:
                check_run(info, spec, digest, recipe.corpus, states)
        start = start_at(run, programs, states, begun, digest, recipe.corpus)
        state = start.state
        before = {name: np.array(leaf) for name, leaf in _leaves(state).items()}
        programs_of, trained, published = ProgramsOf(run, programs), None, list[str]()
        lines = run.folder / "checkpoints" / run_files.FINGERPRINTS_FILE
        made_on = MadeOn(lines, run.fingerprint, run.peers)
        scored = spec.supervised is None and spec.grpo.old_logprobs == "recompute"
        bits = programs.publish(state.params, start.base) if scored else None
        for step in range(first, last):
            recipe.programs = programs_of(step)
            batch = recipe.feed.next(step, lambda whom: None)
            assert batch is not None, "nobody tells this process to end"
            state = recipe.train(state, batch, start, bits).state
            trained, signed = batch.digest, run_files.published_manifest(run_dir, step + 1)
            if scored or signed.exists():
                bits = recipe.programs.publish(state.params, start.base)
            if signed.exists() and made_on.same(step + 1):
                published += _other_tensors(signed, bits, run, recipe.reader.roles.publisher)
            log.info("step %d is trained again", step)
        if trained != claimed.batch:
            place = f"{states}/step_{last}"
            raise UserError("the full state names another batch manifest", place=place)
        theirs = checkpoint.load_state(states, last, programs.abstract_state)
        exact = all(made_on.same(version) for version in range(first + 1, last + 1))
        why = differences(claimed.fingerprint, run.fingerprint) or ["for some of the steps"]
        return _Trained(before, state, theirs, exact, why, published)


def _copy(run_dir: Path, spec: RunSpec, runs: Path) -> Path:
    """Make a folder with links to what the learner reads; its own lines go into the copy."""
    copy = runs / run_dir.resolve().name
    (copy / "checkpoints").mkdir(parents=True)
    for name in _LINKED:
        (copy / name).symlink_to((run_dir / name).resolve())
    (copy / SPEC_FILE).write_bytes(dump_resolved(spec))
    made_on = run_dir / "checkpoints" / run_files.FINGERPRINTS_FILE
    if made_on.exists():
        shutil.copy(made_on, copy / "checkpoints")
    cache = corpus_cache(run_dir.resolve()).parent
    if cache.is_dir():
        corpus_cache(copy).parent.symlink_to(cache)
    return copy


def _other_tensors(
    signed: Path, bits: Any, run: LearnerRun, publishers: frozenset[str]
) -> list[str]:
    """Return the tensors of a policy version that were published with other bits than `bits`.

    Raises:
        UserError: its manifest is not one that the publisher signed.
    """
    try:
        data = read_bounded(signed, MAX_BYTES)
        manifest = open_manifest(data, run=run.spec.name, publishers=publishers)
    except BadSignature as error:
        raise UserError(str(error), place=str(signed), remedy="it proves nothing") from error
    ours = tree_digests(HostLeaves(bits), run.config, run.spec.broadcast.dtype)
    wrong = [n for n, digest in ours.items() if manifest.tensors.get(n, {}).get("blake3") != digest]
    return [f"{name} of version {manifest.version}" for name in wrong]


def _leaves(state: TrainState) -> dict[str, Any]:
    """Return the leaves of a training state by name: parameters, moments, counters."""
    found = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def _differing(claimed: TrainState, replayed: TrainState) -> list[str]:
    """Return the names of the leaves of two training states that are not equal, bit for bit."""
    ours = _leaves(replayed)
    return [
        name
        for name, leaf in _leaves(claimed).items()
        if np.asarray(leaf).tobytes() != np.asarray(ours[name]).tobytes()
    ]


def _compared(
    before: dict[str, np.ndarray], claimed: TrainState, replayed: TrainState
) -> tuple[float, dict[str, float]]:
    """Return the slope of the parameters' update, and how far each leaf's change is from the
    replayed one."""
    claims, replays, far = _leaves(claimed), _leaves(replayed), dict[str, float]()
    inner = whole = 0.0
    for name, at in before.items():
        started = at.astype(np.float64).ravel()
        then, now = (
            np.asarray(each[name], np.float64).ravel() - started for each in (claims, replays)
        )
        square, apart = float(now @ now), float(np.linalg.norm(then - now))
        far[name] = apart / square**0.5 if square else (0.0 if apart == 0.0 else math.inf)
        if _kind_of(name) == "params":
            inner, whole = inner + float(then @ now), whole + square
    return inner / whole if whole else 1.0, far


def replay_command(run_dir: Path, what: str, log: logging.Logger, *, as_json: bool) -> None:
    """Replay intervals and print a line for each, or a JSON object {outcome, line}.

    Raises:
        UserError: as `intervals` and `replay`; or an interval is refuted.
    """
    found = [replay(run_dir, *each, log) for each in intervals(run_dir, what)]
    for each in found:
        said = {"outcome": each.outcome, "line": str(each)}
        print(json.dumps(said) if as_json else str(each), flush=True)
    if refuted := [each for each in found if each.outcome == "refuted"]:
        raise UserError(
            f"{len(refuted)} of {len(found)} intervals are not what the signed records give",
            place=str(run_dir),
            remedy="the learner trained something else, or its files were changed",
        )
