"""Seeded sampling and proofs on the device: the sampler's kernels without vLLM.

A random Qwen2 of 7B's layer shape decodes in bfloat16 by transformers, with a cache of keys and
values. Tokens, log-probs and proofs come from `sampler.engine.sampling`. All are held against the
CPU's. Weights and rollouts stay in the folder for the parts that prefill.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.accelerator.case import SHAPES
from benchmarks.accelerator.rollouts import GROUP_SIZE, Rollouts
from benchmarks.accelerator.rows import Row, Settings, at_most, serve
from sampler.engine.requests import split_recorded
from sampler.engine.sampling import GumbelSampler, Rules, TokenRecorder
from verify.noise import noise_key
from verify.toploc import build_proofs_batch, build_proofs_of

GROUPS = 4
ROWS = GROUPS * GROUP_SIZE
SEED = b"\0" * 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its rollouts."""

    shape: str
    layers: int
    prompt: int
    output: int
    batch: int
    """Rows of the kernels' timing."""

    @classmethod
    def of(cls, small: bool) -> Sizes:
        return cls("tiny", 2, 8, 40, 8) if small else cls("qwen-7b", 4, 64, 128, 128)

    def config(self) -> dict[str, Any]:
        """config.json, without an end token: outputs have one length."""
        return SHAPES[self.shape] | {
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": None,
            "dtype": "bfloat16",
        }


def measure(settings: Settings) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings.require(device.type)
    torch.manual_seed(0)
    sizes = Sizes.of(settings.small)
    with torch.inference_mode():  # as vLLM samples
        yield from agreement(sizes, device, cut=False)
        yield from sampled(random_model(sizes, device, settings.folder), sizes, device, settings)
        yield from costs(sizes, device, settings)
        yield from agreement(sizes, device, cut=True)  # takes longest to compile


def random_model(sizes: Sizes, device: torch.device, folder: Path) -> Any:
    """Random weights in bfloat16, also as the directory `weights` of the folder."""
    config = AutoConfig.for_model(**sizes.config())
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().save_pretrained(folder / "weights")
    (folder / "weights" / "config.json").write_text(json.dumps(sizes.config()))
    return model


def rules(count: int, device: torch.device, *, cut: bool) -> tuple[Rules, list[tuple[int, int]]]:
    """Rules of some rows, and their keys; `cut` has a temperature, top-p and top-k."""
    keys = [noise_key(SEED, row // GROUP_SIZE, row % GROUP_SIZE) for row in range(count)]

    def column(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)[:, None]

    first, second = (column([key[n] for key in keys], torch.int32) for n in (0, 1))
    if not cut:
        return Rules(first, second, None, None, None), keys
    cuts = ((0.8, torch.float32), (0.95, torch.float32), (100, torch.int32))
    return Rules(first, second, *(column([value] * count, kind) for value, kind in cuts)), keys


def agreement(sizes: Sizes, device: torch.device, *, cut: bool) -> Iterator[Row]:
    """The choice of tokens on the device against the CPU's."""
    vocabulary = SHAPES[sizes.shape]["vocab_size"]
    logits = 2.0 * torch.randn(sizes.batch, vocabulary)
    at = torch.arange(sizes.batch, dtype=torch.int32)[:, None]
    found = []
    for place in (device, torch.device("cpu")):
        by = rules(sizes.batch, place, cut=cut)[0]
        result = GumbelSampler(place).run(logits.to(place, copy=True), by, at.to(place))
        found.append([each.cpu().double() for each in result])
    ours, theirs = found
    what = f"seeded tokens, {sizes.batch} x {vocabulary}"
    what += ", T 0.8, top-p 0.95, top-k 100" if cut else ", plain"
    yield at_most(f"{what}: not the CPU's", int((ours[0] != theirs[0]).sum()), 0, "d")
    yield at_most(f"{what}: log-prob difference", float((ours[1] - theirs[1]).abs().max()), 1e-4)


def costs(sizes: Sizes, device: torch.device, settings: Settings) -> Iterator[Row]:
    """Seconds of what an engine step adds to the model's."""
    vocabulary, width = SHAPES[sizes.shape]["vocab_size"], SHAPES[sizes.shape]["hidden_size"]
    sampler, (by, _) = GumbelSampler(device), rules(sizes.batch, device, cut=False)
    logits = 2.0 * torch.randn(sizes.batch, vocabulary, device=device)
    at = torch.arange(sizes.batch, dtype=torch.int32, device=device)[:, None]
    step = mean_seconds(device, lambda _: sampler.run(logits, by, at))
    what = f"seeded tokens, {sizes.batch} x {vocabulary}, plain: a step"
    yield Row(what, settings.speed(f"{step * 1e6:.0f} us"))
    recorder = TokenRecorder(sizes.batch, 64, width, device)
    tokens, logprobs = sampler.run(logits, by, at)
    hidden = torch.randn(sizes.batch, width, device=device, dtype=torch.bfloat16)
    slots = np.arange(sizes.batch)

    def record(number: int) -> None:
        positions = np.full(sizes.batch, number % 64)
        recorder.record(slots, positions, tokens, logprobs, hidden)

    step = mean_seconds(device, record, count=64)
    what = f"recording {sizes.batch} rows of {width}, selections included: a step"
    yield Row(what, settings.speed(f"{step * 1e6:.0f} us"))


def mean_seconds(device: torch.device, call: Callable[[int], object], count: int = 20) -> float:
    """Time some calls, after as many that are not counted; the device is waited for once."""
    for repeat in range(2):
        begun = time.perf_counter()
        for number in range(count):
            call(number + repeat * count)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def sampled(model: Any, sizes: Sizes, device: torch.device, settings: Settings) -> Iterator[Row]:
    """Decodes the rollouts, and holds their proofs against those of all hidden states."""
    vocabulary, width = SHAPES[sizes.shape]["vocab_size"], SHAPES[sizes.shape]["hidden_size"]
    each = np.random.default_rng(0).integers(0, vocabulary, (GROUPS, sizes.prompt), np.int32)
    prompts = each.repeat(GROUP_SIZE, axis=0)
    by, keys = rules(ROWS, device, cut=False)
    sampler, recorder = GumbelSampler(device), TokenRecorder(ROWS, sizes.output, width, device)
    head = model.get_output_embeddings().weight.float()
    ids, past, states = torch.from_numpy(prompts).long().to(device), None, []
    begun = time.perf_counter()
    for position in range(sizes.output):
        found = model.model(input_ids=ids, past_key_values=past, use_cache=True)
        past, hidden = found.past_key_values, found.last_hidden_state[:, -1].contiguous()
        at = torch.full((ROWS, 1), position, dtype=torch.int32, device=device)
        tokens, logprobs = sampler.run(hidden.float() @ head.T, by, at)
        recorder.record(np.arange(ROWS), np.full(ROWS, position), tokens, logprobs, hidden)
        states.append(hidden)
        ids = tokens[:, None]
    lengths = [sizes.output] * ROWS
    records = split_recorded(recorder.take(range(ROWS), lengths), lengths, ["length"] * ROWS)
    seconds = time.perf_counter() - begun
    proofs = [build_proofs_of([record.selection])[0] for record in records]
    bits = torch.stack(states, 1).view(torch.int16).cpu().numpy().view(np.uint16)
    expected = build_proofs_batch(list(bits))
    pairs = zip(chain(*proofs), chain(*expected), strict=True)
    different = sum(ours != its for ours, its in pairs)
    what = f"{sum(map(len, expected))} proofs selected on the device"
    yield at_most(f"{what}: not the CPU's", different, 0, "d")
    rate = ROWS * sizes.output / seconds
    text = f"{rate:.0f} tokens/s, {ROWS} rows, {sizes.layers} layers, no graphs"
    yield Row("decoding by transformers, for the parts below", settings.speed(text))
    Rollouts(
        prompts,
        keys,
        [record.output_tokens for record in records],
        [record.logprobs for record in records],
        proofs,
    ).save(settings.folder)


if __name__ == "__main__":
    serve(measure)
