"""Full states of a run: saved every so often, and the rollouts dropped that none needs any more."""

from __future__ import annotations

from pathlib import Path

from learner_jax.checkpoint import StateInfo, save_state, state_steps
from learner_jax.learner_run import LearnerRun
from learner_jax.saver import Finish, Saver
from learner_jax.start import Start
from learner_jax.step import TrainState
from learner_jax.versions import VersionWriter
from runspec.core.run_files import numbered, state_folder, step_folder
from verify.formats.batch import FILE_NAME as BATCH_FILE


class StateWriter:
    """Writes checkpoints/state/step_<N>, in the background.

    Args:
        run: whose states these are; `write` is collective over its processes.
        start: what the loop begins with.
        versions: knows whether the masters give the published bits.
        saver: writes.
    """

    def __init__(
        self, run: LearnerRun, start: Start, versions: VersionWriter, saver: Saver
    ) -> None:
        self._run, self._versions, self._saver = run, versions, saver
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
            seed=self._run.spec.seed,
            reference=self._reference,
            published=self._versions.published,
            fingerprint=self._run.fingerprint,
        )
        self._saver.run(f"the full state of step {step}", lambda: self._begin(info, state))

    def _begin(self, info: StateInfo, state: TrainState) -> Finish:
        spec = self._run.spec
        folder = state_folder(self._run.folder, spec)
        write = save_state(folder, info, state, keep=spec.checkpoints.keep)

        def finish() -> None:
            write()
            if self._run.peers.first:
                # A step trains rollouts leased up to `async_level` steps before it.
                passed = state_steps(folder)[0] - spec.algorithm.async_level
                _drop_rollouts(self._run.folder, passed)

        return finish


def _drop_rollouts(run_dir: Path, passed: int) -> None:
    """Drops the files of steps before `passed`, all but their batch manifests."""
    for old in numbered(run_dir / "rollouts", "step_"):
        if old < passed:
            for path in step_folder(run_dir, old).iterdir():
                if path.suffix in (".safetensors", ".json") and path.name != BATCH_FILE:
                    path.unlink(missing_ok=True)
