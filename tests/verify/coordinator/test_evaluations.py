"""Results of evaluations over HTTP: who may send them, and that the first of a version stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.roles import sign_roles
from runspec.core.run_files import evaluation_file
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import Evaluation
from tests.verify.coordinator.deployment import RUN, Site, tiny_spec
from verify.formats.evaluation import (
    Evaluated,
    Figure,
    ProblemResult,
    open_evaluation,
    sign_evaluation,
)

RESULT = Evaluated(
    run=RUN,
    evaluation="held-out",
    version=2,
    model_digest="a" * 64,
    figures={"mean": Figure(0.5, 0.2, 0.8), "pass-2": Figure(1.0, None, None)},
    faults=1,
    problems=[ProblemResult("p", 8, [1.0, 0.0, None], [4, 8, 9], 0.5)],
    finished=1.7e9,
    wall_s=3.5,
    cpu_s=2.5,
)


@pytest.fixture
def evaluator() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture
def site(tmp_path: Path, evaluator: SigningKey) -> Site:
    evaluation = Evaluation.model_validate({"name": "held-out", "source": "s"})
    spec = tiny_spec().model_copy(update={"evaluations": [evaluation]})
    site = Site(tmp_path, spec)
    write_atomic(site.run_dir / "spec.json", dump_resolved(spec))
    keys = {"publisher": site.publisher, "coordinator": site.coordinator}
    keys |= {"validator": site.validator, "evaluator": evaluator}
    named = {role: [key.public_hex] for role, key in keys.items()}
    document = sign_roles(RUN, named, site.root, valid_s=3600.0)
    write_atomic(site.run_dir / "keys" / "roles.json", document)
    return site


def shown(site: Site) -> list[dict[str, object]]:
    return httpx.get(f"{site.url}/v1/evaluations").json()["evaluations"]


def test_a_result_is_stored_once_and_outlives_the_coordinator(
    site: Site, evaluator: SigningKey
) -> None:
    document = sign_evaluation(RESULT, evaluator)
    with site.origin():
        with site.serving():
            client = site.client(evaluator)
            assert client.evaluations() == set()
            # when a result is sent, and another of the same version
            client.evaluated(document)
            client.evaluated(sign_evaluation(replace(RESULT, faults=0), evaluator))
            # then the first is there, as it was signed
            assert client.evaluations() == {("held-out", 2)}
            stored = evaluation_file(site.run_dir, "held-out", 2).read_bytes()
            assert stored == document
            assert open_evaluation(stored, evaluators=frozenset({evaluator.public_hex})) == RESULT
            (row,) = shown(site)
            assert row["figures"] == {"mean": [0.5, 0.2, 0.8], "pass-2": [1.0, None, None]}
        # and a new coordinator has it too
        with site.serving():
            assert site.client(evaluator).evaluations() == {("held-out", 2)}


def test_nobody_else_and_nothing_else_is_believed(site: Site, evaluator: SigningKey) -> None:
    with site.origin(), site.serving():
        stranger, client = SigningKey.generate(), site.client(evaluator)
        for key in (stranger, site.validator):
            with pytest.raises(UserError, match="403"):
                site.client(key).evaluated(sign_evaluation(RESULT, key))
        with pytest.raises(UserError, match=r"400, .*may not sign it"):
            client.evaluated(sign_evaluation(RESULT, stranger))
        for wrong, words in (
            (replace(RESULT, run="other"), "another run or evaluation"),
            (replace(RESULT, evaluation="other"), "another run or evaluation"),
            (replace(RESULT, version=4), "version 4 of a run of 3 steps"),
            (replace(RESULT, evaluation="../v1"), "evaluation"),
            (replace(RESULT, faults=-1), "faults"),
        ):
            with pytest.raises(UserError, match=f"400, .*{words}"):
                client.evaluated(sign_evaluation(wrong, evaluator))
        assert shown(site) == []
    assert not (site.run_dir / "evaluations").exists()
