"""`plan --aot`: the compiler in a process of its own, and what is made of its report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from learner_jax.aot import used_programs
from runspec.core.errors import UserError
from runspec.core.models.spec_model import model_config
from runspec.core.spec.schema import RunSpec
from runspec.plan.aot import compile_step
from tests.learner_jax.conftest import tiny_spec
from tests.runspec.supervised import supervised_spec


def compiled(spec: RunSpec, *, deadline_s: float = 240.0):  # type: ignore[no-untyped-def]
    config = model_config(spec)
    assert config is not None
    return compile_step(spec, config, deadline_s=deadline_s)


def test_a_compiler_that_takes_too_long_is_ended() -> None:
    with pytest.raises(UserError, match=r"not compiled within 0\.2 s"):
        compiled(tiny_spec(), deadline_s=0.2)


def test_hardware_that_cannot_be_compiled_for_is_told_in_the_compilers_words() -> None:
    spec = tiny_spec()
    hardware = spec.learner.hardware.model_copy(update={"kind": "tpu-v5p", "topology": "4"})
    learner = spec.learner.model_copy(update={"hardware": hardware})
    with pytest.raises(UserError, match="no TPU topology: 'v5p:4'"):
        compiled(spec.model_copy(update={"learner": learner}))


def test_without_a_learner_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # given an environment without JAX
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(UserError, match=r"whl\[learner\]"):
        compiled(tiny_spec())


def test_only_programs_that_a_run_uses_are_compiled() -> None:
    every = ("publish", "score", "accumulate", "apply")
    assert used_programs(tiny_spec()) == used_programs(supervised_spec()) == every
    never = supervised_spec(algorithm={"held_out": {"tokens": 0}})
    assert used_programs(never) == ("publish", "accumulate", "apply")
