"""Times the sampling engine against a bare vLLM loop on the same prompts; prints JSON.

    taskset -c 0 python -m benchmarks.sampler_engine

Ours samples with seeded noise and captures log-probs and hidden states; bare is `LLM.generate` at
temperature 1. Seconds are CPU seconds of this process, which runs one thread; rounds alternate and
the best of each counts, so that other work on the machine counts little. `proofs_s` is what one
batch costs beside the sampling, `load_s` a switch of version with its checks, `start_s` the first
load and `import_s` vLLM's import.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported

from runspec.spec.schema import SamplerPool
from sampler.engine.engine import Engine
from sampler.engine.proofs import prove
from sampler.engine.requests import SampleRequest
from tests.sampler.engine.models import END_TOKEN, VOCABULARY, save_version
from verify.noise import noise_key

PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 40, 48, 96


def prompts(groups: int, size: int) -> list[list[int]]:
    """`size` times each of `groups` prompts."""
    each = [
        [2 + (7 * g + i) % (VOCABULARY - 2) for i in range(PROMPT_TOKENS)] for g in range(groups)
    ]
    return [prompt for prompt in each for _ in range(size)]


def timed(action: Callable[[], object]) -> float:
    begun = time.process_time()
    action()
    return time.process_time() - begun


def measure(groups: int, size: int, rounds: int, folder: Path) -> dict[str, float]:
    version = save_version(folder / "v0")
    pool = SamplerPool.model_validate(
        {
            "name": "bench",
            "hardware": {"kind": "cpu"},
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "max_new_tokens": NEW_TOKENS,
        }
    )
    begun = time.process_time()
    engine = Engine(pool)
    import_s = time.process_time() - begun
    start_s = timed(lambda: engine.load(version, 0))

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    bare = LLM(
        str(version),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
    )
    plain = SamplingParams(
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        stop_token_ids=[END_TOKEN],
        detokenize=False,
    )
    batch = prompts(groups, size)
    requests = [
        SampleRequest(prompt, NEW_TOKENS, END_TOKEN, 1.0, noise_key(b"\0" * 32, 0, i))
        for i, prompt in enumerate(batch)
    ]

    def bare_tokens() -> int:
        outputs = bare.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in batch], plain, use_tqdm=False
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def our_tokens() -> int:
        return sum(len(result.output_tokens) for result in engine.generate(requests))

    ours, theirs = [], []
    for _ in range(rounds):
        for rates, sample in ((theirs, bare_tokens), (ours, our_tokens)):
            begun = time.process_time()
            tokens = sample()
            rates.append(tokens / (time.process_time() - begun))
    sampled = engine.generate(requests)
    return {
        "sequences": len(batch),
        "tokens_per_s": max(ours),
        "bare_tokens_per_s": max(theirs),
        "share": max(ours) / max(theirs),
        "proofs_s": min(timed(lambda: prove(sampled)) for _ in range(rounds)),
        "load_s": min(timed(lambda: engine.load(version, 0)) for _ in range(rounds)),
        "start_s": start_s,
        "import_s": import_s,
    }


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
