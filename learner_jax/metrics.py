"""Metrics of the loss, and the files of lines and the Prometheus figures that they go to.

A file of lines, metrics.jsonl or samples.jsonl, has whole lines or none, and each step's lines
once. Prometheus is served the newest row, and totals since the process began.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from learner_jax.packing import Data
from runspec.core.errors import UserError
from runspec.core.http_server import counter, gauge


class JsonLines:
    """An append-only file of JSON lines, each with the `step` that it is of.

    A line that a killed process left torn is dropped on opening. Steps come in order, so that the
    last whole line says which are written already: a replayed step writes nothing twice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.last_step = _last_step(path)
        """The newest step that has lines; -1 for none."""

    def append(self, step: int, lines: list[dict[str, Any]]) -> bool:
        """Writes the lines of a step in one write; False when the step has its lines already."""
        if step <= self.last_step:
            return False
        self.write(step, lines)
        return True

    def write(self, step: int, lines: list[dict[str, Any]]) -> None:
        """Writes lines of a step in one write, whether it has some already or not."""
        data = "".join(json.dumps({"step": step, **line}) + "\n" for line in lines).encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as error:
            raise UserError(
                f"cannot write: {error.strerror or error}",
                place=str(self._path),
                remedy="free disk space, then start again",
            ) from error
        self.last_step = step


class Clock:
    """Splits the learner's time into training and waiting, honestly: each second is one or other.

    Time before it is made, that of start-up and compilation, is neither.

    Args:
        now: seconds, never going back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._train_s = 0.0
        self._waits: dict[str, float] = {}

    def trained(self) -> None:
        """Counts the time since the last call as training."""
        self._train_s += self._elapsed()

    def waited(self, whom: str) -> None:
        """Counts the time since the last call as waiting for `whom`."""
        self._waits[whom] = self._waits.get(whom, 0.0) + self._elapsed()

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last `take`: of training, and of waiting by whom it was for."""
        result = self._train_s, self._waits
        self._train_s, self._waits = 0.0, {}
        return result

    def _elapsed(self) -> float:
        now = self._now()
        elapsed, self._at = now - self._at, now
        return elapsed


def _last_step(path: Path) -> int:
    """Drop a torn line from the end of a file; return the step of the last whole one."""
    with path.open("r+b") as file:
        if not path.stat().st_size:
            return -1
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            line = data[data.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
        file.truncate(end)
    if not end:
        return -1
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"its last line is not one of ours: {line[:80]!r}",
            place=str(path),
            remedy="remove that line, then start again",
        ) from error


GAUGES: Mapping[str, str] = {
    "step": "step",
    "version": "version",
    "time": "step_timestamp_seconds",
    "loss": "loss",
    "grad_norm": "gradient_norm",
    "skipped_updates": "skipped_updates",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "task_reward": "task_reward",
    "length_mean": "length_tokens",
    "length_error": "length_error_tokens",
    "entropy": "entropy_nats",
    "kl": "kl_nats",
    "policy_drift": "policy_drift_nats",
    "ratio_max": "probability_ratio_max",
    "lag_mean": "lag_steps",
    "lag_max": "lag_max_steps",
    "filtered_groups": "filtered_groups",
    "sampler_logprob_diff_mean": "logprob_difference_nats",
    "sampler_logprob_limit": "logprob_limit_nats",
    "sampler_logprob_alarm": "logprob_alarm",
    "bits_per_byte": "bits_per_byte",
    "held_out_bits_per_byte": "held_out_bits_per_byte",
    "epoch": "epoch",
    "tokens_per_s": "tokens_per_busy_second",
    "mfu": "mfu_ratio",
    "learner_busy_fraction": "busy_ratio",
    "padding_share": "padding_ratio",
}
"""Key of a row: the figure's name after `runspec_learner_`. The keys are explained in
docs/learner_jax.md and docs/documents.md."""
CLIPPED = {"low": "clip_fraction_low", "high": "clip_fraction_high", "delta": "clip_fraction_delta"}
"""Label of `clipped_ratio`: key of a row."""


class Rows(Collector):
    """Takes each row in one thread, and is read by another."""

    def __init__(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._steps = self._tokens = 0
        self._busy_s = 0.0
        self._waits: dict[str, float] = {}

    def trained(self, row: Mapping[str, Any]) -> None:
        """Take the row of a step that was trained."""
        self._row = row
        self._steps += 1
        self._tokens += row["tokens"]
        self._busy_s += row["train_s"]
        waits: Mapping[str, float] = row["waits"]
        self._waits |= {whom: self._waits.get(whom, 0.0) + each for whom, each in waits.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield the figures; what the newest row lacks has no value."""
        row = self._row
        for key, name in GAUGES.items():
            text = f"`{key}` of the newest row of metrics.jsonl."
            yield gauge(f"learner_{name}", text, row.get(key))
        clipped = {bound: row[key] for bound, key in CLIPPED.items() if row.get(key) is not None}
        text = "Share of the newest step's tokens that the clip's bound acts on."
        yield gauge("learner_clipped_ratio", text, clipped, "bound")
        yield counter("learner_steps", "Steps trained.", self._steps)
        yield counter("learner_tokens", "Tokens trained, with prompts.", self._tokens)
        yield counter("learner_busy_seconds", "Seconds of work.", self._busy_s)
        text = "Seconds of waiting, by whom or what it was for."
        yield counter("learner_wait_seconds", text, dict(self._waits), "waited_for")


MAX_LOG_RATIO = 20.0
"""log r is held within this of 0, and so is every exponent of a log-prob difference."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}

# The histogram of log r: bin k lies around 1e-4 sinh((k - 128) step), k = 1 .. 255 from -20 to 20,
# so that bins are even near 0 and grow with |log r| further out.
_ROOT = 16
_BINS = _ROOT * _ROOT
_CENTRE = 1e-4
_STEP = math.asinh(MAX_LOG_RATIO / _CENTRE) / (_BINS / 2 - 1)
_UPPER_EDGES = _CENTRE * np.sinh((np.arange(_BINS) - _BINS / 2 + 0.5) * _STEP)

_SUMS = ("kl", "kl_sampler", "kl_sampler_old", "drift", "drift_abs", "entropy")
_COUNTS = ("clipped_low", "clipped_high", "clipped_delta", "nonfinite", "tokens")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossMetrics:
    """Metrics of one microbatch, over all devices; float32 [] and int32 [] by default."""

    loss: Data
    """Normalised by N already: the microbatches' add up to the optimizer batch's."""
    policy_loss: Data
    """The surrogate's part of it."""
    kl: Data
    """k3 of KL(pi_theta || reference), summed over output tokens; so are those below."""
    kl_sampler: Data
    """k3 of KL(mu || pi_theta): mu drew the tokens, so of this direction k3 is unbiased."""
    kl_sampler_old: Data
    """The same of KL(mu || pi_old): how stale the step began; 0 where pi_old is mu."""
    drift: Data
    """log pi_theta - log mu."""
    drift_abs: Data
    """|log pi_theta - log mu|."""
    entropy: Data
    clipped_low: Data
    """Tokens that the lower bound acts on. `clip`: A < 0 and r < 1 - eps_low, which stops the
    gradient; `cispo`: r < 1 - eps_low, which is the weight then."""
    clipped_high: Data
    """The upper bound. `clip`: A > 0 and r > 1 + eps_high; `cispo`: r > 1 + eps_high."""
    clipped_delta: Data
    """The second side of `clip`: A < 0 and r > delta."""
    nonfinite: Data
    """Output tokens whose part of the loss is not finite."""
    tokens: Data
    """Output tokens."""
    ratio_max: Data
    """Largest r_t."""
    log_ratios: Data
    """int32 [256], the histogram that `log_ratio_counts` makes."""

    @staticmethod
    def zeros() -> LossMetrics:
        wide = jax.dtypes.canonicalize_dtype(float)
        names = ("loss", "policy_loss", *_SUMS, "ratio_max")
        numbers = {name: np.zeros((), wide) for name in names}
        counts = {name: np.zeros((), np.int32) for name in _COUNTS}
        return LossMetrics(**numbers, **counts, log_ratios=np.zeros(_BINS, np.int32))

    def merge(self, other: LossMetrics) -> LossMetrics:
        """Merge two, on the device or, once fetched, on the host."""
        sums = jax.tree.map(operator.add, self, other)
        numpy = np if isinstance(self.ratio_max, np.ndarray | np.generic) else jnp
        return replace(sums, ratio_max=numpy.maximum(self.ratio_max, other.ratio_max))

    def means(self) -> dict[str, float]:
        """Host floats: `loss` and `policy_loss` as they are, `nonfinite_tokens` a count, ratios
        as they are, the rest per output token.

        `ratio_p01`, `_p50` and `_p99` are exp of quantiles of log r, which are known to within
        their bin of the histogram: to the larger of 2e-5 and 12 % of |log r|.
        """
        tokens = max(float(self.tokens), 1.0)
        per_token = {name: float(getattr(self, name)) / tokens for name in (*_SUMS, *_COUNTS)}
        return {
            "loss": float(self.loss),
            "policy_loss": float(self.policy_loss),
            "kl": per_token["kl"],
            "kl_sampler": per_token["kl_sampler"],
            "kl_sampler_old": per_token["kl_sampler_old"],
            "policy_drift": per_token["drift_abs"],
            "policy_drift_signed": per_token["drift"],
            "entropy": per_token["entropy"],
            "clip_fraction_low": per_token["clipped_low"],
            "clip_fraction_high": per_token["clipped_high"],
            "clip_fraction_delta": per_token["clipped_delta"],
            "nonfinite_tokens": float(self.nonfinite),
            **{
                f"ratio_{name}": math.exp(log_ratio_quantile(self.log_ratios, share))
                for name, share in QUANTILES.items()
            },
            "ratio_max": float(self.ratio_max),
        }


def log_ratio_counts(log_ratio: Float[Array, "B T"], on: Bool[Array, "B T"]) -> Int[Array, " bins"]:
    """The histogram of the values where `on`; one that is not finite is in no bin.

    As a product of two matrices of zeros and ones, [16, B T] and [B T, 16]: no scatter, and 32
    numbers a token in place of 256.
    """
    finite = jnp.isfinite(log_ratio)
    place = jnp.round(jnp.arcsinh(jnp.where(finite, log_ratio, 0.0) / _CENTRE) / _STEP)
    bins = place.astype(jnp.int32) + _BINS // 2  # [B, T]
    digits = jnp.arange(_ROOT)
    high = (bins[..., None] // _ROOT == digits) & (on & finite)[..., None]  # [B, T, 16]
    low = bins[..., None] % _ROOT == digits  # [B, T, 16]
    counts = jnp.einsum(
        "bth,btl->hl",
        high.astype(jnp.bfloat16),
        low.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,  # exact up to 2^24 tokens a bin
    )
    return counts.reshape(_BINS).astype(jnp.int32)


def log_ratio_quantile(counts: Int[np.ndarray, " bins"], share: float) -> float:
    """The value below which that share of a histogram lies, evenly spread inside its bin; 0 where
    the histogram is empty."""
    below = np.cumsum(np.asarray(counts, np.int64))
    if below[-1] == 0:
        return 0.0
    k = int(np.searchsorted(below, share * below[-1]))
    inside = (share * below[-1] - (below[k] - counts[k])) / counts[k]
    lower, upper = _UPPER_EDGES[max(k - 1, 0)], _UPPER_EDGES[k]
    return float(lower + inside * (upper - lower))
