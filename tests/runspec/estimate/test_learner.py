"""Parameters, FLOPs and memory of the learner, by published sizes and by hand."""

from __future__ import annotations

import pytest

from runspec.core.models.config import ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.models.flops import forward_flops, step_flops, useful_flops
from runspec.core.models.parameters import parameter_count, trained_count
from runspec.core.models.spec_model import named_model
from runspec.core.spec.schema import Lora, RunSpec
from runspec.estimate.learner import learner_memory
from tests.runspec.estimate.shipped import shipped


def config(name: str) -> ModelConfig:
    return parse_config(named_model(name) or {}, place=name)


def target_long(*overrides: str) -> RunSpec:
    """The shipped spec of 32B on 64 chips, changed."""
    return shipped(*overrides)[0]


QWQ = config("Qwen/QwQ-32B")


def test_adapters_count_their_two_thin_matrices() -> None:
    # given rank 8 on q [5120, 40 x 128] and k [5120, 8 x 128] of 64 layers
    lora = Lora(rank=8, targets=["q", "k"])
    assert trained_count(QWQ, lora) == 64 * 8 * (5120 + 5120 + 5120 + 1024)
    assert trained_count(QWQ, None) == parameter_count(QWQ)


def test_a_step_computes_what_remat_and_old_policies_ask_for() -> None:
    # given 256 x 16 samples of 1000 tokens
    spec, lengths = target_long(), [1000.0] * 4096
    flops = step_flops(spec, QWQ, 1000.0)
    # then two policies are scored beside a forward and backward pass, and `full` repeats all
    plain = forward_flops(QWQ, lengths)
    assert flops.useful == useful_flops(QWQ, lengths) == 3 * plain
    assert flops.old == flops.reference == flops.recompute == plain
    assert flops.total == 6 * plain
    # and without recomputation nothing is repeated but the logits
    frugal = ["learner.remat=none", "algorithm.kl.coef=0.0", "algorithm.old_logprobs=sampler"]
    flops = step_flops(target_long(*frugal), QWQ, 1000.0)
    assert (flops.old, flops.reference) == (0.0, 0.0)
    assert flops.recompute == 2.0 * 5120 * 152064 * 1000 * 4096


def test_what_a_device_of_target_long_holds() -> None:
    # given 32B over fsdp 16 x tensor 4, the norms whole on each device
    memory = learner_memory(target_long(), QWQ)
    # then the parts are those that the compiler's arguments have
    assert memory.state == 6_152_318_976
    assert memory.gradients == 2_050_772_992
    assert memory.published == memory.reference == 1_025_386_496
    # and 64 layers keep one row of 32,768 positions of 5120 bfloat16 numbers each
    assert memory.activations == 64 * 32768 * 5120 * 2
    assert memory.moment == "layers" and memory.logits == 0.0
    parts = memory.gradients + 2 * memory.published + memory.activations + memory.temporaries
    assert memory.total == memory.state + parts


@pytest.mark.parametrize(
    ("change", "part", "bytes_"),
    [
        ("optimizer.offload=true", "moments", 0.0),
        ("learner.master_dtype=bfloat16", "masters", 1_025_386_496),
        ("algorithm.old_logprobs=sampler", "published", 0.0),
        ("algorithm.kl.coef=0.0", "reference", 0.0),
        ("learner.remat=offload", "activations", 3 * 32768 * 5120 * 2),
    ],
)
def test_what_relieves_memory_relieves_its_part(change: str, part: str, bytes_: float) -> None:
    before, after = (learner_memory(target_long(*c), QWQ) for c in ((), (change,)))
    assert getattr(after, part) == bytes_ < getattr(before, part)
    assert after.total < before.total
