"""An island in the learner's loop: what it does at the end of each step instead of going on.

Collective over the island's processes. Process 0 alone speaks to the coordinator and the other
islands; the outer state is on every process, which computes the same from the mean that process 0
gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bridge.codecs import Codec, codec
from bridge.flat import FlatLayout
from learner_jax.distributed import LearnerRun, Peers
from learner_jax.islands.exchange import Exchange, Settled, Stopped
from learner_jax.islands.outer import OuterState, outer_update
from learner_jax.islands.state import Flat, IslandState
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.step import Programs, TrainState
from runspec.core.errors import UserError
from runspec.core.spec.schema import Islands


@dataclass(frozen=True)
class Commit:
    """One commit as an island saw it."""

    version: int
    contributors: tuple[str, ...]
    dropped: tuple[str, ...]
    cosine: float | None
    """Of this island's share and the mean of the others; None if it has no part in the commit."""
    received: int
    """Bytes of shares from the others."""
    settle_s: float
    """Seconds from the question for the record to the mean."""


class Island:
    """One island of a run.

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
        self.last: Commit | None = None
        """The last commit that was followed."""
        self.share_bytes = self._codec.size(self._layout.size)
        self.share_norm = 0.0
        """L2 norm of this island's last share."""

    # -- State -----------------------------------------------------------------------------------

    @property
    def state(self) -> IslandState:
        assert self._state is not None, "`begin` was called"
        return self._state

    def begin(self, state: TrainState, stored: Mapping[str, np.ndarray]) -> None:
        """Take up the outer state of a full state, or make that of version 0.

        Args:
            state: the training state in which the loop begins.
            stored: arrays beside a full state; empty at version 0.
        """
        if stored:
            self._state = IslandState.of_arrays(stored)
        else:
            theta = self._flat(state.params)
            self._state = IslandState.begin(
                0, OuterState(theta, np.zeros_like(theta)), self._codec
            )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a full state stores beside the training state."""
        return self.state.arrays()

    def weights(self) -> Any:
        """Return the committed outer parameters as a tree on the mesh, in the masters' type."""
        return self._tree(self.state.outer.theta)

    # -- Steps -----------------------------------------------------------------------------------

    def sits_out(self, step: int) -> bool:
        """Return whether a step is committed without this island: it need not train it."""

        def named() -> bool:
            assert self._exchange is not None, "process 0"
            record = self._exchange.record(step)
            return record is not None and all(
                each.island != self._name for each in record.contributors
            )

        return bool(self._peers.json_from_first(named))

    def end_step(self, step: int, state: TrainState, weight: float | None) -> TrainState:
        """Give this island's share of a step, and follow the commits that are due.

        Args:
            step: the step that ends.
            state: the training state after it; of a step that the island sat out, before it.
            weight: loss denominator of what was trained; None where the island sat the step out.

        Returns:
            The state in which the next step begins.

        Raises:
            Stopped: this process was told to end; the island's state is that of a step whose share
                is sent, and `settle` goes on from there.
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
        return state if self._islands.overlap else self.settle(state)

    def settle(self, state: TrainState) -> TrainState:
        """Follow the record of the step whose share is sent, if there is one.

        Raises:
            Stopped: this process was told to end while it waited.
        """
        return state if self.state.sent is None else self._commit(state)[0]

    def _send(self, step: int, state: TrainState, weight: float) -> None:
        held = self.state
        assert held.version == step, "a share is measured from its step's version"
        self._state, data, self.share_norm = held.send(self._flat(state.params), self._codec)

        def offer() -> None:
            if self._exchange is not None:
                base, norm = held.outer.digest(), self.share_norm
                self._exchange.offer(step, base, data, weight, norm)
                self._exchange.settle(step)

        self._peers.each(offer)

    def _commit(self, state: TrainState) -> tuple[TrainState, bool]:
        """Follow the record of the step that waits for one; return whether the island rejoins."""
        held = self.state
        sent, step = held.sent, held.version
        assert sent is not None, "a step waits for its record"
        mean, counted = self._mean(step)
        outer = outer_update(held.outer, mean, self._islands.outer)

        def report() -> None:
            if self._exchange is not None:
                self._exchange.report(step, outer.digest())

        self._peers.each(report)
        rejoins = sent.offered and not counted
        self._state = held.commit(outer, counted=counted)
        if rejoins:
            return self._rejoin(state, step), True
        if self._islands.overlap:
            moved = self._flat(state.params) + (outer.theta - sent.params)
            return replace(state, params=self._tree(moved)), False
        return replace(state, params=self._tree(outer.theta)), False

    def _mean(self, step: int) -> tuple[Flat, bool]:
        """The mean of a step's shares, and whether this island's is among them; collective."""
        found: list[Settled] = []

        def settled() -> dict[str, Any]:
            assert self._exchange is not None, "process 0"
            try:
                found.append(self._exchange.settled(step))
            except Stopped:
                return {"stopped": True}
            one = found[0]
            self._check_base(step, one)
            return {
                "counted": one.counted(self._name),
                "contributors": [each.island for each in one.record.contributors],
                "dropped": [each.island for each in one.record.dropped],
                "cosine": one.cosines.get(self._name),
                "received": one.received,
                "settle_s": one.seconds,
            }

        said = self._peers.json_from_first(settled)
        if said.pop("stopped", False):
            raise Stopped
        counted = said.pop("counted")
        names = {key: tuple(said.pop(key)) for key in ("contributors", "dropped")}
        self.last = Commit(step + 1, **names, **said)
        return self._from_first(found[0].mean if found else None), counted

    def _check_base(self, step: int, settled: Settled) -> None:
        """Compare the record's outer state with this island's.

        Raises:
            UserError: they differ.
        """
        own, theirs = self.state.outer.digest(), settled.record.base
        if own != theirs:
            raise UserError(
                f"step {step} was trained from the outer state {theirs[:16]}, this island "
                f"{self._name} has {own[:16]}",
                place=str(self._run.folder),
                remedy="remove this island's checkpoints, so that it joins anew",
            )

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

