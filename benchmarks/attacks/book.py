"""The attacks: what each hands in instead of what was leased.

weights    the tokens of other weights under the leased noise
sampling   the leased weights, another temperature, a cut, no noise, other noise
tokens     honest outputs, changed after
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.attacks.engine import LONGEST, Choice, Sampled, lengths_of, sample
from benchmarks.attacks.policies import END, Policies, Weights
from benchmarks.attacks.site import Leases

CHOICES = {
    "greedy": Choice(noise=0.0),
    "temperature x 0.5": Choice(0.5),
    "temperature x 0.8": Choice(0.8),
    "temperature x 0.9": Choice(0.9),
    "temperature x 0.95": Choice(0.95),
    "temperature x 0.98": Choice(0.98),
    "temperature x 1.05": Choice(1.05),
    "temperature x 1.25": Choice(1.25),
    "top-k 5": Choice(top_k=5),
    "top-k 20": Choice(top_k=20),
    "top-k 50": Choice(top_k=50),
    "top-p 0.8": Choice(top_p=0.8),
    "top-p 0.95": Choice(top_p=0.95),
    "top-p 0.99": Choice(top_p=0.99),
    "padded: never ends": Choice(never_ends=True),
}
_LETTERS = np.frombuffer(b"etaoinsrhldcumfpgwybvk_ ", np.uint8).astype(np.int32)


@dataclass(frozen=True)
class Engine:
    """The sampler of a site's pool."""

    policies: Policies
    dtype: str
    rows: int
    """Of a batch."""

    def sample(
        self,
        leases: Leases,
        weights: Weights | None = None,
        choice: Choice = Choice(),  # noqa: B008
        keys: np.ndarray | None = None,
    ) -> Sampled:
        """Honest unless told otherwise."""
        return sample(
            weights or self.policies.leased,
            leases.prompts,
            leases.keys if keys is None else keys,
            choice,
            dtype=self.dtype,
            rows=self.rows,
        )


@dataclass(frozen=True)
class Attack:
    """A class of attacking submissions."""

    kind: str
    """weights, sampling or tokens."""
    name: str
    make: Callable[[Engine, Leases, Sampled], Sampled]
    """From the sampler, what is leased, and the honest outputs."""


def attacks(policies: Policies) -> Iterator[Attack]:
    """Every class that a size is measured against."""
    for name, weights in policies.others.items():
        yield Attack("weights", name, lambda e, ask, _, w=weights: e.sample(ask, w))
    for name, choice in CHOICES.items():
        kind = "tokens" if choice.never_ends else "sampling"
        yield Attack(kind, name, lambda e, ask, _, c=choice: e.sample(ask, choice=c))
    yield Attack("sampling", "another lease's noise", lambda e, ask, _: _foreign(e, ask, 1))
    yield Attack("sampling", "best of 4 by log-prob", lambda e, ask, own: _best_of(e, ask, own, 4))
    yield Attack("tokens", "one token edited", lambda e, ask, own: _edited(own, last=False))
    yield Attack("tokens", "last token edited", lambda e, ask, own: _edited(own, last=True))
    yield Attack("tokens", "cut to a half, end token", lambda e, ask, own: _cut(own, end=True))
    yield Attack("tokens", "cut to a half, no end", lambda e, ask, own: _cut(own, end=False))
    yield Attack("tokens", "padded after the end", lambda e, ask, own: _padded(own))


def _foreign(engine: Engine, leases: Leases, shift: int) -> Sampled:
    """Under the noise of other leases: a seed of one's own choice."""
    return engine.sample(leases, keys=np.roll(leases.keys, shift * 8, axis=0) ^ 1)


def _best_of(engine: Engine, leases: Leases, honest: Sampled, n: int) -> Sampled:
    """The likeliest of n: the leased sample is one of them, the others take other noise."""
    tries = [honest, *(_foreign(engine, leases, shift) for shift in range(1, n))]
    used = np.arange(LONGEST) < np.stack([each.lengths for each in tries])[..., None]
    means = np.array(
        [np.mean(each.logprobs, 1, where=own) for each, own in zip(tries, used, strict=True)]
    )
    return tries[0].taken(means.argmax(0), *tries[1:])


def _edited(honest: Sampled, *, last: bool) -> Sampled:
    """One token of each output becomes a letter, the others stay."""
    rng = np.random.default_rng(0)
    tokens, rows = honest.tokens.copy(), np.arange(len(honest.tokens))
    final = honest.lengths - 1
    # An end token stays, or `termination` would know of it; then it is the one before.
    final = np.maximum(final - (tokens[rows, final] == END), 0)
    places = final if last else rng.integers(0, final + 1)
    letters = _LETTERS[rng.integers(0, len(_LETTERS), len(rows))]
    same = letters == tokens[rows, places]
    tokens[rows, places] = np.where(same, ord("x"), letters)
    return honest.with_tokens(tokens, _ended(tokens))


def _cut(honest: Sampled, *, end: bool) -> Sampled:
    """Half of each output, with or without an end token in the place of its last."""
    lengths = np.maximum(honest.lengths // 2, 1)
    tokens, rows = honest.tokens.copy(), np.arange(len(honest.tokens))
    if end:
        tokens[rows, lengths - 1] = END
    return honest.with_tokens(tokens, lengths)


def _padded(honest: Sampled) -> Sampled:
    """Every output is as long as may be: letters follow on the end token."""
    rng = np.random.default_rng(0)
    letters = _LETTERS[rng.integers(0, len(_LETTERS), honest.tokens.shape)]
    after = np.arange(LONGEST) >= honest.lengths[:, None]
    tokens = np.where(after, letters, honest.tokens)
    return honest.with_tokens(tokens, np.full(len(tokens), LONGEST))


def _ended(tokens: np.ndarray) -> np.ndarray:
    return lengths_of(tokens)
