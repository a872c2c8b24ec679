"""Times sampling with proofs against without, and seeded against plain sampling; prints JSON.

    python -m benchmarks.sampler_proofs [--layers 8 --hidden 512 --vocabulary 8192]

Three engines on the same prompts, each core in a process of its own, on the GPU where there is one:
- `proven`: seeded noise, log-probs, hidden states captured and selected, and proofs built in a
  thread beside the sampling;
- `seeded`: the same without hidden states and proofs;
- `plain`: a bare `LLM.generate` loop at temperature 1, without anything of ours.
`proofs_share` is proven over seeded, each with the batch WAVES times in small submissions, a new
one when one is answered, as a worker samples lease after lease. `seeded_share` is seeded over
plain, each with the batch at once. Both are in tokens a second of wall time, `..._cpu_share` in
tokens a second of CPU time of client and core together: medians of the rounds' ratios. The bars are
0.97 and 0.95. A random model makes outputs of full length unless it hits its end token.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.sampler_engine import WAIT_S, Side, bare_loop, share
from runspec.core.schema import SamplerPool
from sampler.engine.arguments import engine_arguments
from sampler.engine.engine import Engine
from sampler.engine.requests import SampleRequest
from sampler.engine.sampling import Selected, TokenRecorder
from sampler.engine.worker_extension import SamplerExtension
from verify.noise import noise_key
from verify.toploc import CHUNK_ROWS, TOP_K, build_proofs_of

END_TOKEN = 1
SUBMISSIONS, WAVES = 8, 3
WITHOUT_PROOFS = "benchmarks.sampler_proofs.WithoutProofsExtension"


class WithoutProofs(TokenRecorder):
    """Keeps tokens, log-probs and versions, and gives nothing for hidden states."""

    def _keep_states(
        self, slots: np.ndarray, positions: np.ndarray, rows: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        pass

    def _chunks(self, slots: np.ndarray, lengths: np.ndarray) -> list[tuple[Selected, int]]:
        nothing = Selected(
            torch.zeros((1, TOP_K), dtype=torch.int32), torch.zeros((1, TOP_K), dtype=torch.int16)
        )
        return [(nothing, 0)] * int((-(-lengths // CHUNK_ROWS)).sum())


class WithoutProofsExtension(SamplerExtension):
    """The `worker_extension_cls` of `seeded`."""

    recorder_kind = WithoutProofs


def save_model(folder: Path, options: argparse.Namespace, dtype: torch.dtype) -> Path:
    """A random Qwen2 of the size asked for."""
    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=options.prompt_tokens + options.new_tokens,
        tie_word_embeddings=False,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def sampler_pool(options: argparse.Namespace, *, gpu: bool) -> SamplerPool:
    return SamplerPool.model_validate(
        {
            "name": "bench",
            "hardware": {"kind": "h100-80g", "count": 1} if gpu else {"kind": "cpu"},
            "dtype": "bfloat16" if gpu else "float32",
            "max_model_len": options.prompt_tokens + options.new_tokens,
            "max_new_tokens": options.new_tokens,
        }
    )


def in_waves(
    engine: Engine, requests: list[SampleRequest], *, waves: int, proofs: bool
) -> Callable[[], int]:
    """What samples the requests `waves` times, and proves each submission while others are sampled.

    It returns when all of it is done.
    """
    size = -(-len(requests) // SUBMISSIONS)
    parts = [requests[at : at + size] for at in range(0, len(requests), size)] * waves
    prover = ThreadPoolExecutor(1, "prover")

    def sample() -> int:
        waiting = deque(parts)
        open_ = deque(engine.submit(waiting.popleft()) for _ in range(SUBMISSIONS))
        tokens, proving = 0, []
        while open_:
            sampled = open_.popleft().result(WAIT_S)
            if waiting:
                open_.append(engine.submit(waiting.popleft()))
            tokens += sum(len(result.output_tokens) for result in sampled)
            if proofs:
                selections = [result.selection for result in sampled]
                proving.append(prover.submit(build_proofs_of, selections))
        for proven in proving:
            proven.result(WAIT_S)
        return tokens

    return sample


def at_once(engine: Engine, requests: list[SampleRequest]) -> Callable[[], int]:
    """What samples the requests in one submission."""
    return lambda: sum(len(s.output_tokens) for s in engine.submit(requests).result(WAIT_S))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float | str]:
    gpu = torch.cuda.is_available()
    version = save_model(folder / "v0", options, torch.bfloat16 if gpu else torch.float32)
    pool = sampler_pool(options, gpu=gpu)
    generator = np.random.default_rng(0)
    shape = (options.groups, options.prompt_tokens)
    each = generator.integers(2, options.vocabulary, shape).tolist()
    prompts = [prompt for prompt in each for _ in range(options.size)]
    requests = [
        SampleRequest(p, options.new_tokens, END_TOKEN, 1.0, noise_key(b"\0" * 32, 0, n))
        for n, p in enumerate(prompts)
    ]
    # Three engines share what one would take.
    shared = {"gpu_memory_utilization": 0.25} if gpu else {}
    with (
        closing(Engine(pool, options=shared, probe=False)) as proven,
        closing(
            Engine(pool, options={**shared, "worker_extension_cls": WITHOUT_PROOFS}, probe=False)
        ) as seeded,
    ):
        for engine in (proven, seeded):
            engine.load(version, 0)
        arguments = engine_arguments(pool, version, shared)
        plain, plain_pid = bare_loop(arguments, prompts, options.new_tokens)
        sides = {
            "proven": Side(in_waves(proven, requests, waves=WAVES, proofs=True), proven.pids),
            "unproven": Side(in_waves(seeded, requests, waves=WAVES, proofs=False), seeded.pids),
            "seeded": Side(at_once(seeded, requests), seeded.pids),
            "plain": Side(plain, [plain_pid]),
        }
        for _ in range(options.rounds):
            for side in sides.values():
                side.round()
    shares = {
        f"{name}{kind}_share": share(getattr(sides[one], clock), getattr(sides[other], clock))
        for name, one, other in (("proofs", "proven", "unproven"), ("seeded", "seeded", "plain"))
        for kind, clock in (("", "wall"), ("_cpu", "cpu"))
    }
    rates = {f"{name}_tokens_per_s": max(side.wall) for name, side in sides.items()}
    device = torch.cuda.get_device_name(0) if gpu else "cpu"
    return {"device": device, "sequences": len(prompts), **rates, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    print(json.dumps({"benchmark": "sampler_proofs", **row}))


if __name__ == "__main__":
    main()
