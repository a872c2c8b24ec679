"""Machines without a sandbox: what is refused there, and what is graded all the same."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest

import sampler.sandbox
from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from sampler.sandbox.probe import Mechanism, Report
from sampler.tasks.grading import launch
from sampler.tasks.grading.answers import Answer
from sampler.tasks.grading.graders import Graders
from sampler.tasks.interfaces import Score
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.grading.plugin import reward
from verify.plugins import Problem, require_graders

NOWHERE = Report(tuple(Mechanism(n, False, "off") for n in ("namespaces", "landlock", "seccomp")))
SUM = {"inputs": ["1 2\n"], "outputs": ["3"]}
CALL = {"test_list": ["assert add(1, 2) == 3"]}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mechanism of the sandbox works."""
    monkeypatch.setattr(sampler.sandbox, "probe", lambda: NOWHERE)
    monkeypatch.setattr(sys.modules["sampler.sandbox.probe"], "probe", lambda: NOWHERE)
    launch._warn.cache_clear()


def spec_of(trust: str, **fields: Any) -> RunSpec:
    spec = laptop_spec()
    pools = [pool.model_copy(update={"trust": trust}) for pool in spec.samplers]
    return spec.model_copy(update={"samplers": pools, "reward": [reward("code", **fields)]})


def test_code_rewards_are_refused_where_no_sandbox_works(bare: None) -> None:
    with pytest.raises(UserError, match="cannot be isolated on this machine") as refused:
        require_graders(spec_of("untrusted"))
    assert refused.value.place == "reward.term"
    assert "user namespaces" in refused.value.remedy
    with pytest.raises(UserError, match="cannot be isolated"):
        Graders([reward("code")])


def test_an_untrusted_pool_cannot_do_without_the_sandbox() -> None:
    with pytest.raises(UserError, match="the untrusted pool") as refused:
        require_graders(spec_of("untrusted", sandboxed=False))
    assert refused.value.place == "reward.term.sandboxed"


def test_what_executes_nothing_and_trusted_pools_that_say_so_are_not_refused(bare: None) -> None:
    require_graders(laptop_spec())
    require_graders(spec_of("trusted", sandboxed=False))


def test_where_the_sandbox_works_it_is_taken_whatever_the_spec_says() -> None:
    working = sampler.sandbox.probe().working
    assert launch.mechanisms(required=False, place="reward") == working != ()


def test_graders_need_no_engine_and_import_no_term_before_it_is_asked() -> None:
    heavy = {"torch", "vllm", "transformers", "jax", "math_verify", "sympy", "reasoning_gym"}
    program = (
        "import sys, sampler.tasks.grading.command, sampler.tasks.task_set\n"
        "from sampler.tasks.interfaces import find_kind\n"
        "[find_kind(kind) for kind in ('math', 'code', 'reasoning_gym', 'target_length')]\n"
        f"print({heavy!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout == b"set()\n", done.stderr


@pytest.mark.slow
def test_mathematics_is_graded_without_a_sandbox_and_says_so_once_with_the_remedy(
    bare: None, caplog: pytest.LogCaptureFixture
) -> None:
    # Given more than one grader process' share of answers
    right = Answer(Problem("p", "math", "", {"ground_truth": "1/2"}), "0.5")
    # When they are graded where no sandbox works
    with (
        caplog.at_level(logging.WARNING),
        closing(Graders([reward("math")], processes=2)) as graders,
    ):
        assert graders.score([right] * 40) == [Score(1.0)] * 40
        started = len(graders._pool._alive)
    # Then one line says so, whatever the number of processes, and what to do
    assert started == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.name == launch.__name__]
    assert warning.startswith("reward: no sandbox works on this machine")
    assert "`python -m sampler.sandbox` names what to switch on" in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("info", "program", "reason"),
    [
        (SUM, "print(sum(map(int, input().split())))", ""),
        (CALL, "def add(a, b): return a + b", ""),
        (SUM, "while True: pass", "too long"),
        (SUM, "x = bytearray(1 << 40)", "too much memory"),
        (CALL, "import os\nos._exit(0)", "exit code 0"),
    ],
)
def test_trusted_pools_may_run_programs_within_limits_alone(
    bare: None, info: dict[str, Any], program: str, reason: str
) -> None:
    with closing(Graders([reward("code", sandboxed=False, timeout="3s")])) as graders:
        (score,) = graders.score([Answer(Problem("p", "code", "", info), program)])
    assert isinstance(score, Score)
    assert (score.value == 1.0) is (reason == "")
    assert reason in score.reason
