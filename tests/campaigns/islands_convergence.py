"""Four learner islands come within 1 % of data-parallel's perplexity, with every codec.

A model trains on generated reads. The first third of the tokens is data-parallel; then variants
differ: one learner goes on, or four islands average through each codec. Seeds are paired: all
variants of a seed have the initial weights, the rows of each update and the held-out reads in
common. Rates are searched with seed 0, by the same number of trials, and measured with the others.

Results are kept in the file ISLANDS_RESULTS, so that an interrupted campaign goes on. Variables:

    ISLANDS_SIZE     0.1M (5M tokens, ten seeds) or 1.3M (10M tokens, three seeds)
    ISLANDS_TOKENS   tokens of a variant, the first third included
    ISLANDS_SEEDS    seeds that are measured
    ISLANDS_UPDATES  H: an island's updates in a step
    ISLANDS_KINDS    codecs, by commas
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from bridge.tensors import Codec, FlatLayout, Kind, codec
from learner_jax.corpus.sources import GeneratedReads
from learner_jax.islands.state import (
    OuterState,
    encode_share,
    outer_update,
    weighted_mean,
)
from learner_jax.leaves import HostLeaves, leaf_path
from learner_jax.model import abstract_params, bind, init_params
from learner_jax.optimizer import apply_gradients, build_optimizer, init_state
from learner_jax.sharding import Execution
from runspec.core.files import write_atomic
from runspec.core.models import ModelConfig
from runspec.core.schema import Optimizer, Outer

LOG = logging.getLogger(__name__)
READ, ROW = 126, 128
"""A read and two special tokens fill a row."""
BEGIN, END, VOCABULARY = 4, 5, 6
"""Tokens 0 to 3 are A, C, G and T."""
Tree = Any
PARALLEL = "data-parallel"
KINDS: tuple[str, ...] = get_args(Kind)
BOUNDS = {"float32": 0.01, "float16": 0.003, "sparse": 0.01}
"""Largest relative difference in perplexity: of float32 to data-parallel, of others to float32."""
DEFAULT_RESULTS = Path.home() / ".cache" / "runspec" / "islands_convergence.json"
OUTER = {"dense": (0.4, 0.7, 1.0), "sparse": (1.0, 2.0, 3.0)}
"""Outer rates that are tried; float32's is that of all dense codecs."""


@dataclass(frozen=True)
class Size:
    """A model, and how long it trains."""

    hidden: int
    layers: int
    tokens: int
    seeds: int
    inner: Sequence[float]
    """Rates of AdamW that are tried, with data-parallel."""


SIZES = {
    "0.1M": Size(64, 2, 5_000_000, 10, (2e-3, 4e-3, 8e-3)),
    "1.3M": Size(128, 6, 10_000_000, 3, (2e-3, 4e-3, 8e-3)),
}


@dataclass(frozen=True)
class Campaign:
    """Perplexities of a size's variants, each computed once and kept in a file."""

    results: Path
    size: str
    tokens: int
    seeds: int
    updates: int
    """H."""
    kinds: tuple[str, ...] = KINDS
    islands: int = 4
    rows: int = 8
    """Of an island's update."""
    held_out: int = 512
    """Reads."""

    @property
    def steps(self) -> int:
        """Steps of H updates, those of the first third included."""
        return self.tokens // (self.islands * self.rows * ROW * self.updates)

    def perplexity(self, variant: str, seed: int, inner: float, outer: float = 0.0) -> float:
        """Return the perplexity of a held-out base at the end, from the file where it is there."""
        words = (self.size, self.tokens, f"H{self.updates}", variant, inner, outer, f"seed {seed}")
        name = " ".join(map(str, words))
        known = json.loads(self.results.read_text()) if self.results.exists() else {}
        if name not in known:
            known[name] = math.exp(self._nats(variant, seed, inner, outer))
            write_atomic(self.results, json.dumps(known, indent=1, sort_keys=True).encode())
            LOG.info("%s: %.5f", name, known[name])
        return float(known[name])

    def _nats(self, variant: str, seed: int, inner: float, outer: float) -> float:
        trainer, state, data = self._begun(seed, inner)
        if variant == PARALLEL:
            for rows in data:
                state = trainer.parallel(state, rows)
            theta = trainer.flat(state, 0)
        else:
            spec = Outer(lr=outer, momentum=0.0 if variant == "sparse" else 0.9)
            theta = trainer.islands(state, data, codec(variant), spec)  # type: ignore[arg-type]
        return trainer.nats(theta, reads(0, self.held_out))

    @lru_cache(1)  # noqa: B019 a campaign lives as long as its process
    def _begun(self, seed: int, inner: float) -> tuple[Trainer, State, np.ndarray]:
        """A learner after the first third, and the rows of the steps that are left."""
        shape = (self.steps, self.updates, self.islands, self.rows)
        count = math.prod(shape)
        data = reads(self.held_out + seed * count, count).reshape(*shape, ROW)
        trainer = self._trainer(inner)
        state = trainer.initial(seed)
        for rows in data[: self.steps // 3]:
            state = trainer.parallel(state, rows)
        return trainer, state, data[self.steps // 3 :]

    @lru_cache(1)  # noqa: B019
    def _trainer(self, inner: float) -> Trainer:
        size = SIZES[self.size]
        return Trainer(size.hidden, size.layers, inner, self.steps * self.updates)

    def rates(self) -> dict[str, tuple[float, float]]:
        """Return inner and outer rate of each variant, searched with seed 0."""
        inner = min(SIZES[self.size].inner, key=lambda lr: self.perplexity(PARALLEL, 0, lr))
        found = {PARALLEL: (inner, 0.0)}
        for kind in self.kinds:
            like, tried = ("sparse", "sparse") if kind == "sparse" else ("float32", "dense")
            outer = min(OUTER[tried], key=lambda lr, like=like: self.perplexity(like, 0, inner, lr))
            found[kind] = (inner, outer)
        return found

    def figures(self) -> dict[str, dict[str, object]]:
        """Measure every variant: perplexities, and paired relative differences with intervals.

        Raises:
            RuntimeError: an interval leaves its bound.
        """
        rates = self.rates()
        measured = {variant: [0.0] * self.seeds for variant in rates}
        for seed in range(self.seeds):  # the first third is shared by the variants of a seed
            for variant, (inner, outer) in rates.items():
                measured[variant][seed] = self.perplexity(variant, seed + 1, inner, outer)
        found, wrong = {}, []
        for variant, (inner, outer) in rates.items():
            values = np.array(measured[variant])
            part = found[f"{self.size} {variant}"] = {
                "tokens": self.tokens,
                "seeds": self.seeds,
                "perplexity": f"{values.mean():.4f}",
                "spread of seeds": f"{values.std(ddof=1) / values.mean():.2%}",
                "rate": inner,
            }
            if variant == PARALLEL:
                continue
            part |= {
                "outer rate": outer,
                "H": self.updates,
                "bytes of a share": self._bytes(variant),
            }
            for other in dict.fromkeys((PARALLEL, "float32")):
                if other == variant or other not in measured:
                    continue
                differences = values / np.array(measured[other]) - 1
                low, high = interval(differences)
                text = f"{differences.mean():+.2%} [{low:+.2%}, {high:+.2%}]"
                part[f"over {other}"] = text
                bound = BOUNDS[variant]
                if (other == PARALLEL) == (variant == "float32") and max(-low, high) > bound:
                    wrong.append(f"{variant} over {other} {text}, beyond {bound:.1%}")
        if wrong:
            raise RuntimeError(f"{'; '.join(wrong)}: {found}")
        return found

    def _bytes(self, kind: str) -> int:
        size = SIZES[self.size]
        layout = Trainer(size.hidden, size.layers, 1e-3, self.steps * self.updates).layout
        return codec(kind).size(layout.size)  # type: ignore[arg-type]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean, by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


# -- The islands: one vmapped process, on reads of one random organism, a base a token -------------


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
        self, state: State, steps: np.ndarray, codec: Codec, outer_spec: Outer
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


def run() -> dict[str, dict[str, object]]:
    """Measure one size, or what is left of it.

    Returns:
        The figures of each variant.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    name = os.environ.get("ISLANDS_SIZE", "0.1M")
    size, kinds = SIZES[name], os.environ.get("ISLANDS_KINDS", "")
    campaign = Campaign(
        Path(os.environ.get("ISLANDS_RESULTS") or DEFAULT_RESULTS),
        name,
        tokens=int(os.environ.get("ISLANDS_TOKENS", size.tokens)),
        seeds=int(os.environ.get("ISLANDS_SEEDS", size.seeds)),
        updates=int(os.environ.get("ISLANDS_UPDATES", "20")),
        kinds=tuple(kind for kind in kinds.split(",") if kind) or KINDS,
    )
    campaign.results.parent.mkdir(parents=True, exist_ok=True)
    return campaign.figures()
