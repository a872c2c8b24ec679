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
from functools import partial
from pathlib import Path
from typing import Any

from learner_jax.compile_cache import CompileCounter
from learner_jax.distributed import LearnerRun, Peers, Word, mesh_devices
from learner_jax.execution import full_float32
from learner_jax.fingerprint import fingerprint
from learner_jax.full_states import StateWriter, find_start
from learner_jax.island_link import IslandLink
from learner_jax.islands.exchange import Stopped
from learner_jax.islands.island import Member, join
from learner_jax.metrics import Clock
from learner_jax.recipes import Said, Times, recipe_of
from learner_jax.saver import Saver
from learner_jax.sharding import make_mesh
from learner_jax.step import Programs, TrainState, build_programs
from learner_jax.versions import VersionWriter, build_probe
from runspec.core.errors import UserError
from runspec.core.models.config import CONFIG_NAME, ModelConfig, read_config
from runspec.core.models.family import parse_config
from runspec.core.process import not_retried
from runspec.core.run_files import initial_model
from runspec.core.spec.islands import island_spec
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec


def train(
    run_dir: Path,
    log: logging.Logger,
    stop: threading.Event,
    peers: Peers | None = None,
    link: IslandLink | None = None,
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

    Raises:
        UserError: no batch in time, an unreadable checkpoint, a damaged file: each named.
        RunStopped: too many updates were not finite, or a replay differs from what was published.
    """
    peers, compiled = peers or Peers(), CompileCounter()
    spec, config = _of_run(run_dir, peers)
    own = spec if link is None else island_spec(spec, link.name)

    full_float32(own.learner.compute_dtype)

    # The mesh, and where to go on.
    devices = mesh_devices(peers.count, own.learner.mesh.devices)
    mesh = make_mesh(own.learner.mesh, devices)
    programs = build_programs(own, config, mesh, island=link is not None)
    here = peers.json_from_first(lambda: fingerprint(own, mesh))
    run = LearnerRun(run_dir, spec, config, mesh, here, peers, log, link)
    with Saver(log) as saver, ExitStack() as joined:
        recipe = recipe_of(run, programs, stop)
        start = find_start(run, programs, recipe.reader, recipe.corpus)
        island = joined.enter_context(join(run, programs, recipe.corpus, stop))
        try:
            state, step = island.begin(start.state, start.step, start.beside)
        except Stopped:
            return
        base, trained, version = start.base, start.batch, island.version
        log.info(
            "version %d on %d devices, %d steps to go%s",
            *(version, mesh.size, spec.steps - step),
            ", compiling the step" if step < spec.steps else "",
        )

        # What is written and read.
        versions = VersionWriter(run, build_probe(own, config, mesh), saver)
        states = StateWriter(run, start, versions, saver)
        published = None
        if spec.publishes(version):
            bits = programs.publish(island.weights(state), base)
            published = versions.start(version, bits, start.published)
        if island.joined:
            states.write(step, state, batch=None, beside=island.arrays())
        if step < spec.steps:
            recipe.compile(state, start, published)
            log.info("%s", compiled)
        clock = Clock()
        while step < spec.steps:
            batch = result = None
            if not island.sits_out(step):
                try:
                    batch = recipe.next(step, clock.waited)
                except UserError:
                    if peers.agreed is Word.FAILED:  # what is saved now need not be trained again
                        states.write(step, state, batch=trained, beside=island.arrays())
                    raise
                if batch is None:
                    break
                result = recipe.train(state, batch, start, published)
                state = result.state
                clock.trained()
            try:
                state = island.end_step(
                    step, state, None if batch is None else recipe.weight(batch)
                )
            except Stopped:
                if not island.sent(step):
                    log.info("stopped in step %d, which will be trained again", step)
                    return
                step, trained = step + 1, batch.digest if batch else None
                break
            if link is not None:
                clock.waited("islands")
            step, trained = step + 1, batch.digest if batch else None
            if step == spec.steps:
                state = island.settle(state)
            if island.version > version:
                version = island.version
                weights = partial(_published, programs, island, state, base)
                if spec.publishes(version):
                    peers.each(saver.wait)
                    clock.waited("checkpoint")
                    published = versions.write(version, weights())
                recipe.measure(version, weights)
                clock.trained()
            if batch is not None:
                said = Said(versions.difference, island.last)
                recipe.record(batch, result, Times(*clock.take()), said)
            if step % spec.checkpoints.every == 0:
                states.write(step, state, batch=trained, beside=island.arrays())
            clock.trained()  # writing is work too: nobody was waited for
        # Also when told to end early.
        states.write(step, state, batch=trained, beside=island.arrays())
        peers.each(saver.wait)
    log.info("%s at version %d", "finished" if step == spec.steps else "stopped", version)


def _published(programs: Programs, island: Member, state: TrainState, base: Any | None) -> Any:
    """The bits of the newest version that is committed."""
    return programs.publish(island.weights(state), base)


def _of_run(run_dir: Path, peers: Peers) -> tuple[RunSpec, ModelConfig]:
    """The run's spec, and the config of its model as process 0 has it."""
    model_dir = initial_model(run_dir)
    config = peers.from_first(not_retried()(lambda: json.dumps(read_config(model_dir)).encode()))
    with not_retried():
        spec = load_resolved(run_dir)
        return spec, parse_config(json.loads(config), place=str(model_dir / CONFIG_NAME))
