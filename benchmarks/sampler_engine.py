"""Times the sampling engine against a bare vLLM loop on the same prompts; prints JSON.

    python -m benchmarks.sampler_engine

Ours samples with seeded noise and records log-probs and proofs' activations; bare is `LLM.generate`
at temperature 1. Both have their engine core in a process of its own, with one thread and the same
executor. Rounds alternate; a share is the median of the rounds' ratios, tokens a second those of
the best round. `share` is of tokens a second of wall time, `cpu_share` of tokens a second of CPU
time, of client and core together. `submissions_share` is `share` where ours get the batch as
sixteen submissions. `proofs_s` is what one batch's proofs cost, `load_s` a switch of version with
its checks (`patch_s`: to one that differs in a few tensors), `start_s` the first load.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported, here and in the cores

from safetensors.torch import load_file, save_file

from runspec.core.schema import SamplerPool
from sampler.engine.arguments import engine_arguments
from sampler.engine.engine import Engine
from sampler.engine.requests import SampleRequest
from tests.sampler.engine.models import (
    END_TOKEN,
    VOCABULARY,
    perturbed_version,
    save_version,
    write_probe,
)
from verify.noise import noise_key
from verify.toploc import build_proofs_of

PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 40, 192, 256
SUBMISSIONS = 16
WAIT_S = 600.0


class Side:
    """One of the two that are compared."""

    def __init__(self, sample: Callable[[], int], pids: Sequence[int]) -> None:
        self._sample, self._pids = sample, [os.getpid(), *pids]
        self.wall: list[float] = []
        """Tokens a second, of each round."""
        self.cpu: list[float] = []

    def round(self) -> None:
        wall, cpu = time.perf_counter(), self._cpu_s()
        tokens = self._sample()
        self.wall.append(tokens / (time.perf_counter() - wall))
        self.cpu.append(tokens / (self._cpu_s() - cpu))

    def _cpu_s(self) -> float:
        """CPU time of all threads of client and core; an idle core of the other side adds none."""
        return cpu_s(self._pids)


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of all threads of some processes so far, to the nanosecond."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def share(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios: the two of a round saw the machine alike."""
    return median(one / other for one, other in zip(ours, others, strict=True))


def prompts(groups: int, size: int) -> list[list[int]]:
    """`size` times each of `groups` prompts."""
    each = [
        [2 + (7 * g + i) % (VOCABULARY - 2) for i in range(PROMPT_TOKENS)] for g in range(groups)
    ]
    return [prompt for prompt in each for _ in range(size)]


def save_endless_version(folder: Path) -> Path:
    """A version that never ends by itself: on both sides every output is as long as any other.

    Feature 0 of the residual stream is the same positive number everywhere, and tells the head that
    this is not the end.
    """
    version = save_version(folder)
    tensors = load_file(version / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
        elif name.endswith("norm.weight"):
            tensor[0] = 1.0
        elif name.endswith("lm_head.weight"):
            tensor[:, 0] = 0.0
            tensor[END_TOKEN, 0] = -1e4
    save_file(tensors, version / "model.safetensors", metadata={"format": "pt"})
    write_probe(version)
    return version


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def bare_loop(
    arguments: dict[str, Any], batch: list[list[int]], new_tokens: int = NEW_TOKENS
) -> tuple[Callable[[], int], int]:
    """vLLM's own blocking loop without anything of ours.

    Returns:
        What samples the batch and counts its tokens; the engine core's process.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    ours = {"logits_processors", "worker_extension_cls", "data_parallel_size", "use_tqdm_on_load"}
    llm = LLM(**{name: value for name, value in arguments.items() if name not in ours})
    plain = SamplingParams(
        temperature=1.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        stop_token_ids=[END_TOKEN],
        detokenize=False,
    )

    def sample() -> int:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in batch], plain, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    [core] = llm.llm_engine.engine_core.resources.engine_manager.processes
    return sample, core.pid


def measure(groups: int, size: int, rounds: int, folder: Path) -> dict[str, float]:
    version = save_endless_version(folder / "v0")
    near = perturbed_version(version, folder / "v1", "norm.weight")
    pool = SamplerPool.model_validate(
        {
            "name": "bench",
            "hardware": {"kind": "cpu"},
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "max_new_tokens": NEW_TOKENS,
        }
    )
    batch = prompts(groups, size)
    requests = [
        SampleRequest(prompt, NEW_TOKENS, END_TOKEN, 1.0, noise_key(b"\0" * 32, 0, i))
        for i, prompt in enumerate(batch)
    ]
    step = -(-len(requests) // SUBMISSIONS)
    parts = [requests[start : start + step] for start in range(0, len(requests), step)]
    with closing(Engine(pool)) as engine:
        start_s = seconds(lambda: engine.load(version, 0))
        bare_sample, bare_core = bare_loop(engine_arguments(pool, version, {}), batch)

        def one() -> int:
            return sum(len(s.output_tokens) for s in engine.submit(requests).result(WAIT_S))

        def several() -> int:
            futures = [engine.submit(part) for part in parts]
            return sum(len(s.output_tokens) for f in futures for s in f.result(WAIT_S))

        cores = engine.pids
        bare, ours, divided = Side(bare_sample, [bare_core]), Side(one, cores), Side(several, cores)
        for _ in range(rounds):
            for side in (bare, ours, divided):
                side.round()
        sampled = engine.submit(requests).result(WAIT_S)
        selections = [result.selection for result in sampled]
        switches = [(engine.load(near, 1), engine.load(version, 0)) for _ in range(rounds)]
        patched = [report.load_s for pair in switches for report in pair if report.patched]
        return {
            "sequences": len(batch),
            "tokens_per_s": max(ours.wall),
            "bare_tokens_per_s": max(bare.wall),
            "share": share(ours.wall, bare.wall),
            "cpu_share": share(ours.cpu, bare.cpu),
            "submissions_share": share(divided.wall, bare.wall),
            "proofs_s": min(seconds(lambda: build_proofs_of(selections)) for _ in range(rounds)),
            "patch_s": min(patched),
            "load_s": min(_whole_load(engine, near, version) for _ in range(rounds)),
            "start_s": start_s,
        }


def _whole_load(engine: Engine, near: Path, version: Path) -> float:
    """Of a version whose predecessor's files are gone."""
    engine.load(near, 1)
    away = near.rename(near.with_name("away"))
    report = engine.load(version, 0)
    away.rename(near)
    return report.load_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options.groups, options.size, options.rounds, Path(folder))
    print(json.dumps({"benchmark": "sampler_engine", **row}))


if __name__ == "__main__":
    main()
