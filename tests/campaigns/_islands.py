"""Learner islands as one vmapped process, on reads of one random organism, a base a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge.codecs import Codec
from bridge.flat import FlatLayout
from learner_jax.corpus.generated import GeneratedReads
from learner_jax.execution import Execution
from learner_jax.islands.outer import (
    OuterSpec,
    OuterState,
    encode_share,
    outer_update,
    weighted_mean,
)
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.optimizer import apply_gradients, build_optimizer, init_state
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Optimizer

READ, ROW = 126, 128
"""A read and two special tokens fill a row."""
BEGIN, END, VOCABULARY = 4, 5, 6
"""Tokens 0 to 3 are A, C, G and T."""
Tree = Any


def reads(first: int, count: int) -> np.ndarray:
    """Reads of the organism as rows, int32 [count, ROW], from read number `first` on."""
    rows = np.full((count, ROW), BEGIN, np.int32)
    rows[:, -1] = END
    source = GeneratedReads(organisms=1, reads=first + count, length=READ)
    for row, document in zip(rows, islice(source.documents(), first, None), strict=True):
        row[1:-1] = np.searchsorted(list(b"ACGT"), list(document.text.encode()))
    return rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Learners side by side: every leaf has them as its first axis."""

    params: Tree
    optimizer: Tree


@dataclass(frozen=True)
class Trainer:
    """Trains a model as one learner or as islands; updates are those of `learner_jax`."""

    hidden: int
    layers: int
    lr: float
    """Of AdamW: after a warm-up of 1/30 of the run it falls to a twentieth, along a cosine."""
    updates: int
    """Updates of a learner in the whole run."""

    @cached_property
    def config(self) -> ModelConfig:
        heads = self.hidden // 32
        sizes = (VOCABULARY, self.hidden, 3 * self.hidden, self.layers, heads, heads, 32, ROW)
        return ModelConfig("llama", *sizes, 1e4, 1e-6, tie_word_embeddings=False)

    @cached_property
    def layout(self) -> FlatLayout:
        return FlatLayout(self.config)

    @cached_property
    def optimizer(self) -> Any:
        warmup = max(self.updates // 30, 1)
        spec = Optimizer(
            lr=self.lr,
            betas=(0.9, 0.98),
            warmup_updates=warmup,
            schedule="cosine",
            decay_updates=self.updates - warmup,
            final_lr=self.lr / 20,
        )
        return build_optimizer(spec, self.updates, abstract_params(self.config))

    def initial(self, seed: int) -> State:
        """One learner before its first update."""
        params = init_params(self.config, jax.random.key(seed))
        state = State(params, init_state(self.optimizer, params))
        return jax.tree.map(lambda leaf: leaf[None], state)

    def parallel(self, state: State, rows: np.ndarray) -> State:
        """One learner's updates, each on the rows of all islands: [H, islands, rows, ROW]."""
        return self._updates(state, rows.reshape(1, len(rows), -1, ROW))

    def islands(
        self, state: State, steps: np.ndarray, codec: Codec, outer_spec: OuterSpec
    ) -> np.ndarray:
        """Train islands that start as copies of one learner.

        Args:
            state: of one learner.
            steps: rows, [steps, H, islands, rows, ROW].
            codec: of the shares.
            outer_spec: of the outer optimizer.

        Returns:
            The outer parameters [n].
        """
        count = steps.shape[2]
        outer = OuterState.initial(self.flat(state, 0))
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), state)
        residuals: list[np.ndarray | None] = [None] * count
        for rows in steps:
            state = State(self.tree(outer.theta, count), state.optimizer)
            state = self._updates(state, np.moveaxis(rows, 1, 0))
            shares = []
            for island in range(count):
                delta = outer.theta - self.flat(state, island)
                share, residuals[island], _ = encode_share(codec, delta, residuals[island])
                shares.append(share)
            decoded = (codec.decode(share, self.layout.size) for share in shares)
            outer = outer_update(outer, weighted_mean(decoded, [1.0] * count), outer_spec)
        return outer.theta

    def nats(self, theta: np.ndarray, rows: np.ndarray) -> float:
        """Mean -log p of the bases of rows, under parameters [n]."""
        params = jax.tree.map(lambda leaf: leaf[0], self.tree(theta, 1))
        return float(self._nats(params, rows))

    def flat(self, state: State, learner: int) -> np.ndarray:
        """The parameters of a learner, [n]."""
        leaves = HostLeaves(state.params)
        return self.layout.flatten({path: leaf[learner] for path, leaf in leaves.items()})

    def tree(self, theta: np.ndarray, count: int) -> Tree:
        """Parameters [n] as those of some learners."""
        leaves = dict(self.layout.leaves(theta))
        return jax.tree.map_with_path(
            lambda path, _: jnp.repeat(leaves[leaf_path(path)][None], count, axis=0),
            abstract_params(self.config),
        )

    @cached_property
    def _updates(self) -> Any:
        def one(state: State, rows: jax.Array) -> tuple[State, None]:
            grads = jax.grad(self._loss)(state.params, rows)
            return State(
                *apply_gradients(self.optimizer, state.params, state.optimizer, grads)
            ), None

        def many(state: State, rows: jax.Array) -> State:
            return jax.lax.scan(one, state, rows)[0]

        return jax.jit(jax.vmap(many))

    @cached_property
    def _nats(self) -> Any:
        return jax.jit(partial(self._loss, bases=True))

    def _loss(self, params: Tree, rows: jax.Array, *, bases: bool = False) -> jax.Array:
        """Mean -log p of every token but a row's first, or of its bases."""
        positions = jnp.broadcast_to(jnp.arange(ROW), rows.shape)
        policy = bind(self.config, params)
        hidden = policy(rows, jnp.ones_like(rows), positions, Execution(jnp.float32))
        table = jax.nn.log_softmax(hidden @ policy.head_weight())
        found = jnp.take_along_axis(table[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
        return -(found[:, :-1] if bases else found).mean()
