"""What an island remembers, and how it follows the commits: shares dropped, late, replayed."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bridge.tensors import FlatLayout, Kind, codec
from learner_jax.distributed import IslandLink, LearnerRun, Peers
from learner_jax.islands.exchange import Exchange, Settled
from learner_jax.islands.island import Island
from learner_jax.islands.state import Behind, OuterState, outer_update, weighted_mean
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.sharding import make_mesh
from learner_jax.step import Programs, TrainState, build_programs
from learner_jax.warm_start import model_config
from runspec.core.schema import Outer, RunSpec
from runspec.core.schema.role_names import island_spec
from tests.learner_jax.test_document_runs import document_spec
from verify.formats.batch import CommitRecord, Contribution, Dropped

pytestmark = pytest.mark.slow

NAMES, STEPS, DEADLINE_S = ("a", "b", "c"), 8, 600.0
WEIGHTS = {"a": 3.0, "b": 1.0, "c": 2.0}
Plan = Mapping[tuple[str, int], str]
"""For each island and step: `counts`; `late`, trained in vain; `away`, the record comes first."""


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@dataclass
class FakeCoordinator:
    """Commits the shares that a plan names, once all of them are offered."""

    plan: Plan
    size: int
    kind: Kind
    optimizer: Outer
    shares: dict[tuple[str, int], bytes] = field(default_factory=dict)
    bases: dict[int, str] = field(default_factory=dict)
    results: dict[int, str] = field(default_factory=dict)
    stored: dict[int, OuterState] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False
    """Whether every island has trained to the end: what starts now finds all records."""

    def contributors(self, step: int) -> list[str]:
        return [name for name in NAMES if self.plan[name, step] == "counts"]

    def record(self, step: int) -> CommitRecord | None:
        named = self.contributors(step)
        if any((name, step) not in self.shares for name in named):
            return None
        zero = "0" * 64
        return CommitRecord(
            *("run", step, self.bases[step], self.kind),
            [Contribution(n, "http://x:1", zero, zero, 1, WEIGHTS[n], 1.0) for n in named],
            [Dropped(name, "planned") for name in NAMES if name not in named],
            *(None, 1, zero),
        )

    def committed(self, step: int) -> CommitRecord:
        with self.changed:
            assert self.changed.wait_for(lambda: self.record(step), DEADLINE_S), f"step {step}"
            found = self.record(step)
        assert found is not None
        return found


@dataclass
class FakeExchange:
    """One island's exchange with a `FakeCoordinator`, without network and disk."""

    coordinator: FakeCoordinator
    island: str
    comes_late: bool = False
    behind: set[int] = field(default_factory=set)
    """Steps whose shares the others have removed."""
    offers: list[int] = field(default_factory=list)

    def misfit(self, version: int, outer: OuterState, *, offered: bool) -> str:
        return ""

    def hold(self, version: int, outer: OuterState, *, store: bool) -> None:
        if store:
            with self.coordinator.changed:
                self.coordinator.stored[version] = outer
                self.coordinator.changed.notify_all()

    def can_follow(self, version: int) -> bool:
        return True

    def fetch_outer(self) -> tuple[int, OuterState]:
        """The state of version 0, or the newest for an island that comes late."""
        stored = self.coordinator.stored
        with self.coordinator.changed:
            assert self.coordinator.changed.wait_for(lambda: stored, DEADLINE_S)
        version = max(stored) if self.comes_late else 0
        return version, stored[version]

    def left_out(self, step: int) -> bool:
        mode = self.coordinator.plan[self.island, step]
        if mode == "away":
            self.coordinator.committed(step)
        # A late island begins before the record is there, and finds it when it starts again.
        late = mode == "late" and self.coordinator.ended
        return mode == "away" or (late and self.coordinator.record(step) is not None)

    def offered(self) -> None:
        """An offer is with the coordinator as soon as it is made."""

    def offer(self, step: int, outer: OuterState, data: bytes, weight: float, norm: float) -> None:
        assert weight == WEIGHTS[self.island] and norm > 0
        self.offers.append(step)
        with self.coordinator.changed:
            assert self.coordinator.bases.setdefault(step, outer.digest) == outer.digest
            # a share that is made again is the same
            assert self.coordinator.shares.setdefault((self.island, step), data) == data
            self.coordinator.changed.notify_all()

    def settled(self, step: int, outer: OuterState) -> Settled:
        if step in self.behind:
            raise Behind(f"the shares of step {step} are removed")
        record, shares = self.coordinator.committed(step), self.coordinator.shares
        names = self.coordinator.contributors(step)
        held = codec(self.coordinator.kind)
        decoded = (held.decode(shares[name, step], self.coordinator.size) for name in names)
        mean = weighted_mean(decoded, [WEIGHTS[name] for name in names])
        after = outer_update(outer, mean, self.coordinator.optimizer)
        with self.coordinator.changed:
            digest = self.coordinator.results.setdefault(step, after.digest)
        assert digest == after.digest and record.base == outer.digest
        return Settled(record, mean, after, {}, frozenset(), 0, 0.0)


class World:
    """Three islands over one tiny model; their inner updates are made up, in numpy."""

    def __init__(self, overlap: int, kind: Kind, plan: Plan) -> None:
        fields = document_spec(Path("data"), publish_every=1).model_dump(mode="json")
        fields["steps"] = STEPS
        fields["learner"] |= {
            "hardware": {"kind": "cpu", "count": 1},
            "mesh": {},
            "islands": {
                "members": [{"name": name} for name in NAMES],
                "overlap": overlap,
                "codec": {"kind": kind},
                "quorum": 1,
            },
        }
        fields["algorithm"]["tokens_per_update"] = 3 * 256
        self.spec = RunSpec.model_validate(fields)
        self.config = model_config(self.spec)
        own = island_spec(self.spec, "a")
        self.mesh = make_mesh(own.learner.mesh, jax.devices()[:1])
        self.programs: Programs = build_programs(own, self.config, self.mesh, island=True)
        self.layout = FlatLayout(self.config)
        islands = self.spec.learner.islands
        assert islands is not None
        self.coordinator = FakeCoordinator(plan, self.layout.size, kind, islands.outer)

    def island(self, name: str, comes_late: bool) -> tuple[Island, FakeExchange]:
        link = IslandLink(name)
        run = LearnerRun(
            *(Path(), self.spec, self.config, self.mesh, {}, Peers()),
            *(logging.getLogger("test"), link),
        )
        fake = FakeExchange(self.coordinator, name, comes_late)
        islands = self.spec.learner.islands
        assert islands is not None
        return Island(run, self.programs, islands, cast(Exchange, fake)), fake

    def initial(self) -> TrainState:
        """The same parameters for all; the moments are one vector beside a schedule's count."""
        flat = np.random.default_rng(3).standard_normal(self.layout.size).astype(np.float32)
        moments = {
            "m": jnp.zeros(self.layout.size),
            "count": optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)),
        }
        zero = jnp.zeros((), jnp.int32)
        return TrainState(self._tree(flat), cast(Any, moments), zero, zero)

    def trained(self, state: TrainState, name: str, step: int) -> TrainState:
        """A step's inner updates: of the parameters, the moments, the island's data."""
        rng = np.random.default_rng([NAMES.index(name), step])
        flat, moments = self.flat(state), cast(dict[str, Any], state.optimizer)
        data = rng.standard_normal(self.layout.size).astype(np.float32)
        m = 0.5 * np.asarray(moments["m"]) + data - 0.1 * flat
        count = moments["count"].count + self.spec.algorithm.updates_per_step
        updated = {"m": jnp.asarray(m), "count": optax.ScaleByScheduleState(count=count)}
        return replace(
            state, params=self._tree(flat + np.float32(0.01) * m), optimizer=cast(Any, updated)
        )

    def flat(self, state: TrainState) -> np.ndarray:
        return self.layout.flatten(HostLeaves(state.params))

    def _tree(self, flat: np.ndarray) -> Any:
        leaves = dict(self.layout.leaves(flat))
        return jax.tree.map_with_path(
            lambda path, like: jnp.asarray(leaves[leaf_path(path)], like.dtype),
            self.programs.abstract_state.params,
        )


Saved = dict[int, tuple[TrainState, dict[str, np.ndarray]]]


def train(
    world: World,
    name: str,
    first: int = 0,
    saved: Saved | None = None,
    *,
    comes_late: bool = False,
    behind: Iterable[int] = (),
) -> tuple[Saved, FakeExchange, TrainState, Island]:
    """Trains an island to the end, from a full state if `saved` has one; keeps all full states."""
    island, exchange = world.island(name, comes_late)
    exchange.behind = set(behind)
    state, stored = saved[first] if saved else (world.initial(), {})
    state, step = island.begin(state, first, stored)
    made: Saved = {step: (state, island.arrays())}
    while step < STEPS:
        weight = None
        if not island.sits_out(step):
            state, weight = world.trained(state, name, step), WEIGHTS[name]
        try:
            state, step = island.end_step(step, state, weight), step + 1
        except Behind:
            exchange.comes_late = True
            state, step = island.join(state)
        made[step] = state, island.arrays()
    return made, exchange, state, island


def planned(overlap: int, seed: int) -> Plan:
    """Random drops; `a` counts in every step, so that each has a share."""
    rng = random.Random(seed)
    plan = {("a", step): "counts" for step in range(STEPS)}
    for name in NAMES[1:]:
        vain = False
        for step in range(STEPS):
            # with overlap, an island that was late learns of it after the next step is trained
            modes = ("late", "away") if vain and overlap else ("counts", "counts", "late", "away")
            plan[name, step] = rng.choice(modes)
            vain = plan[name, step] == "late" and not (vain and overlap)
    return plan


def together(world: World, names: Iterable[str] = NAMES) -> dict[str, Any]:
    with ThreadPoolExecutor(len(NAMES)) as threads:
        running = {name: threads.submit(train, world, name) for name in names}
        ended = {name: each.result(DEADLINE_S) for name, each in running.items()}
    world.coordinator.ended = True
    return ended


def assert_same_state(found: TrainState, expected: TrainState) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("overlap", [0, 1], ids=["in step", "overlapping"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_dropped_all_hold_the_same_and_replays_give_the_same_bits(overlap, seed):
    # given islands whose shares are dropped at random, late or while they are away
    world = World(overlap, "sparse", planned(overlap, seed))
    ended = together(world)
    # then all hold the same outer state, and what was reported for each step
    arrays = {name: island.arrays() for name, (_, _, _, island) in ended.items()}
    for name in NAMES[1:]:
        assert_same(
            {each: arrays[name][each] for each in ("theta", "momentum", "version")},
            {each: arrays["a"][each] for each in ("theta", "momentum", "version")},
        )
    assert len(world.coordinator.results) == STEPS
    for name, (made, exchange, state, island) in ended.items():
        assert island.version == STEPS and island.state.sent is None
        # and an island offers in the steps that it trained, but after one in vain
        plan = [world.coordinator.plan[name, step] for step in range(STEPS)]
        expected, before = [], False
        for step, mode in enumerate(plan):
            offers = mode != "away" and not (overlap and before)
            expected += [step] if offers else []
            before = offers and mode == "late"
        assert exchange.offers == expected, plan
        # and from every full state it comes to the same end
        for step in made:
            _, _, again, replayed = train(world, name, step, made)
            assert_same(replayed.arrays(), arrays[name])
            assert_same_state(again, state)


@pytest.mark.parametrize("overlap", [0, 1], ids=["in step", "overlapping"])
def test_a_dropped_island_goes_on_from_the_commit_with_zero_moments(overlap):
    plan = {(name, step): "counts" for name in NAMES for step in range(STEPS)}
    plan |= {("b", 3): "late"} | ({("b", 4): "late"} if overlap else {})
    world = World(overlap, "sparse", plan)
    made = together(world)["b"][0]
    rejoined = 4 + overlap
    state, arrays = made[rejoined]
    moments = cast(dict[str, Any], state.optimizer)
    # then moments and warm-up are zero, the schedule counts on, the parameters are the commit's
    updates = world.spec.algorithm.updates_per_step
    assert not np.any(moments["m"]) and moments["count"].count == rejoined * updates
    assert state.joined == 0
    np.testing.assert_array_equal(world.flat(state), arrays["theta"])
    # and the residual is that of the last share that counted
    before = made[3][1]["sent_residual" if overlap else "residual"]
    np.testing.assert_array_equal(arrays["residual"], before)
    assert np.abs(before).max() > 0


@pytest.mark.parametrize("overlap", [0, 1], ids=["in step", "overlapping"])
def test_an_island_that_cannot_repeat_a_step_joins_while_it_runs(overlap):
    # given an island that was away in all steps but the last ones, and finds shares removed
    plan = {(name, step): "counts" for name in ("a", "b") for step in range(STEPS)}
    plan |= {("c", step): "away" for step in range(STEPS)}
    world = World(overlap, "float16", plan)
    saved, _, _, island = together(world)["c"]
    outer = island.state.outer
    del world.coordinator.stored[STEPS]
    for first in (0, 1):
        made, exchange, state, again = train(world, "c", first, saved, behind={2})
        # then it begins once more at the newest stored state, with zero moments, and goes on
        assert not {4, 5} & made.keys() and {6, 7} <= made.keys()
        assert exchange.comes_late and again.version == STEPS
        assert again.state.outer.digest == outer.digest
        assert not np.any(cast(dict[str, Any], state.optimizer)["m"])
        del world.coordinator.stored[STEPS]


@pytest.mark.parametrize("overlap", [0, 1], ids=["in step", "overlapping"])
def test_an_island_that_joins_begins_at_the_newest_stored_outer_state(overlap):
    # given a run in which `c` takes part in the last steps only
    plan = {(name, step): "counts" for name in ("a", "b") for step in range(STEPS)}
    plan |= {("c", step): "away" if step < STEPS - 2 else "counts" for step in range(STEPS)}
    world = World(overlap, "sparse", plan)
    with ThreadPoolExecutor(len(NAMES)) as threads:
        others = [threads.submit(train, world, name) for name in ("a", "b")]
        world.coordinator.committed(STEPS - 3)
        with world.coordinator.changed:
            assert world.coordinator.changed.wait_for(
                lambda: max(world.coordinator.stored) >= 4, DEADLINE_S
            )
        made, exchange, _, joined = train(world, "c", comes_late=True)
        arrays = others[0].result(DEADLINE_S)[3].arrays()
    # then it joined there, contributed, and holds the same outer state
    assert joined.joined and min(made) >= 4 and exchange.offers == [STEPS - 2, STEPS - 1]
    for name in ("theta", "momentum"):
        np.testing.assert_array_equal(joined.arrays()[name], arrays[name])
