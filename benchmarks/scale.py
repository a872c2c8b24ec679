"""What a swarm needs: the tables of docs/scale.md, in Markdown.

    python -m benchmarks.scale

Computed from a few figures, each with its source beside it, for a step of the paper's size. No
figure is of a swarm that ran, but those of the coordinator (`python -m tests.campaigns swarm`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

WORKERS = (10, 100, 1_000, 10_000)
ROLLOUTS = 4_096
"""Of a step: 256 prompts, 16 answers (specs/intellect2.yaml)."""
STEP_S = 1320.0
"""Of INTELLECT-2: 22 minutes."""
PROMPT = 512
"""Tokens."""
IN_A_SUBMISSION = 64
"""Rollouts: four groups."""
LAG = 4
"""Steps in which a version may arrive (`async_level`)."""
CHIP_FLOPS = 0.4 * 459e12
"""Of a v5p at 40 % utilization."""
TRAINING = 10
"""FLOPs a token and parameter: update 6, old log-probs 2, reference 2."""
RELAY = 1e9 / 8
WORKER_LINK = 590e6 / 8
"""Bytes/s; INTELLECT-2's workers received at 590 Mbit/s."""
DELTA = 0.03 / 2
"""Of the bytes of a bfloat16 version, with 1 % of its elements changed (docs/broadcast.md)."""
TOKEN_BYTES = 16
"""Of a submission: token, log-prob, and 8 bytes of proof."""
COORDINATOR_LINK = 10e9 / 8
SUBMISSION_S = 0.0195
HEARTBEAT_S = 0.001
"""CPU seconds of the coordinator (docs/scale.md): of a submission with its lease and verdict, and
of 10 s of a worker: heartbeats, and waiting requests for a lease."""


@dataclass(frozen=True)
class Model:
    """A model with the machines that serve it."""

    name: str
    parameters: float
    active: float
    """Parameters that a token meets."""
    worker: str
    tokens_s: float
    """Output tokens/s of a worker: `runspec.estimate.fit`; of the 1T model an assumption."""
    tokens: int
    """Of an answer."""
    chips: int
    """Of the learner's slice."""

    @property
    def delta(self) -> float:
        return 2 * self.parameters * DELTA

    @property
    def validator_s(self) -> float:
        """Tokens/s of a validator on 4 H100s: `runspec plan` gives 11,595 for 32B."""
        return 11_595 * 32.8e9 / self.active


MODELS = (
    Model("1B", 1.2e9, 1.2e9, "one RTX 4090", 3_990, 2_000, 16),
    Model("32B", 32.8e9, 32.8e9, "8 A100s of 80 GB", 7_960, 6_000, 64),
    Model("1T, 32B active", 1e12, 32e9, "16 H200s", 7_000, 6_000, 512),
)


def step_s(model: Model, workers: int) -> float:
    """Return the seconds in which workers sample a step."""
    return ROLLOUTS * model.tokens / (workers * model.tokens_s)


def loads(model: Model, workers: int) -> dict[str, float]:
    """Return the load of each part; above 1 it is too slow for these workers."""
    rollouts_s = workers * model.tokens_s / model.tokens
    whole = model.tokens + PROMPT
    return {
        f"learner of {model.chips} v5p": rollouts_s
        * whole
        * TRAINING
        * model.active
        / (model.chips * CHIP_FLOPS),
        "a version's way (delta)": model.delta / WORKER_LINK / (LAG * step_s(model, workers)),
        "one validator of 4 H100s": rollouts_s * whole / model.validator_s,
        "coordinator's core": rollouts_s / IN_A_SUBMISSION * SUBMISSION_S
        + workers / 10 * HEARTBEAT_S,
        "coordinator's 10 Gbit/s": rollouts_s * model.tokens * TOKEN_BYTES / COORDINATOR_LINK,
        "one relay of 1 Gbit/s (delta)": workers * model.delta / RELAY / step_s(model, workers),
    }


def saturated() -> Iterator[str]:
    """Yield the rows of the workers at which each part has a load of 1."""
    yield f"| part | {' | '.join(f'{m.name}, workers of {m.worker}' for m in MODELS)} |"
    yield "|---|" + "---|" * len(MODELS)
    for number in range(len(loads(MODELS[0], 1))):
        cells, names = [], []
        for model in MODELS:
            name = [*loads(model, 1)][number]
            workers = 1
            while loads(model, workers)[name] < 1.0 and workers < 1e6:
                workers = ceil(workers * 1.01)
            cells.append(f"{workers:,.2g}" if workers < 10 else f"{float(f'{workers:.2g}'):,.0f}")
            names.append(name)
        part = names[0] if len(set(names)) == 1 else "learner (16, 64, 512 v5p)"
        yield f"| {part} | {' | '.join(cells)} |"


def needed() -> Iterator[str]:
    """Yield the rows of what is needed of each part where a step lasts `STEP_S`."""
    names = ("model", "workers", "rollouts a step", "v5p chips", "validators")
    yield f"| {' | '.join(names)} | relays: delta, whole | coordinator |"
    yield "|---|---|---|---|---|---|---|"
    for model in MODELS:
        for workers in WORKERS:
            load = [*loads(model, workers).values()]
            rollouts = workers * model.tokens_s * STEP_S / model.tokens
            core = f"{load[3]:.1%} of a core, {8 * load[4] * COORDINATOR_LINK / 1e6:,.0f} Mbit/s"
            relays = (
                workers * size / (RELAY * STEP_S) for size in (model.delta, model.delta / DELTA)
            )
            chips, validators = ceil(load[0] * model.chips), ceil(load[2])
            yield (
                f"| {model.name} | {workers:,} | {rollouts:,.0f} | {chips:,} | {validators:,} | "
                f"{', '.join(f'{ceil(count):,}' for count in relays)} | {core} |"
            )


def main() -> None:
    print("\n".join([*saturated(), "", *needed()]))


if __name__ == "__main__":
    main()
