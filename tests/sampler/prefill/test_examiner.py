"""Submissions of a worker that samples with transformers, judged with the torch engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sampler.prefill.engine import load_policy, prefill
from tests.verify.bench import Bench
from tests.verify.one_version import OneVersion
from tests.verify.small_model import EOS, HIDDEN, VOCAB, Worker, small_spec


def save_model(directory: Path, *, noise: float = 0.0) -> Path:
    """A random Qwen2; with `noise` every weight is off by that share of its matrix's mean."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(noise * weights.abs().mean() * torch.randn_like(weights))
    model.save_pretrained(directory)
    return directory


@dataclass
class Transformer:
    """What `tests.verify.small_model.Worker` asks of a model; its state is the text so far."""

    model: Any

    @classmethod
    def of(cls, directory: Path) -> Transformer:
        return cls(Qwen2ForCausalLM.from_pretrained(directory).eval())

    def read(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens)

    def step(self, state: list[int], token: int) -> list[int]:
        return [*state, int(token)]

    def output(self, state: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            hidden = self.model.model(torch.tensor([state])).last_hidden_state[0, -1]
            return hidden.numpy(), self.model.lm_head(hidden).numpy()


class LastTokenEditor(Worker):
    """Replaces the last token of outputs that ran to the longest."""

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        tokens = super().sample(prompt, key)
        if tokens[-1] != EOS:
            tokens[-1] = 1 + tokens[-1] % (VOCAB - 1)
        return tokens


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("v0"))


@pytest.fixture(scope="module")
def engine(version: Path) -> OneVersion:
    policy = load_policy(version, small_spec().learner, torch.device("cpu"))
    return OneVersion(prefill, policy, version)


@pytest.fixture
def bench(engine: OneVersion, version: Path, tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, max_new_tokens=24)
    bench.engine = engine  # type: ignore[assignment]
    bench.worker = Worker(bench.worker_key, Transformer.of(version), bench.spec, bench.task_set)
    return bench


def test_honest_rollouts_are_accepted_and_carry_the_validators_log_probs(bench: Bench) -> None:
    rollouts = bench.honest()
    verdict = bench.verdict(rollouts)
    assert verdict.accepted, verdict.reason
    for row, rollout in zip(verdict.rows, rollouts, strict=True):
        assert row.logprobs is not None
        np.testing.assert_allclose(row.logprobs, rollout.logprobs, atol=1e-4)


def test_other_weights_are_rejected(bench: Bench, tmp_path: Path) -> None:
    other = Transformer.of(save_model(tmp_path / "other", noise=0.05))
    verdict = bench.verdict(bench.rollouts_of(replace(bench.worker, model=other)))
    assert not verdict.accepted and "logprobs_submission" in verdict.reason


def test_an_edited_last_token_is_rejected_by_the_noise(bench: Bench) -> None:
    # given outputs cut at their last token, which is another, and claims that fit it
    editor = LastTokenEditor(*vars(bench.worker).values())
    verdict = bench.verdict(bench.rollouts_of(editor))
    assert not verdict.accepted and "seeded_sampling" in verdict.reason
