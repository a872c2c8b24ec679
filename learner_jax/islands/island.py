"""An island in the learner's loop: what it does at the end of each step instead of going on.

Collective over the island's processes. Process 0 alone speaks to the coordinator and the other
islands; the outer state is on every process, which computes the same from the mean that process 0
gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridge.codecs import Codec, codec
from bridge.flat import FlatLayout
from learner_jax.distributed import Peers
from learner_jax.islands.exchange import Exchange, Settled
from learner_jax.islands.joining import Behind, Stopped
from learner_jax.islands.outer import OuterState, outer_update
from learner_jax.islands.state import Flat, IslandState
from learner_jax.learner_run import LearnerRun
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.step import Programs, TrainState
from runspec.core.errors import UserError
from runspec.core.spec.schema import Islands


class Island:
    """One island of a run, as `Member` describes it.

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
        self._codec: Codec = codec(islands.codec.kind)
        self._state: IslandState | None = None
        self._norm: float | None = None
        """L2 norm of the last share; None before the first."""
        self.joined = False
        self.last: dict[str, Any] | None = None

    @property
    def state(self) -> IslandState:
        """The outer state, and what is under way."""
        assert self._state is not None, "`begin` was called"
        return self._state

    @property
    def version(self) -> int:
        return self.state.version

    # -- Beginning -------------------------------------------------------------------------------

    def begin(
        self, state: TrainState, step: int, stored: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, int]:
        if stored and self._fits(IslandState.of_arrays(stored)):
            self._state = IslandState.of_arrays(stored)
            self._announce()
            try:
                return self._settled(step, state), step
            except Behind as error:
                self._run.log.warning("this island joins anew: %s", error)
        elif not stored and self._run.trunk and self._can_follow(0):
            outer = OuterState.initial(self._flat(state.params))
            self._state = IslandState.begin(0, outer, self._codec)
            self._announce()
            return state, step
        self.joined = True
        return self.join(state)

    def join(self, state: TrainState) -> tuple[TrainState, int]:
        version, outer = self._fetch_outer()
        self._state = IslandState.begin(version, outer, self._codec)
        self._announce()
        if version:
            return self._rejoin(state, version - 1), version
        return replace(state, params=self._tree(outer.theta)), 0

    def _can_follow(self, version: int) -> bool:
        def left() -> bool:
            assert self._exchange is not None, "process 0"
            return self._exchange.joining.can_follow(version)

        return bool(self._peers.json_from_first(left))

    def _fits(self, stored: IslandState) -> bool:
        """Return whether this island can go on from a full state; it joins anew otherwise.

        Raises:
            UserError: the trunk's contradicts the coordinator's records.
        """
        offered, version = stored.sent is not None and stored.sent.offered, stored.version

        def misfit() -> str:
            assert self._exchange is not None, "process 0"
            found = self._exchange.joining.misfit(version, stored.outer, offered=offered)
            if found and not self._run.trunk:
                self._exchange.joining.forget(version)
            return found

        why = self._peers.json_from_first(misfit)
        if why and self._run.trunk:
            raise UserError(
                f"the full state of version {version} does not fit the coordinator's records: "
                + why,
                place=str(self._run.folder),
                remedy="put the run directory back together from one copy",
            )
        if not why and not self._can_follow(version):
            why = "shares since then are removed"
        if why:
            self._run.log.warning(
                "the full state of version %d is left, and the island joins anew: %s", version, why
            )
        return not why

    def _fetch_outer(self) -> tuple[int, OuterState]:
        found: list[tuple[int, OuterState]] = []

        def fetch() -> int:
            assert self._exchange is not None, "process 0"
            try:
                found.append(self._exchange.joining.fetch())
            except Stopped:
                return -1
            return found[0][0]

        version = self._peers.json_from_first(fetch)
        if version < 0:
            raise Stopped
        own = found[0][1] if found else None
        theta = self._from_first(None if own is None else own.theta)
        momentum = self._from_first(None if own is None else own.momentum)
        return version, OuterState(theta, momentum)

    def _announce(self) -> None:
        """Store the outer state for islands that join."""
        self._hold(store=True)

    def _hold(self, *, store: bool) -> None:
        held = self.state

        def hold() -> None:
            if self._exchange is not None:
                self._exchange.joining.hold(held.version, held.outer, store=store)

        self._peers.each(hold)

    # -- Steps -----------------------------------------------------------------------------------

    def sits_out(self, step: int) -> bool:
        if self._islands.quorum in (None, len(self._islands.members)):
            return False  # no step is committed before this island has offered its share

        def left_out() -> bool:
            assert self._exchange is not None, "process 0"
            record = self._exchange.connection.record(step)
            return record is not None and all(
                each.island != self._name for each in record.contributors
            )

        return bool(self._peers.json_from_first(left_out))

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
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
        return self.state.sent is not None and self.state.version == step

    def _settled(self, step: int, state: TrainState) -> TrainState:
        """The state in which a step begins; with `overlap` the record is waited for at its end."""
        if self.state.sent is None or (self._islands.overlap and step < self._run.spec.steps):
            return state
        return self._commit(state)[0]

    def weights(self, state: TrainState) -> Any:
        if self._islands.overlap:
            return self._tree(self.state.outer.theta)
        return state.params

    def arrays(self) -> dict[str, np.ndarray]:
        if self.state.sent is not None:  # a start from this state offers nothing for the step

            def offered() -> None:
                if self._exchange is not None:
                    self._exchange.offered()

            self._peers.each(offered)
        return self.state.arrays()

    def _send(self, step: int, state: TrainState, weight: float) -> None:
        held = self.state
        assert held.version == step, "a share is measured from its step's version"
        self._state, data, norm = held.send(self._flat(state.params), self._codec)
        self._norm = norm

        def offer() -> None:
            if self._exchange is not None:
                self._exchange.offer(step, held.outer, data, weight, norm)

        self._peers.each(offer)

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

        def settled() -> dict[str, Any]:
            assert self._exchange is not None, "process 0"
            try:
                found.append(self._exchange.settled(step, before))
            except Stopped:
                return {"stopped": True}
            except Behind as error:
                return {"behind": [error.thing, error.place, error.remedy]}
            one = found[0]
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

        said = self._peers.json_from_first(settled)
        if said.pop("stopped", False):
            raise Stopped
        if behind := said.pop("behind", None):
            raise Behind(behind[0], place=behind[1], remedy=behind[2])
        self.last = said
        counted = self._name in said["contributors"]
        mean = self._from_first(found[0].mean if found else None)
        outer = found[0].outer if found else outer_update(before, mean, self._islands.outer)
        return outer, counted

    # -- Arrays ----------------------------------------------------------------------------------

    def _from_first(self, mine: Flat | None) -> Flat:
        """Give every process the vector of process 0."""
        if self._peers.count == 1:
            assert mine is not None, "the only process"
            return mine
        data = b"" if mine is None else mine.tobytes()
        return np.frombuffer(broadcast_long(self._peers, data, 4 * self._layout.size), np.float32)

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


LONG_PART_BYTES = 1 << 30


def broadcast_long(peers: Peers, data: bytes, size: int) -> bytes:
    """Give every process the bytes of process 0, however many.

    Args:
        peers: the processes.
        data: in process 0; empty elsewhere.
        size: length of `data`, which all know.
    """
    parts = []
    for begin in range(0, size, LONG_PART_BYTES):
        length = min(LONG_PART_BYTES, size - begin)
        parts.append(peers.broadcast(data[begin : begin + length], length))
    return b"".join(parts)
