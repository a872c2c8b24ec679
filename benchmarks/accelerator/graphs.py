"""The whole sampler under vLLM, with CUDA graphs and without: what a validator says of its
rollouts, and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from benchmarks.accelerator.prefill import distances, judged, learner_of, load
from benchmarks.accelerator.rollouts import Rollouts
from benchmarks.accelerator.rows import Row, Settings, serve
from runspec.core.schema import SamplerPool
from sampler.engine.engine import Engine
from sampler.engine.requests import SampleRequest
from verify.toploc import build_proofs_of

END_TOKEN, WAIT_S = 0, 300.0


def measure(settings: Settings) -> Iterator[Row]:
    given = Rollouts.load(settings.folder)
    weights = settings.folder / "weights"
    found = {}
    tensor = 2 if settings.variant == "tensor" else 1
    for eager in (True,) if settings.small else (False, True)[: 3 - tensor]:
        name = "vLLM, eager" if eager else "vLLM, CUDA graphs"
        name += f", {tensor} ranks" * (tensor > 1)
        found[name], text = sampled(given, settings, eager=eager, tensor=tensor)
        yield Row(f"{name}: {len(given.keys)} rollouts", settings.speed(text))
    prefill, policy = load("torch", weights, learner_of(settings.small), settings)
    for name, rollouts in found.items():
        yield from distances(name, judged(prefill, policy, weights, rollouts))


def sampled(
    given: Rollouts, settings: Settings, *, eager: bool, tensor: int
) -> tuple[Rollouts, str]:
    """Sample the same prompts and keys by the engine; also tokens/s of the second time, as text."""
    prompt, output = given.prompts.shape[1], len(given.tokens[0])
    pool = SamplerPool.model_validate(
        {
            "name": "graphs",
            "hardware": {"kind": "cpu" if settings.small else "any", "count": tensor},
            "parallel": {"tensor": tensor},
            "max_model_len": prompt + output,
            "max_new_tokens": output,
            "enforce_eager": eager,
        }
    )
    requests = [
        SampleRequest(tokens.tolist(), output, END_TOKEN, 1.0, key)
        for tokens, key in zip(given.prompts, given.keys, strict=True)
    ]
    memory = {} if settings.small else {"gpu_memory_utilization": 0.5}
    with closing(Engine(pool, options=memory, probe=False)) as engine:
        begun = time.perf_counter()
        engine.load(settings.folder / "weights", 0)
        start = time.perf_counter() - begun
        for _ in range(2):
            begun = time.perf_counter()
            results = engine.submit(requests).result(WAIT_S)
            seconds = time.perf_counter() - begun
    tokens = [np.asarray(each.output_tokens) for each in results]
    text = f"{sum(map(len, tokens)) / seconds:.0f} tokens/s, started in {start:.0f} s"
    logprobs = [np.asarray(each.logprobs) for each in results]
    proofs = build_proofs_of([each.selection for each in results])
    return Rollouts(given.prompts, given.keys, tokens, logprobs, proofs), text


if __name__ == "__main__":
    serve(measure)
