"""How long a step is where nobody waits, and how much comes in it to be checked.

    step_s = max( learner_s, sampling_s )
    sampling_s = P G n / sum over pools of replicas x tokens/s

P groups of G rollouts of n output tokens. Each role is taken to be always at work, and versions to
travel in no time, so that a real step is no shorter (`timeline` simulates what it comes to).
"""

from __future__ import annotations

from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate import assumed
from runspec.estimate.sampler import lease_groups
from runspec.estimate.speed import decode_speed, learner_seconds, mean_tokens


def step_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """The shortest that a step can be; None where the learner's or a pool's speed is not known.

    Args:
        spec: of the run.
        config: the model's shape, where it is known.
    """
    learner, sampling = learner_seconds(spec, config), sampling_seconds(spec, config)
    return None if learner is None or sampling is None else max(learner, sampling)


def sampling_seconds(spec: RunSpec, config: ModelConfig | None) -> float | None:
    """Time of all pools together for a step's rollouts; None where a speed is unknown, or nil."""
    mean, prompt = assumed.mean_new_tokens(spec).value, assumed.mean_prompt_tokens(spec).value
    total = 0.0
    for pool in spec.samplers:
        speed = decode_speed(pool, spec, config)
        if speed is None:
            return None
        lease = lease_groups(pool, spec) * spec.algorithm.group_size
        together = [mean] * min(lease, speed.sequences)
        seconds = speed.lease_seconds(together, prompt)
        if seconds <= 0.0:
            return None
        total += pool.replicas * sum(together) / seconds
    return rollouts_per_step(spec) * mean / total if total > 0.0 else None


def rollouts_per_step(spec: RunSpec) -> float:
    """Rollouts that are sampled and checked for a step, those of filtered groups included."""
    trained = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    kept = 1.0 - assumed.filtered_share(spec).value
    most = trained * spec.algorithm.fill.max_groups
    return min(trained / kept, most) if kept > 0.0 else most


def tokens_to_check(spec: RunSpec) -> float:
    """Tokens that validators prefill for a step."""
    return rollouts_per_step(spec) * mean_tokens(spec) * spec.verify.prefill_share
