"""The learner's loop: wait for a batch manifest, train it, write the next version. One run, flat.

`recipes` has what differs between kinds of runs. A restart begins at the newest full state and
trains the signed manifests since then again. The same rollouts, or documents, in the same order
give the same bits. So the history that survives has trained those of a manifest exactly once.

Over several processes each runs this loop on its share of the mesh. Process 0 alone reads batches
and weights, and writes records; what it learns that the others must know goes through `Peers`.

Of a run with islands each runs this loop on its share of every step. At a step's end `island` makes
the parameters those that all have agreed on; in a run with one learner it changes nothing.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from learner_jax.checkpoint import Saver
from learner_jax.compile_cache import CompileCounter
from learner_jax.distributed import IslandLink, LearnerRun, Peers, Word, mesh_devices
from learner_jax.full_states import Start, StateWriter, find_start
from learner_jax.islands.island import Alone, Island, join
from learner_jax.islands.state import Behind, Stopped
from learner_jax.metrics import Clock
from learner_jax.recipes import Recipe, recipe_of
from learner_jax.sharding import full_float32, make_mesh
from learner_jax.step import Programs, build_programs, compile_ahead
from learner_jax.versions import VersionWriter, build_probe, fingerprint
from runspec.core.errors import UserError
from runspec.core.http_server import serve_metrics
from runspec.core.models import CONFIG_NAME, read_config
from runspec.core.models.family import parse_config
from runspec.core.process import not_retried
from runspec.core.run_files import initial_model
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import island_spec


def train(
    run_dir: Path,
    log: logging.Logger,
    stop: threading.Event,
    peers: Peers | None = None,
    link: IslandLink | None = None,
    metrics: str | None = None,
) -> None:
    """Trains every step that is left; returns when the last is done or `stop` is set.

    Args:
        run_dir: the run directory, or the folder of an island elsewhere. A process other than 0
            reads only `spec.json` there, so it may have a folder of its own where `checkpoints.dir`
            is set.
        log: told of each step.
        stop: set when this process is told to end; all end then.
        peers: the processes of this program; None for one.
        link: which island of the run this program is; None for a run with one learner.
        metrics: where the figures are served, see `serve_metrics`.

    Raises:
        UserError: no batch in time, an unreadable checkpoint, a damaged file: each named.
        RunStopped: too many updates were not finite, or a replay differs from what was published.
    """
    peers = peers or Peers()
    run, programs = open_run(run_dir, peers, link, log)
    serve_metrics(metrics, run.rows, log)
    with Saver(log) as saver, ExitStack() as joined:
        recipe = recipe_of(run, programs, stop)
        start = find_start(run, programs, recipe.reader, recipe.corpus)
        island = joined.enter_context(join(run, programs, recipe.corpus, stop))
        try:
            loop = _Loop(run, programs, recipe, start, island, saver)
            while loop.step < run.spec.steps and loop.advance():
                pass
        except Stopped:
            log.info("stopped while it waited for other islands; this step is trained again")
            return
        loop.save()  # also when told to end early
        peers.each(saver.wait)
    done = loop.step == run.spec.steps
    log.info("%s at version %d", "finished" if done else "stopped", loop.version)


class ProgramsOf:
    """The programs of a step, by the settings that `changes` of the spec have for it."""

    def __init__(self, run: LearnerRun, programs: Programs) -> None:
        self._run, self._programs, self._changed = run, programs, 0

    def __call__(self, step: int) -> Programs:
        run = self._run
        changed = max((each.step for each in run.spec.changes if each.step <= step), default=0)
        if changed != self._changed:
            run.log.info("step %d is trained by the settings of step %d", step, changed)
            island, self._changed = run.link is not None, changed
            self._programs = build_programs(run.own, run.config, run.mesh, island=island, step=step)
        return self._programs


class _Loop:
    """The learner between two steps, and what makes one of them.

    Raises:
        Stopped: this process was told to end before it had the others' outer parameters.
    """

    def __init__(
        self,
        run: LearnerRun,
        programs: Programs,
        recipe: Recipe,
        start: Start,
        island: Island | Alone,
        saver: Saver,
    ) -> None:
        self._run, self._programs, self._recipe = run, programs, recipe
        self._start, self._island, self._saver = start, island, saver
        self._state, self.step = island.begin(start.state, start.step, start.beside)
        self.version = island.version
        """The newest version that is committed."""
        self._batch = None if island.joined else start.batch
        """Digest of the batch manifest trained last; None where others trained it."""
        self._programs_of = ProgramsOf(run, programs)
        self._take_settings()
        self._versions = VersionWriter(run, build_probe(run.own, run.config, run.mesh), saver)
        self._states = StateWriter(run, start, self._versions, saver)
        self._published = None
        """The version's bits, where something needs them."""
        left, compiled = run.spec.steps - self.step, CompileCounter()
        run.log.info(
            "version %d on %d devices, %d steps to go%s",
            *(self.version, run.mesh.size, left, ", compiling the step" if left else ""),
        )
        if run.spec.publishes(self.version):
            self._published = self._versions.start(self.version, self._weights(), start.published)
        if island.joined:  # so that another start goes on from here
            self._states.clear()
            self.save()
        if left:
            scored = start.reference if self._published is None else self._published
            compile_ahead(run.mesh, programs, self._state, scored, start.base)
            run.log.info("%s", compiled)
        self._clock = Clock()

    def advance(self) -> bool:
        """Train the next step; return whether to go on.

        Raises:
            Stopped: as the class; the step is trained again.
        """
        batch = result = weight = None
        self._take_settings()
        if not self._island.sits_out(self.step):
            try:
                batch = self._recipe.feed.next(self.step, self._clock.waited)
            except UserError:
                if self._run.peers.agreed is Word.FAILED:  # what is saved is not trained again
                    self.save()
                raise
            if batch is None:
                return False
            weight = self._recipe.weight(batch)
            if weight > 0.0 or self._run.link is None:  # a small step may leave an island nothing
                result = self._recipe.train(self._state, batch, self._start, self._published)
                self._state = result.state
            self._clock.trained()
        try:
            going_on = self._end_step(weight)
        except Behind as error:
            self._run.log.warning("this island joins anew: %s", error)
            self._join()
            return True
        self.step, self._batch = self.step + 1, batch and batch.digest
        if not going_on:
            return False
        if self._island.version > self.version:
            self.version = self._island.version
            self._publish()
        if result is not None:
            times = self._clock.take()
            if self._recipe.records is not None:
                self._recipe.records.write(
                    *(batch, result, *times),
                    replay_difference=self._versions.difference,
                    islands=self._island.last,
                    held_out_nll=self._recipe.held_out_nll,
                )
        if self.step % self._run.spec.checkpoints.every == 0:
            self.save()
        self._clock.trained()  # writing is work too: nobody was waited for
        return True

    def _take_settings(self) -> None:
        self._programs = self._recipe.programs = self._programs_of(self.step)

    def save(self) -> None:
        """Write the full state after `step` steps."""
        beside = self._island.arrays()
        self._states.write(self.step, self._state, batch=self._batch, beside=beside)

    def _join(self) -> None:
        """Go on from another island's outer state."""
        self._state, self.step = self._island.join(self._state)
        self.version, self._batch = self._island.version, None
        self._publish()
        self._states.clear()
        self.save()

    def _end_step(self, weight: float | None) -> bool:
        """Give the others this island's share; return whether to go on."""
        try:
            self._state = self._island.end_step(self.step, self._state, weight)
        except Stopped:
            if not self._island.sent(self.step):
                raise
            return False
        if self._run.link is not None:
            self._clock.waited("islands")
        return True

    def _publish(self) -> None:
        if self._run.spec.publishes(self.version):
            self._run.peers.each(self._saver.wait)
            self._clock.waited("checkpoint")
            self._published = self._versions.write(self.version, self._weights())
        self._recipe.measure(self.version, self._weights)
        self._clock.trained()

    def _weights(self) -> Any:
        """The bits of the newest version that is committed."""
        return self._programs.publish(self._island.weights(self._state), self._start.base)


def open_run(
    run_dir: Path, peers: Peers, link: IslandLink | None, log: logging.Logger
) -> tuple[LearnerRun, Programs]:
    """The run on its mesh, and its programs, not compiled yet."""
    model_dir = initial_model(run_dir)
    # The config is the one that process 0 has.
    data = peers.from_first(not_retried()(lambda: json.dumps(read_config(model_dir)).encode()))
    with not_retried():
        spec = load_resolved(run_dir)
        config = parse_config(json.loads(data), place=str(model_dir / CONFIG_NAME))
    own = spec if link is None else island_spec(spec, link.name)
    full_float32(own.learner.compute_dtype)
    mesh = make_mesh(own.learner.mesh, mesh_devices(peers.count, own.learner.mesh.devices))
    programs = build_programs(own, config, mesh, island=link is not None)
    here = peers.json_from_first(lambda: fingerprint(own, mesh))
    return LearnerRun(run_dir, spec, config, mesh, here, peers, log, link), programs
