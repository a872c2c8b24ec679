"""A validator's prefill of the rollouts that `sampling` left, by torch or by JAX.

Sampler and validator computed with other kernels of the same bfloat16: by decoding, and by
prefilling. Their distances are held against the published limits, as `verify calibrate` measures
them, and the JAX engine's log-probs against torch's. Then the engine is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accelerator.rollouts import GROUP_SIZE, Rollouts
from benchmarks.accelerator.rows import Row, Settings, at_most, serve
from benchmarks.one_version import OneVersion
from benchmarks.perturbed import Rejections
from runspec.core import schema
from runspec.core.models.family import load_config
from runspec.core.models.parameters import matrix_parameters
from verify.calibration.measure import PAIR, Measurements
from verify.formats.submission import Rollout
from verify.plugins import PrefillInput, PrefillOutput
from verify.recompute import PrefillRequest, recompute
from verify.thresholds import BFLOAT16

PARITY_LIMIT = BFLOAT16.logprob_submission
JUDGED = (
    *("logprob_submission", "logprob_rollout", "gap", "gap_max"),
    *("mismatch_share", "mantissa_mean", "mantissa_median"),
)
"""Numbers of `verify.calibration.measure` and of `Limits`; the last three are TOPLOC's."""
Prefill = Callable[..., list[PrefillOutput]]


def measure(settings: Settings) -> Iterator[Row]:
    name = settings.variant or ""
    weights = settings.folder / "weights"
    prefill, policy = load(name, weights, learner_of(settings.small), settings)
    rollouts = Rollouts.load(settings.folder)
    pairs = judged(prefill, policy, weights, rollouts)
    yield from distances(f"{name} prefill against the sampler's decoding", pairs)
    logprobs = np.concatenate([found.logprobs for _, found in pairs])
    np.save(settings.folder / f"{name}.npy", logprobs)
    other = settings.folder / "torch.npy"
    if name != "torch" and other.exists():
        distance = float(np.abs(logprobs - np.load(other)).mean())
        yield at_most(f"{name} against torch: mean log-prob difference", distance, PARITY_LIMIT)
    yield speed(name, prefill, policy, weights, settings)


def learner_of(small: bool) -> schema.Learner:
    """The learner block that a prefill engine reads."""
    return schema.Learner.model_validate(
        {
            "hardware": {"kind": "any"},
            "packing": {"tokens": 64 if small else 4096, "rows": 8},
            "compute_dtype": "bfloat16",
        }
    )


def load(
    name: str, weights: Path, learner: schema.Learner, settings: Settings
) -> tuple[Prefill, Any]:
    """An engine's function, and the version on its device."""
    if name == "torch":
        import torch

        from sampler import prefill as torch_engine

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        settings.require(device.type)
        return torch_engine.prefill, torch_engine.load_policy(weights, learner, [device])
    import jax

    from learner_jax import prefill
    from learner_jax.sharding import make_mesh

    settings.require(jax.devices()[0].platform)
    mesh = make_mesh(schema.Mesh(fsdp=len(jax.devices())))
    return prefill.prefill, prefill.load_policy(weights, learner, mesh)


def judged(prefill: Prefill, policy: Any, weights: Path, rollouts: Rollouts) -> list[PAIR]:
    """Each rollout with what the engine recomputed of it."""
    rows = [
        Rollout(
            run="accelerator",
            step=0,
            worker="",
            lease="",
            problem_id="",
            group=number // GROUP_SIZE,
            sample=number % GROUP_SIZE,
            version=0,
            prompt_tokens=rollouts.prompts[number],
            output_tokens=rollouts.tokens[number],
            logprobs=rollouts.logprobs[number],
            finish_reason="length",
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            target=None,
            task_reward=0.0,
            length_penalty=0.0,
            proofs=proofs,
        )
        for number, proofs in enumerate(rollouts.proofs)
    ]
    requests = [
        PrefillRequest(PrefillInput(row.prompt_tokens, row.output_tokens, key), row.proofs)
        for row, key in zip(rows, rollouts.keys, strict=True)
    ]
    engine = OneVersion(prefill, policy, weights)
    return list(zip(rows, recompute(engine, 0, requests, temperature=1.0), strict=True))


def distances(what: str, pairs: list[PAIR]) -> Iterator[Row]:
    """The worst of each number that limits speak of, and what the limits reject."""
    measured = Measurements()
    measured.take(pairs, BFLOAT16)
    for number in JUDGED:
        limit = getattr(BFLOAT16, number)
        yield at_most(f"{what}: {number}", max(measured.values[number]), limit)
    rejections = Rejections(BFLOAT16)
    rejections.take(pairs)
    rejected = f"{what}: rollouts rejected, of {len(pairs)}"
    yield at_most(rejected, rejections.rejected_rollouts, 0, "d")


def speed(name: str, prefill: Prefill, policy: Any, weights: Path, settings: Settings) -> Row:
    """Tokens of 16 rollouts a second, the second time; half of each is output."""
    config = load_config(weights)
    half = 16 if settings.small else 1024
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, config.vocab_size, (16, 2, half), np.int32)
    inputs = [PrefillInput(prompt, output, (1, 2)) for prompt, output in tokens]
    for _ in range(2):
        begun = time.perf_counter()
        prefill(policy, inputs, temperature=1.0)
        seconds = time.perf_counter() - begun
    head = config.vocab_size * config.hidden_size
    flops = 2.0 * tokens.size * (matrix_parameters(config) - head / 2)
    text = f"{tokens.size / seconds:.0f} tokens/s, {flops / seconds / 1e12:.0f} TFLOP/s"
    what = f"{name} prefill of 16 x {2 * half} tokens, {config.num_hidden_layers} layers"
    return Row(what, settings.speed(text))


if __name__ == "__main__":
    serve(measure)
