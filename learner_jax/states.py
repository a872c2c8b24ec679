"""Full states of a run: saved every so often, and the rollouts dropped that none needs any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner_jax.checkpoint import StateInfo, save_state, state_steps
from learner_jax.distributed import Peers
from learner_jax.layout import numbered, state_folder
from learner_jax.saver import Finish, Saver
from learner_jax.start import Start
from learner_jax.step import TrainState
from learner_jax.versions import VersionWriter
from runspec.core.spec.schema import RunSpec
from verify.formats.batch import FILE_NAME as BATCH_FILE
from verify.formats.layout import step_folder


class StateWriter:
    """Writes checkpoints/state/step_<N>, in the background.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        start: what the loop begins with.
        fingerprint: of this program.
        versions: knows whether the masters give the published bits.
        peers: the processes; `write` is collective.
        saver: writes.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: RunSpec,
        start: Start,
        fingerprint: dict[str, Any],
        versions: VersionWriter,
        peers: Peers,
        saver: Saver,
    ) -> None:
        self._run_dir, self._spec, self._fingerprint = run_dir, spec, fingerprint
        self._versions = versions
        self._peers, self._saver = peers, saver
        self._reference, self._newest = start.model_digest, start.step

    def write(self, step: int, state: TrainState, *, batch: str | None) -> None:
        """Saves the state after `step` steps, unless it is saved already.

        Args:
            step: rollout steps trained.
            state: copied to the host before this returns.
            batch: digest of the batch manifest trained last.
        """
        if step == self._newest:
            return
        self._newest = step
        info = StateInfo(
            step=step,
            batch=batch,
            seed=self._spec.seed,
            reference=self._reference,
            published=self._versions.published,
            fingerprint=self._fingerprint,
        )
        self._saver.run(f"the full state of step {step}", lambda: self._begin(info, state))

    def _begin(self, info: StateInfo, state: TrainState) -> Finish:
        folder = state_folder(self._run_dir, self._spec)
        write = save_state(folder, info, state, keep=self._spec.checkpoints.keep)

        def finish() -> None:
            write()
            if self._peers.first:
                # A step trains rollouts leased up to `async_level` steps before it.
                passed = state_steps(folder)[0] - self._spec.algorithm.async_level
                _drop_rollouts(self._run_dir, passed)

        return finish


def _drop_rollouts(run_dir: Path, passed: int) -> None:
    """Drops the files of steps before `passed`, all but their batch manifests."""
    for old in numbered(run_dir / "rollouts", "step_"):
        if old < passed:
            for path in step_folder(run_dir, old).iterdir():
                if path.suffix in (".safetensors", ".json") and path.name != BATCH_FILE:
                    path.unlink(missing_ok=True)
