"""How often the model of a warm start is right by itself, sampled as the run samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from learner_jax.sampling import sample
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from verify.plugins import Split, WarmStartData

SAMPLED_PROBLEMS = 64
"""Number of problems of each split that a new model answers."""
FEW_RIGHT = 0.05
"""Share of right answers to training problems under which a run has little to learn from."""


def sampled_right(
    spec: RunSpec, config: ModelConfig, params: Any, data: WarmStartData, split: Split
) -> float:
    """Share of problems that the model, sampled as the run samples, answers as the traces do.

    An answer counts where it is the trace's token for token, behind the only `</think>`; a run's
    grader may accept more.
    """
    traces = data.traces(np.random.default_rng([spec.seed, 3]), SAMPLED_PROBLEMS, split)
    prompts = [trace.prompt_tokens for trace in traces]
    outputs = sample(spec, config, params, prompts, data.eos_token_id)
    right = 0
    for trace, output in zip(traces, outputs, strict=True):
        wanted = trace.output_tokens[trace.answer_start - 1 :]  # from `</think>` on
        ending = len(output) - len(wanted)
        right += output[ending:] == wanted and wanted[0] not in output[:ending]
    return right / len(traces)


def log_accuracy(right: Mapping[str, float], probability: float, log: logging.Logger) -> None:
    """Logs how often the model is right by itself, with what to do where it never is."""
    figures = (
        f"sampled at temperature 1: {right['train']:.0%} of training problems and "
        f"{right['held_out']:.0%} of held-out ones are right; P(answer) {probability:.3f} is that "
        "after given thinking"
    )
    if right["train"] >= FEW_RIGHT:
        log.info("%s", figures)
    else:
        log.warning(
            "%s. The run has almost nothing to learn from: raise "
            "warm_start.stop_answer_probability (and max_updates), lower warm_start.answer_weight "
            "to 1, or choose easier problems (docs/first-run.md)",
            figures,
        )
