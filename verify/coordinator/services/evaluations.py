"""Stores the evaluator's results, one file for each evaluation of a version, the first one sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.roles import Roles
from runspec.core.run_files import EVALUATIONS_NAME, evaluation_file, evaluation_files
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec
from verify.coordinator.intake import Refusal, refusing
from verify.formats.evaluation import Evaluated, open_evaluation, read_evaluations

_log = logging.getLogger(__name__)


class Evaluations:
    """The results of a run.

    Args:
        run_dir: of the run.
        spec: names the evaluations.
        roles: names the evaluators.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, roles: Roles) -> None:
        self._run_dir, self._spec, self._roles = run_dir, spec, roles
        self._names = {each.name for each in spec.evaluations}
        found = read_evaluations(evaluation_files(run_dir))
        self._known = {(e.evaluation, e.version): _shown(e) for e in found}

    def document(self) -> bytes:
        """Return the answer of `GET /v1/evaluations`: figures without their problems."""
        return json.dumps({"evaluations": list(self._known.values())}).encode()

    def add(self, document: bytes, caller: str) -> None:
        """Store a result; one that is there stays.

        Args:
            document: the signed result.
            caller: public key of the evaluator that sent it.

        Raises:
            Refusal: it is not signed by the caller, not of this run, or cannot be written now.
        """
        with refusing(400, BadSignature):
            result = open_evaluation(document, evaluators=frozenset({caller}))
        if result.run != self._spec.name or result.evaluation not in self._names:
            raise Refusal(400, "a result of another run or evaluation")
        if result.version > self._spec.steps:
            raise Refusal(400, f"version {result.version} of a run of {self._spec.steps} steps")
        key = (result.evaluation, result.version)
        if key in self._known:
            return
        path = evaluation_file(self._run_dir, *key)
        with refusing(503, OSError, UserError):  # such as a full disk: the evaluator tries again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, document)
        self._known[key] = _shown(result)
        _log.info("%s of version %d is stored in %s", *key, EVALUATIONS_NAME)


def _shown(result: Evaluated) -> Mapping[str, Any]:
    figures = {name: [f.value, f.low, f.high] for name, f in result.figures.items()}
    return {
        "evaluation": result.evaluation,
        "version": result.version,
        "finished": result.finished,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "faults": result.faults,
        "figures": figures,
    }
