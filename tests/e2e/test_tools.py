"""A run of several turns, from a stranger's tool calls to trained versions and an audit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from runspec.core.run_files import submission_files
from runspec.core.schema.load import load_resolved
from tests.harness import runspec
from verify.formats.batch import FILE_NAME
from verify.formats.submission import decode_rollouts
from verify.formats.verdict import decode_verdicts

pytestmark = pytest.mark.nightly


def test_an_untrusted_workers_turns_are_replayed_trained_and_audited(tmp_path):
    # given a run of specs/tools.yaml, its warm start and all
    words = ("specs/tools.yaml", "--profile", "laptop", "--runs-dir", tmp_path)
    changes = {"name": "tools", "steps": 6, "warm_start.stop_answer_probability": 0.1}
    overrides = [word for path, value in changes.items() for word in ("--set", f"{path}={value}")]
    done = runspec("apply", *words, *overrides, timeout_s=3600.0)
    assert done.returncode == 0, done.stdout + done.stderr
    # when what was trained is read
    run_dir, turns = tmp_path / "tools", []
    assert load_resolved(run_dir).samplers[0].trust == "untrusted"
    for path in sorted((run_dir / "rollouts").glob(f"step_*/{FILE_NAME}")):
        for group in json.loads(path.read_text())["payload"]["groups"]:
            files = submission_files(run_dir, group["step"], group["submission"])
            rows = decode_rollouts(files.submission.read_bytes(), max_rows=4096, max_bytes=1 << 26)
            for row, verdict in zip(rows, decode_verdicts(files.verdict.read_bytes()), strict=True):
                # then each rollout has its turns, and its verdict what stands between them
                assert row.turns.sum() == len(row.output_tokens) == verdict.length
                assert len(verdict.between_lengths) == len(row.turns) - 1
                turns.append(len(row.turns))
    assert max(turns) > 1
    # and none was rejected, and the audit finds nothing
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts_rejected"]) == (6, 0)
    audit = [sys.executable, "-m", "verify", "audit", str(run_dir)]
    done = subprocess.run(audit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
