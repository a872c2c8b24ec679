"""A run directory with real keys, real signatures and real files, for the learner's tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from learner_jax.compile_cache import keep_compiled
from learner_jax.leaves import save_weights
from learner_jax.model import init_params
from learner_jax.step import TrainState
from learner_jax.warm_start import model_config
from runspec.core.canonical import digest_bytes
from runspec.core.files import write_atomic
from runspec.core.models.family import hf_config
from runspec.core.roles import sign_roles
from runspec.core.run_files import step_folder, submission_files
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.core.signed import SigningKey
from verify.formats.batch import BatchGroup, BatchManifest, sign_batch
from verify.formats.submission import Rollout, encode_rollouts, sign_submission
from verify.formats.verdict import (
    RolloutVerdict,
    decode_verdicts,
    encode_verdicts,
    sign_verdict,
)

GROUP_SIZE = 4
VOCABULARY = 32


TINY = f"""
version: runspec/v1
name: tiny
seed: 7
steps: 4
model:
  shape: {{model_type: qwen2, vocab_size: {VOCABULARY}, hidden_size: 16, intermediate_size: 32,
    num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1}}
  max_context: 64
data:
  max_prompt_tokens: 48
  sources:
    - {{name: words, kind: reasoning_gym, dataset: spell_backward, size: 400,
        params: {{min_word_len: 3, max_word_len: 6}}}}
algorithm: {{prompts_per_step: 4, group_size: {GROUP_SIZE}, updates_per_step: 2,
  advantage: {{normalize: none}}, filters: {{zero_variance: false}}, fill: {{deadline: 60s}}}}
optimizer: {{lr: 1.0e-3, clip_norm: 0.5}}
reward: [{{name: task, kind: reasoning_gym}}]
learner: {{hardware: {{kind: cpu, count: 2}}, mesh: {{fsdp: 2}}, packing: {{tokens: 64, rows: 4}},
  compute_dtype: float32}}
samplers:
  - {{name: local, hardware: {{kind: cpu}}, dtype: float32, max_model_len: 64, max_new_tokens: 16}}
broadcast: {{dtype: float32, keep_versions: 3}}
checkpoints: {{every: 2, keep: 2}}
"""


def tiny_spec(**changes: Any) -> RunSpec:
    """A run of two-layer models; `changes` replace whole top-level blocks."""
    blocks = yaml.safe_load(TINY)
    return RunSpec.model_validate({**blocks, **changes})


def changed(spec: RunSpec, **blocks: Mapping[str, Any]) -> RunSpec:
    """The spec with fields of its blocks replaced."""
    return spec.model_copy(
        update={
            name: getattr(spec, name).model_copy(update=fields) for name, fields in blocks.items()
        }
    )


def updates_made(state: TrainState) -> int:
    """The count of the learning rate's schedule."""
    return int(optax.tree.get_all_with_path(state.optimizer, "count")[-1][1])


@dataclass
class Run:
    """A run directory and the keys of everyone who writes into it."""

    path: Path
    spec: RunSpec
    root: SigningKey = field(default_factory=SigningKey.generate)
    coordinator: SigningKey = field(default_factory=SigningKey.generate)
    validator: SigningKey = field(default_factory=SigningKey.generate)
    publisher: SigningKey = field(default_factory=SigningKey.generate)
    worker: SigningKey = field(default_factory=SigningKey.generate)

    def __post_init__(self) -> None:
        keys = self.path / "keys"
        self.root.save(keys / "root.key")
        self.publisher.save(keys / "publisher.key")
        self.sign_roles()
        (self.path / "spec.json").write_bytes(dump_resolved(self.spec))

    def sign_roles(self) -> None:
        roles = {
            "publisher": [self.publisher.public_hex],
            "coordinator": [self.coordinator.public_hex],
            "validator": [self.validator.public_hex],
        }
        data = sign_roles(self.spec.name, roles, self.root, valid_s=3600.0)
        (self.path / "keys" / "roles.json").write_bytes(data)

    def add_submission(
        self, step: int, rollouts: list[Rollout], verdicts: list[RolloutVerdict] | None = None
    ) -> tuple[str, str]:
        """Files a submission and an accepting verdict; returns their digests."""
        table = encode_rollouts(rollouts)
        digest = digest_bytes(table)
        envelope = sign_submission(
            table, run=self.spec.name, step=step, index=0, lease="0" * 64, key=self.worker
        )
        if verdicts is None:
            verdicts = [verdict_on(digest, row, rollout) for row, rollout in enumerate(rollouts)]
        verdict_table = encode_verdicts(verdicts)
        self.file_submission(step, digest, table, envelope)
        self.file_verdict(step, digest, verdict_table)
        return digest, digest_bytes(verdict_table)

    def accept(self, step: int, instead_of: list[BatchGroup], table: bytes) -> str:
        """Files a submission of any bytes as if it had been judged like the one of `instead_of`,
        and a manifest that names it in those groups; returns its digest."""
        judged = submission_files(self.path, step, instead_of[0].submission).verdict
        envelope = sign_submission(
            table, run=self.spec.name, step=step, index=0, lease="0" * 64, key=self.worker
        )
        digest = digest_bytes(table)
        rows = [replace(v, submission=digest) for v in decode_verdicts(judged.read_bytes())]
        verdicts = encode_verdicts(rows)
        self.file_submission(step, digest, table, envelope)
        self.file_verdict(step, digest, verdicts)
        verdict = digest_bytes(verdicts)
        named = [replace(g, submission=digest, verdict=verdict) for g in instead_of]
        self.add_batch(step, named)
        return digest

    def file_submission(self, step: int, digest: str, table: bytes, envelope: bytes) -> None:
        files = submission_files(self.path, step, digest)
        files.submission.parent.mkdir(parents=True, exist_ok=True)
        files.submission.write_bytes(table)
        files.submission_envelope.write_bytes(envelope)

    def file_verdict(
        self,
        step: int,
        digest: str,
        table: bytes,
        *,
        key: SigningKey | None = None,
        accepted: bool = True,
    ) -> None:
        files = submission_files(self.path, step, digest)
        files.verdict.write_bytes(table)
        files.verdict_envelope.write_bytes(
            sign_verdict(
                table,
                run=self.spec.name,
                step=step,
                submission=digest,
                accepted=accepted,
                reason="" if accepted else "toploc",
                dropped_groups=[],
                key=key or self.validator,
            )
        )

    def add_batch(
        self, step: int, groups: list[BatchGroup], *, key: SigningKey | None = None
    ) -> None:
        """Signs the batch manifest of a step."""
        stats = {"task_reward_mean": 0.5, "length_mean": 7.0, "rejected_rollouts": 0}
        manifest = BatchManifest(self.spec.name, step, groups, True, stats, 1, "0" * 64)
        # By rename, as the coordinator does: a learner may be looking.
        write_atomic(
            step_folder(self.path, step) / "batch.json",
            sign_batch(manifest, key or self.coordinator),
        )

    def add_step(self, step: int, *, version: int, groups: int = 4) -> list[BatchGroup]:
        """Files one submission of random groups, and the batch manifest that trains them."""
        rng = np.random.default_rng(step)
        rollouts = [
            random_rollout(self.spec.name, step, group, sample, version, rng)
            for group in range(groups)
            for sample in range(GROUP_SIZE)
        ]
        submission, verdict = self.add_submission(step, rollouts)
        named = [BatchGroup(submission, verdict, g, step, version) for g in range(groups)]
        self.add_batch(step, named)
        return named


def random_rollout(
    run: str, step: int, group: int, sample: int, version: int, rng: np.random.Generator
) -> Rollout:
    length = int(rng.integers(2, 12))
    return Rollout(
        *(run, step, "0" * 64, "0" * 64, f"p{group}", group, sample, version),
        prompt_tokens=rng.integers(0, VOCABULARY, 5).astype(np.int32),
        output_tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        logprobs=np.full(length, -3.5, np.float32),
        finish_reason="stop",
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        target=8,
        task_reward=2.0,
        length_penalty=0.0,
        proofs=[bytes(258)],
    )


def verdict_on(
    submission: str, row: int, rollout: Rollout, *, logprob: float | None = -3.4
) -> RolloutVerdict:
    """A verdict whose numbers all differ from the worker's claims."""
    length = len(rollout.output_tokens)
    task_reward = float(rollout.sample % 2)
    penalty = -0.05 * abs(8 - length)
    return RolloutVerdict(
        submission=submission,
        row=row,
        group=rollout.group,
        task_reward=task_reward,
        length_penalty=penalty,
        reward=task_reward + penalty,
        length=length,
        target=8,
        logprobs=None if logprob is None else np.full(length, logprob, np.float32),
        logprob_diff=None if logprob is None else 0.1,
        checks=[],
    )


def write_initial_model(run: Run, *, seed: int = 0) -> None:
    """A random model and a tokenizer of its vocabulary as `initial`."""
    config = model_config(run.spec)
    directory = run.path / "initial"
    directory.mkdir()
    save_weights(init_params(config, jax.random.key(seed)), config, directory)
    ids = {"eos_token_id": 1, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(hf_config(config, dtype="float32", **ids)))
    words = {f"w{i}": i for i in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled programs: many tests build the same ones anew, and each is compiled once a
    session, whichever of its processes needs it first."""
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent  # of all workers
    folder = session / "compiled"
    keep_compiled(folder)
    return folder


@pytest.fixture(autouse=True)
def products_of_any_precision() -> None:
    """What `full_float32` sets is for a process that computes one run, not for the next test."""
    jax.config.update("jax_default_matmul_precision", None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run", tiny_spec())
