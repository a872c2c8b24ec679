"""About how much disk a run fills: a pure function of spec and model."""

from __future__ import annotations

from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import WIDTH, trained_count, trained_parameters
from runspec.core.spec.role_names import elsewhere, relay_names, validator_names, worker_names
from runspec.core.spec.schema import Mesh, RunSpec
from runspec.estimate.broadcast import version_size
from runspec.estimate.learner import moment_elements

_ROOM_BYTES = 2**30 // 2
"""For logs, rollouts and the environment's own files."""


def disk_bytes(spec: RunSpec, config: ModelConfig | None) -> int:
    """About how much disk a run fills, in bytes.

    Weights as directories, `keep_versions` + 1 of them, with their deltas where the run sends such;
    as many bytes of whole versions at the origin and at each relay. Where they hold deltas, that is
    those of `keep_versions` and of the way back to the newest anchor, and the anchors on it. What
    readers have: a sampler the current version and the newest, a validator `async_level` + 2, and
    each one more that is on its way. Full states (masters and moments of what is trained, 12 P with
    adamw in float32, P parameters), `checkpoints.keep` + 1 of them; and room for logs and rollouts.
    Room alone where the model's shape is not known. Left out: versions that are kept longer because
    somebody reads them, and the packed rows of documents, which lie in the learner's cache.
    """
    if config is None:
        return _ROOM_BYTES
    size, versions = version_size(spec, config), spec.broadcast.keep_versions + 1
    directories, store = versions * size.whole, float(versions * size.whole)
    if size.follower < size.whole:
        every = spec.broadcast.anchor_every
        directories += round(versions * size.delta)
        anchors = min(versions, spec.broadcast.keep_versions // every + 2)
        store = anchors * size.whole + (spec.broadcast.keep_versions + every) * size.delta
    away = elsewhere(spec)
    stores = round(store) * (1 + len(set(relay_names(spec)) - away))
    samplers = len(set(worker_names(spec)) - away)
    validators = len(set(validator_names(spec)) - away)
    read = 3 * samplers * size.whole
    if spec.supervised is None:
        read += (spec.grpo.async_level + 3) * validators * size.whole
    return directories + stores + read + states_bytes(spec, config) + _ROOM_BYTES


def states_bytes(spec: RunSpec, config: ModelConfig | None) -> int:
    """About how much of it the full states are; 0 where the model's shape is not known."""
    if config is None:
        return 0
    learner = spec.learner
    trained = trained_parameters(config, learner.lora)
    moments = moment_elements(spec.optimizer.kind, trained, Mesh())
    masters = trained_count(config, learner.lora)
    state = WIDTH[learner.master_dtype] * masters + WIDTH["float32"] * moments
    return state * (spec.checkpoints.keep + 1)
