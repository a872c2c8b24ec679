"""Helpers of the spec's tests: small specs in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from runspec.core.schema.findings import Finding
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import CheckedSpec, check_spec

SPECS = Path(__file__).parents[4] / "specs"
SHIPPED = sorted(SPECS.glob("*.yaml"))
SAMPLING = [
    path for path in SHIPPED if path.stem not in ("metagene", "opendiloco", "smollm2", "tools")
]
"""Specs that every placement fits."""
EXAMPLES = SPECS.parent / "runspec" / "lint" / "examples"
"""Of the rules, a folder each."""
BASE, FLEET = EXAMPLES / "base.yaml", EXAMPLES / "fleet.yaml"
"""What the examples extend."""
DOCUMENTS = EXAMPLES / "documents.yaml"
"""What examples of runs that train on documents extend."""

SMALL = """\
version: runspec/v1
name: small
seed: 1
steps: 3
model: {hf: ./model, max_context: 128}
data:
  max_prompt_tokens: 32
  thinking: required
  sources:
    - {name: words, kind: reasoning_gym, dataset: spell_backward, size: 10}
algorithm: {prompts_per_step: 4, group_size: 4, updates_per_step: 2}
optimizer: {lr: 1e-3}
reward:
  - {name: spelling, kind: reasoning_gym}
  - {name: length, kind: target_length, form: exact, alpha: 0.01, targets: [8, 16]}
learner:
  hardware: {kind: cpu, count: 2}
  mesh: {fsdp: 2}
  packing: {tokens: 128, rows: 4}
  compute_dtype: float32
samplers:
  - {name: pool, hardware: {kind: cpu}, max_model_len: 96, max_new_tokens: 48}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return path


def small_spec(folder: Path, overlay: str = "") -> Path:
    """`spec.yaml` in `folder`, which extends the small spec and says `overlay` over it."""
    write(folder / "base.yaml", SMALL)
    (folder / "model").mkdir(exist_ok=True)
    return write(folder / "spec.yaml", "extends: [base.yaml]\n" + dedent(overlay))


def load(path: Path, *overrides: str, profile: str | None = None, **environ: str) -> CheckedSpec:
    return check_spec(SpecFiles(path, profile=profile, overrides=overrides), environ=environ)


def codes(loaded: CheckedSpec) -> list[str]:
    return [finding.code for finding in loaded.findings]


def find(spec: Path, *overrides: str) -> Sequence[Finding]:
    """What is found in a spec with values laid over it."""
    return load(spec, *overrides).findings


def lines(loaded: CheckedSpec, folder: Path) -> Sequence[str]:
    """Findings as `file:line:column: ...` with file names without the folder."""
    return [str(finding).replace(f"{folder}/", "") for finding in loaded.findings]
