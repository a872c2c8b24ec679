"""An island in the learner's loop: what it does at the end of each step instead of going on.

Collective over the island's processes. Process 0 alone speaks to the coordinator and the other
islands; the outer state is on every process, which computes the same from the mean that process 0
gives it. `Alone` has the answers for a run without islands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridge.tensors import FlatLayout, codec
from learner_jax.distributed import LearnerRun
from learner_jax.islands import ShareFetcher, ShareStore
from learner_jax.islands.exchange import Exchange, Settled
from learner_jax.islands.state import Behind, Flat, IslandState, OuterState, Stopped, outer_update
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.step import Programs, TrainState
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.schema import Islands
from runspec.core.signed import SigningKey
from verify.island_client import IslandClient


class Island:
    """One island of a run, as the learner's loop sees it.

    Args:
        run: as this island sees it.
        programs: of the island.
        islands: of the spec.
        exchange: in process 0; None elsewhere.
    """

    def __init__(
        self, run: LearnerRun, programs: Programs, islands: Islands, exchange: Exchange | None
    ) -> None:
        assert run.island is not None, "a run with islands"
        self._run, self._programs, self._islands = run, programs, islands
        self._exchange, self._name, self._peers = exchange, run.island, run.peers
        self._layout = FlatLayout(run.config)
        self._codec = codec(islands.codec.kind)
        self._state: IslandState | None = None
        self._norm: float | None = None
        """L2 norm of the last share; None before the first."""
        self.joined = False
        """Whether it began at an outer state of another island."""
        self.last: dict[str, Any] | None = None
        """Figures of the last commit for a step's line of metrics."""

    @property
    def state(self) -> IslandState:
        """The outer state, and what is under way."""
        assert self._state is not None, "`begin` was called"
        return self._state

    @property
    def version(self) -> int:
        """Newest committed version."""
        return self.state.version

    # -- Beginning -------------------------------------------------------------------------------

    def begin(
        self, state: TrainState, step: int, stored: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, int]:
        """Return the state and the step in which the loop begins.

        Args:
            state: of the newest full state, or of version 0.
            step: its number.
            stored: arrays beside the full state; empty at version 0.

        Raises:
            Stopped: this process was told to end while it waited.
        """
        if stored and self._fits(IslandState.of_arrays(stored)):
            self._state = IslandState.of_arrays(stored)
            self._hold(store=True)
            try:
                return self._settled(step, state), step
            except Behind as error:
                self._run.log.warning("this island joins anew: %s", error)
        elif not stored and self._run.trunk and self._ask(lambda others: others.can_follow(0)):
            outer = OuterState.initial(self._flat(state.params))
            self._state = IslandState.begin(0, outer, self._codec)
            self._hold(store=True)
            return state, step
        self.joined = True
        return self.join(state)

    def join(self, state: TrainState) -> tuple[TrainState, int]:
        """Return the state and the step of an island that begins at another one's outer state.

        Args:
            state: of any step; its parameters and moments are replaced.

        Raises:
            Stopped: this process was told to end while it waited.
        """
        version, outer = self._fetch_outer()
        self._state = IslandState.begin(version, outer, self._codec)
        self._hold(store=True)
        if version:
            return self._rejoin(state, version - 1), version
        return replace(state, params=self._tree(outer.theta)), 0

    def _fits(self, stored: IslandState) -> bool:
        """Return whether this island can go on from a full state; it joins anew otherwise.

        Raises:
            UserError: the trunk's contradicts the coordinator's records.
        """
        offered, version = stored.sent is not None and stored.sent.offered, stored.version

        def misfit(others: Exchange) -> str:
            found = others.misfit(version, stored.outer, offered=offered)
            if found and not self._run.trunk:
                others.forget(version)
            return found

        why = self._ask(misfit)
        if why and self._run.trunk:
            raise UserError(
                f"the full state of version {version} does not fit the coordinator's records: "
                + why,
                place=str(self._run.folder),
                remedy="put the run directory back together from one copy",
            )
        if not why and not self._ask(lambda others: others.can_follow(version)):
            why = "shares since then are removed"
        if why:
            self._run.log.warning(
                "the full state of version %d is left, and the island joins anew: %s", version, why
            )
        return not why

    def _fetch_outer(self) -> tuple[int, OuterState]:
        found: list[OuterState] = []

        def fetch(others: Exchange) -> int:
            version, outer = others.fetch_outer()
            found.append(outer)
            return version

        version = self._ask(fetch)
        theta = self._from_first(found[0].theta if found else None)
        momentum = self._from_first(found[0].momentum if found else None)
        return version, OuterState(theta, momentum)

    def _hold(self, *, store: bool) -> None:
        """Give the exchange the outer state; `store` it for islands that join."""
        held = self.state
        self._tell(lambda others: others.hold(held.version, held.outer, store=store))

    # -- Steps -----------------------------------------------------------------------------------

    def sits_out(self, step: int) -> bool:
        """Return whether a step is committed without this island: it need not train it."""
        if self._islands.quorum in (None, len(self._islands.members)):
            return False  # no step is committed before this island has offered its share
        return bool(self._ask(lambda others: others.left_out(step)))

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
        """Give this island's share of a step, and follow the commits that are due.

        Args:
            step: the step that ends.
            state: the training state after it; of a step that the island sat out, before it.
            weight: loss denominator of what was trained, 0 for nothing; None where the island sat
                the step out.

        Returns:
            The state in which the next step begins.

        Raises:
            Behind: this island can only `join` anew.
            Stopped: this process was told to end while it waited.
        """
        if self._islands.overlap and self.state.sent is not None:
            state, rejoins = self._commit(state)
            if rejoins:
                weight = None
        if weight is None:
            self._state = self.state.sit_out()
            state = self._rejoin(state, step)
        else:
            self._send(step, state, weight)
        return self._settled(step + 1, state)

    def sent(self, step: int) -> bool:
        """Return whether the share of a step is sent and its record has not come.

        A full state may be written then: the next start waits for the record.
        """
        return self.state.sent is not None and self.state.version == step

    def weights(self, state: TrainState) -> Any:
        """Return the masters of the newest committed version."""
        if self._islands.overlap:
            return self._tree(self.state.outer.theta)
        return state.params

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a full state stores beside the training state."""
        if self.state.sent is not None:  # a start from this state offers nothing for the step
            self._tell(lambda others: others.offered())
        return self.state.arrays()

    def _settled(self, step: int, state: TrainState) -> TrainState:
        """The state in which a step begins; with `overlap` the record is waited for at its end."""
        if self.state.sent is None or (self._islands.overlap and step < self._run.spec.steps):
            return state
        return self._commit(state)[0]

    def _send(self, step: int, state: TrainState, weight: float) -> None:
        held = self.state
        assert held.version == step, "a share is measured from its step's version"
        self._state, data, norm = held.send(self._flat(state.params), self._codec)
        self._norm = norm
        self._tell(lambda others: others.offer(step, held.outer, data, weight, norm))

    def _commit(self, state: TrainState) -> tuple[TrainState, bool]:
        """Follow the record of the step that waits for one; return whether the island rejoins."""
        held = self.state
        sent, step = held.sent, held.version
        assert sent is not None, "a step waits for its record"
        outer, counted = self._outer(step, held.outer)
        rejoins = sent.offered and not counted
        self._state = held.commit(outer, counted=counted)
        self._hold(store=self.version % self._run.spec.checkpoints.every == 0)
        if rejoins:
            return self._rejoin(state, step), True
        if self._islands.overlap:
            moved = self._flat(state.params) + (outer.theta - sent.params)
            return replace(state, params=self._tree(moved)), False
        return replace(state, params=self._tree(outer.theta)), False

    def _outer(self, step: int, before: OuterState) -> tuple[OuterState, bool]:
        """The outer state after a step, and whether this island's share is in it; collective."""
        found: list[Settled] = []

        def settled(others: Exchange) -> dict[str, Any]:
            one = others.settled(step, before)
            found.append(one)
            return {
                "step": step,
                "contributors": [*one.weights],
                "dropped": one.dropped,
                "part": one.part(self._name),
                "share_bytes": self._codec.size(self._layout.size),
                "received_bytes": one.received,
                "share_norm": self._norm,
                "cosine": one.cosines.get(self._name),
                "settle_s": one.seconds,
            }

        self.last = said = self._ask(settled)
        mean = self._from_first(found[0].mean if found else None)
        outer = found[0].outer if found else outer_update(before, mean, self._islands.outer)
        return outer, self._name in said["contributors"]

    # -- Processes and arrays --------------------------------------------------------------------

    def _ask(self, question: Callable[[Exchange], Any]) -> Any:
        """Collective: what process 0 answers, a JSON value.

        Raises:
            Behind, Stopped: in every process where process 0 raised it.
        """

        def ask() -> dict[str, Any]:
            assert self._exchange is not None, "process 0"
            try:
                return {"answer": question(self._exchange)}
            except Stopped:
                return {"stopped": True}
            except Behind as error:
                return {"behind": [error.thing, error.place, error.remedy]}

        said = self._peers.json_from_first(ask)
        if "stopped" in said:
            raise Stopped
        if "behind" in said:
            thing, place, remedy = said["behind"]
            raise Behind(thing, place=place, remedy=remedy)
        return said["answer"]

    def _tell(self, action: Callable[[Exchange], None]) -> None:
        """Collective: do something in process 0; all hear of its error."""

        def tell() -> None:
            if self._exchange is not None:
                action(self._exchange)

        self._peers.each(tell)

    def _from_first(self, mine: Flat | None) -> Flat:
        """Give every process the vector of process 0."""
        if self._peers.count == 1:
            assert mine is not None, "the only process"
            return mine
        data = b"" if mine is None else mine.tobytes()
        return np.frombuffer(self._peers.broadcast(data, 4 * self._layout.size), np.float32)

    def _flat(self, params: Any) -> Flat:
        return self._layout.flatten(HostLeaves(params))

    def _tree(self, flat: Flat) -> Any:
        """The tree of a vector on the mesh, placed as the masters are."""
        leaves = dict(self._layout.leaves(flat))

        def put(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            whole = leaves[leaf_path(path)].astype(like.dtype, copy=False)
            return jax.make_array_from_callback(
                like.shape, like.sharding, lambda index: whole[index]
            )

        return jax.tree.map_with_path(put, self._programs.abstract_state.params)

    def _rejoin(self, state: TrainState, step: int) -> TrainState:
        """The state of an island that goes on from the committed parameters with zero moments."""
        updates = (step + 1) * self._run.spec.algorithm.updates_per_step
        return replace(
            state,
            params=self._tree(self.state.outer.theta),
            optimizer=without_moments(state.optimizer, updates),
            skipped=jnp.zeros_like(state.skipped),
            joined=None if state.joined is None else jnp.zeros_like(state.joined),
        )


def without_moments(state: optax.OptState, updates: int) -> optax.OptState:
    """Return an optimizer's state with zero moments, its schedule at a number of updates.

    Args:
        state: of `learner_jax.optimizer.build_optimizer`.
        updates: that the run has made.
    """

    def reset(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(count=jnp.full_like(node.count, updates))
        return jnp.zeros_like(node)

    return jax.tree.map(
        reset, state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState)
    )


class Alone:
    """The learner of a run without islands: each step is committed as it ends. See `Island`."""

    joined = False
    last = None

    def __init__(self) -> None:
        self.version = 0

    def begin(
        self, state: TrainState, step: int, stored: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, int]:
        self.version = step
        return state, step

    def join(self, state: TrainState) -> tuple[TrainState, int]:
        return state, self.version  # there is nobody to join

    def sits_out(self, step: int) -> bool:
        return False

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
        self.version = step + 1
        return state

    def sent(self, step: int) -> bool:
        return False

    def weights(self, state: TrainState) -> Any:
        return state.params

    def arrays(self) -> dict[str, np.ndarray]:
        return {}


@contextmanager
def join(
    run: LearnerRun, programs: Programs, corpus: str | None, stop: threading.Event
) -> Iterator[Island | Alone]:
    """Give the loop its island, with a connection to the others for the block's time.

    Args:
        run: as this island sees it.
        programs: of the island.
        corpus: digest of the documents; None for a run that trains on rollouts.
        stop: set when this process is told to end.

    Raises:
        UserError: the key or the store cannot be read.
    """
    link, islands, name = run.link, run.spec.learner.islands, run.spec.name
    if link is None:
        yield Alone()
        return
    assert islands is not None, "a link is of a run with islands"
    if not run.peers.first:
        yield Island(run, programs, islands, None)
        return
    key, root = SigningKey.load(link.key), run.root_public_key()
    roles = read_bounded(run.folder / "keys" / "roles.json", MAX_ROLES_BYTES)
    with Exchange(
        run=name,
        island=link.name,
        url=link.share_url,
        size=FlatLayout(run.config).size,
        islands=islands,
        every=run.spec.checkpoints.every,
        corpus=corpus or "",
        client=IslandClient(link.coordinator, name, key, root_public_key=root),
        store=ShareStore(link.share_store, run=name, key=key, roles=roles),
        fetcher=ShareFetcher(run=name, root_public_key=root, folder=run.folder / "shares"),
        stop=stop,
        log=run.log,
    ) as exchange:
        yield Island(run, programs, islands, exchange)
