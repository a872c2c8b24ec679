"""Replays of a learner that lies, of honest ones, and of unlike programs: what is found, how often.

    python -m benchmarks.dishonest_learner [--each 50] [--steps 2000]

A run of the tests' two-layer model trains on random rollouts. A learner that lies trains two steps
otherwise, by a random amount, and writes the state that follows; then the product replays them.
Honest runs are replayed on meshes of 1, 2 and 8 devices, and by programs
that are not the one that trained. The chance to catch an operator is simulated beside its formula.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np

from learner_jax import checkpoint
from learner_jax import replay as product
from learner_jax.compile_cache import keep_compiled
from learner_jax.leaves import leaf_path
from learner_jax.recipes import recipe_of
from learner_jax.train import train
from runspec.core.run_files import state_folder
from runspec.core.schema.load import dump_resolved
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model

LOG = logging.getLogger("quiet")
LOG.setLevel(logging.ERROR)
LAST, EVERY = 40, 2
Alter = Callable[[Any, random.Random], Any]


def honest_run(folder: Path, *, steps: int, every: int, mesh: int) -> Run:
    """A trained run that keeps every full state."""
    learner = {**tiny_spec().learner.model_dump(), "mesh": {"fsdp": mesh}}
    learner["packing"] = {"tokens": 64, "rows": 8}
    kept = {"checkpoints": {"every": every, "keep": steps}, "storage": {"rollouts": steps}}
    run = Run(folder / "runs" / "run", tiny_spec(steps=steps, learner=learner, **kept))
    write_initial_model(run)
    for step in range(steps):
        run.add_step(step, version=max(0, step - 1))
    train(run.path, LOG, threading.Event())
    return run


def batch_with(batch: Any, change: Callable[[list[list[Any]]], None]) -> Any:
    groups = copy.deepcopy(batch.groups)
    change(groups)
    return replace(batch, groups=groups)


def skipped(batch: Any, draw: random.Random) -> Any:
    return batch_with(batch, lambda groups: groups.pop(draw.randrange(len(groups))))


def twice(batch: Any, draw: random.Random) -> Any:
    def change(groups: list[list[Any]]) -> None:
        one, other = draw.sample(range(len(groups)), 2)
        groups[one] = groups[other]

    return batch_with(batch, change)


def poisoned(batch: Any, draw: random.Random) -> Any:
    def change(groups: list[list[Any]]) -> None:
        group = draw.choice(groups)
        number = draw.randrange(len(group))
        tokens = group[number].output_tokens.copy()
        tokens[draw.randrange(len(tokens))] ^= 1
        group[number] = replace(group[number], output_tokens=tokens)

    return batch_with(batch, change)


def other_advantages(batch: Any, draw: random.Random) -> Any:
    by = 1 + draw.uniform(1e-3, 1e-1)

    def change(groups: list[list[Any]]) -> None:
        number = draw.randrange(len(groups))
        groups[number] = [replace(r, advantage=r.advantage * by) for r in groups[number]]

    return batch_with(batch, change)


BATCHES: dict[str, Alter] = {
    "group skipped": skipped,
    "group trained twice, in place of another": twice,
    "one token of one rollout": poisoned,
    "advantages of a group, 0.1 to 10 %": other_advantages,
}


def scaled(state: Any, before: dict[str, np.ndarray], draw: random.Random) -> Any:
    by = 1 + draw.uniform(1e-3, 1e-1)

    def move(path: Any, now: Any) -> Any:
        then = before["/".join(("params", *leaf_path(path)))]
        return (then + (now - then) * by).astype(now.dtype)

    return replace(state, params=jax.tree.map_with_path(move, state.params))


def nudged(state: Any, before: dict[str, np.ndarray], draw: random.Random) -> Any:
    """One bit of one weight."""
    leaves, tree = jax.tree.flatten(state.params)
    number = draw.randrange(len(leaves))
    leaf = np.array(leaves[number])
    flat = leaf.reshape(-1)
    at = draw.randrange(flat.size)
    flat[at] = np.nextafter(flat[at], np.float32(np.inf))
    leaves[number] = leaf
    return replace(state, params=jax.tree.unflatten(tree, leaves))


def moments(state: Any, before: dict[str, np.ndarray], draw: random.Random) -> Any:
    by = 1 + draw.uniform(1e-3, 1e-1)
    bent = lambda leaf: (leaf * by).astype(leaf.dtype) if leaf.ndim else leaf  # noqa: E731
    return replace(state, optimizer=jax.tree.map(bent, state.optimizer))


STATES: dict[str, Callable[[Any, Any, random.Random], Any]] = {
    "update scaled by 0.1 to 10 %": scaled,
    "one bit of one weight": nudged,
    "moments scaled by 0.1 to 10 %": moments,
}


@contextmanager
def altering(alter: Alter, draw: random.Random) -> Iterator[None]:
    """Within it, what trains alters the batch of one step."""
    made = recipe_of

    def dishonest(run: Any, programs: Any, stop: Any) -> Any:
        recipe = made(run, programs, stop)
        honest, at = recipe.train, draw.randrange(EVERY)
        steps = iter(range(EVERY))

        def lie(state: Any, batch: Any, start: Any, published: Any) -> Any:
            batch = alter(batch, draw) if next(steps) == at else batch
            return honest(state, batch, start, published)

        recipe.train = lie
        return recipe

    product.recipe_of = dishonest
    try:
        yield
    finally:
        product.recipe_of = made


def lie_about(run: Run, folder: Path, name: str, draw: random.Random) -> str:
    """Plant an alteration in an interval, and return the outcome of its replay."""
    first = draw.randrange(0, LAST, EVERY)
    spec, last = run.spec, first + EVERY
    if name == "rate, 1 %":
        off = draw.choice((0.99, 1.01)) * spec.optimizer.lr
        spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": off})})
    if name in BATCHES:
        with altering(BATCHES[name], draw):
            state = product._train(run.path, spec, first, last, LOG).state
    elif name == "state of another interval":
        other = draw.choice([n for n in range(EVERY, LAST + 1, EVERY) if n != last])
        state = product._train(run.path, spec, other - EVERY, other, LOG).state
    else:
        trained = product._train(run.path, spec, first, last, LOG)
        state = trained.state
        if name in STATES:
            state = STATES[name](state, trained.before, draw)
    copied = folder / "lie" / "run"
    shutil.copytree(run.path, copied, symlinks=True)
    states = state_folder(copied, run.spec)
    info = checkpoint.check_state(states, last)
    shutil.rmtree(states / f"step_{last}")
    checkpoint.save_state(states, info, state, keep=LAST)()
    try:
        return product.replay(copied, first, last, LOG).outcome
    finally:
        shutil.rmtree(copied)


def caught(share: float, watchers: int, draws: int, intervals: int = 1000) -> float:
    """The chance that one of the watchers, who draw at random, draws an altered interval."""
    altered = round(share * intervals)
    missed = 1.0
    for number in range(draws):
        missed *= (intervals - altered - number) / (intervals - number)
    return 1 - missed**watchers


def simulated(share: float, watchers: int, draws: int, tries: int, intervals: int = 1000) -> float:
    draw, altered, found = random.Random(0), round(share * intervals), 0
    for _ in range(tries):
        drawn = (n for _ in range(watchers) for n in draw.sample(range(intervals), draws))
        found += any(number < altered for number in drawn)
    return found / tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=50, help="lies of each kind")
    parser.add_argument("--steps", type=int, default=2000, help="honest steps, over three meshes")
    options = parser.parse_args()
    keep_compiled(Path.home() / ".cache" / "runspec" / "compiled")
    for share, watchers, draws in ((0.01, 1, 100), (0.01, 3, 100), (0.001, 10, 100), (0.1, 1, 20)):
        formula, seen = caught(share, watchers, draws), simulated(share, watchers, draws, 4000)
        print(f"share {share}, {watchers} x {draws} of 1000: {formula:.3f}, simulated {seen:.3f}")
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.monotonic()
        run = honest_run(folder / "lies", steps=LAST, every=EVERY, mesh=2)
        kinds = [*BATCHES, *STATES, "rate, 1 %", "state of another interval"]
        for kind in kinds if options.each else ():
            draw = random.Random(kind)
            outcomes = [lie_about(run, folder, kind, draw) for _ in range(options.each)]
            print(f"{kind}: {outcomes.count('refuted')} of {len(outcomes)} refuted", flush=True)
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
        each = -(-options.steps // 3 // 20) * 20
        for mesh in (1, 2, 8):
            run = honest_run(folder / f"mesh{mesh}", steps=each, every=20, mesh=mesh)
            found = [product.replay(run.path, n, n + 20, LOG) for n in range(0, each, 20)]
            equal = sum(each.outcome == "equal" for each in found)
            print(f"mesh of {mesh}: {20 * equal} of {20 * len(found)} steps equal", flush=True)
            other = 2 if mesh == 1 else 1
            learner = {**run.spec.learner.model_dump(), "mesh": {"fsdp": other}}
            changed = run.spec.model_validate(
                {**json.loads(dump_resolved(run.spec)), "learner": learner}
            )
            (run.path / "spec.json").write_bytes(dump_resolved(changed))
            found = [product.replay(run.path, n, n + 20, LOG) for n in range(0, each, 20)]
            outcomes = [each.outcome for each in found]
            worst = max(each.far / each.noise for each in found)
            print(
                f"trained on {mesh}, replayed on {other}: {outcomes.count('consistent')} of "
                f"{len(outcomes)} intervals consistent, at most {worst:.2f} of the noise",
                flush=True,
            )


if __name__ == "__main__":
    main()
