"""Names of processes, and what placement goes by."""

from __future__ import annotations

from pathlib import Path

from runspec.core.spec.role_names import learner_names, role_names, worker_names
from tests.runspec.core.spec.spec_files import load, small_spec


def test_every_process_has_a_name(tmp_path: Path) -> None:
    spec = load(
        small_spec(tmp_path),
        "learner.hosts=2",
        "verify.validators=2",
        "samplers.pool.replicas=2",
        "samplers.more={hardware: {kind: cpu}, max_model_len: 96, max_new_tokens: 48}",
        "broadcast.relays=[{name: eu}, {name: us}]",
    ).require()

    assert role_names(spec) == [
        *("origin", "relay-eu", "relay-us", "coordinator", "publisher"),
        *("learner", "learner-1", "validator-0", "validator-1"),
        *("pool-0", "pool-1", "more-0"),
    ]
    assert worker_names(spec) == {"pool-0": "pool", "pool-1": "pool", "more-0": "more"}
    assert learner_names(spec) == ["learner", "learner-1"]
