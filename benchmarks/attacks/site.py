"""A run in memory: leases, signed submissions, the examiner with the JAX prefill.

Nothing of the validator is replaced but the way in which weights reach its engine. Outputs of the
engine are kept while the same rollouts are judged under other claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.attacks.engine import LONGEST, TEMPERATURE, Sampled
from benchmarks.attacks.policies import END, PROMPT, Weights
from learner_jax.prefill import Policy, prefill
from learner_jax.sharding import make_mesh
from runspec.core import schema
from runspec.core.canonical import digest_bytes
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from verify.checks import Subject
from verify.examiner import Examiner, SubmissionFile, Verdict
from verify.formats.lease import Lease, assignments, lease_digest, sign_lease
from verify.formats.submission import Rollout, encode_rollouts, sign_submission
from verify.noise import noise_key
from verify.plugins import (
    Graded,
    GradeItem,
    GraderFault,
    PrefillInput,
    PrefillOutput,
    Problem,
    TaskSet,
)
from verify.recompute import prefill_request, recompute
from verify.thresholds import Limits, limits_for
from verify.toploc import build_proofs_batch
from verify.truncation import Truncation

RUN = "attacks"
GROUPS, GROUP_SIZE = 2, 4
ROLLOUTS = GROUPS * GROUP_SIZE
"""Of a submission."""


@dataclass
class LettersTask(TaskSet):
    """Problems are beginnings of text; the reward is the share of letters in the output."""

    prompts: np.ndarray
    """i32 [n, 32]."""
    eos_token_id: int = END
    targets: list[int] = field(default_factory=list)
    data_digest: str = "0" * 64

    def __len__(self) -> int:
        return len(self.prompts)

    def problem(self, index: int) -> Problem:
        return Problem(f"text-{index}", "letters", "", {})

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        tokens: list[int] = self.prompts[index].tolist()
        return tokens

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        rewards = [sum(chr(t).isalpha() for t in i.output_tokens) for i in items]
        return [
            Graded(reward / len(item.output_tokens), 0.0, reward / len(item.output_tokens))
            for item, reward in zip(items, rewards, strict=True)
        ]

    def close(self) -> None:
        """Nothing is open."""


class Engine:
    """A `verify.plugins.PrefillEngine` over weights at hand; remembers what it computed."""

    def __init__(self, weights: Weights, spec: RunSpec) -> None:
        mesh = make_mesh(schema.Mesh(fsdp=len(jax.devices())))
        self._policy = Policy(weights.params, weights.config, spec.learner, mesh)
        self._known: dict[tuple[object, ...], PrefillOutput] = {}

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        return Path()

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        names = [
            (each.prompt_tokens.tobytes(), each.output_tokens.tobytes(), each.noise_key)
            for each in inputs
        ]
        new = [i for i, name in enumerate(names) if name not in self._known]
        outputs = prefill(
            self._policy,
            [inputs[i] for i in new],
            temperature=temperature,
            truncation=truncation,
        )
        self._known.update(zip([names[i] for i in new], outputs, strict=True))
        return [self._known[name] for name in names]

    def forget(self) -> None:
        """Frees what was remembered."""
        self._known.clear()

    def close(self) -> None:
        """No connection is open."""


@dataclass(frozen=True)
class Leases:
    """What some leases ask for, row by row."""

    signed: list[bytes]
    leases: list[Lease]
    prompts: np.ndarray
    """i32 [M, 32]."""
    keys: np.ndarray
    """i32 [M, 2]."""


@dataclass(frozen=True)
class Pair:
    """A sampler pool and a validator, by their types."""

    sampler: str
    validator: str

    def __str__(self) -> str:
        return f"{self.sampler} / {self.validator}"


class Site:
    """One run of one pool.

    Args:
        weights: of the leased version.
        prompts: i32 [n, 32], the problems.
        pair: types that sampler and validator compute in.
    """

    def __init__(self, weights: Weights, prompts: np.ndarray, pair: Pair) -> None:
        self.spec = _spec(pair)
        self.pair, self.task_set = pair, LettersTask(prompts)
        self._vocab_size = weights.config.vocab_size
        self.engine = Engine(weights, self.spec)
        self.limits: Limits = limits_for(pair.sampler, pair.validator)
        self._worker, self._coordinator = _key(1), _key(2)
        self._examiner = Examiner(
            self.spec,
            task_set=self.task_set,
            engine=self.engine,
            vocab_size=self._vocab_size,
            wants_prefill=lambda submission: True,
        )

    def leases(self, first: int, rollouts: int) -> Leases:
        """Whole leases, numbered from `first`, for at least so many rollouts."""
        signed, leases, prompts, keys = [], [], [], []
        for index in range(first, first + -(-rollouts // ROLLOUTS)):
            lease = Lease(
                run=RUN,
                step=0,
                nonce="ab" * 32,
                worker=self._worker.public_hex,
                pool="home",
                index=index,
                groups=GROUPS,
                version=0,
                manifest_digest="cd" * 32,
                issued=0.0,
                expires=1e9,
            )
            leases.append(lease)
            signed.append(sign_lease(lease, self._coordinator))
            for task in assignments(lease, n_problems=len(self.task_set), targets=[]):
                for number in range(GROUP_SIZE):
                    prompts.append(self.task_set.prompts[task.problem])
                    keys.append(noise_key(lease.seed, task.group, number))
        return Leases(signed, leases, np.array(prompts, np.int32), np.array(keys, np.int32))

    def recomputed(self, leases: Leases, sampled: Sampled) -> list[PrefillOutput]:
        """What the validator's engine says of outputs."""
        inputs = [
            PrefillInput(prompt, tokens[:n], (int(key[0]), int(key[1])))
            for prompt, tokens, n, key in zip(
                leases.prompts, sampled.tokens, sampled.lengths, leases.keys, strict=True
            )
        ]
        return self.engine.prefill(0, inputs, temperature=TEMPERATURE)

    def claimed_by_validator(self, leases: Leases, sampled: Sampled) -> Sampled:
        """The same outputs with claims that no check of claims can find fault with."""
        outputs = self.recomputed(leases, sampled)
        logprobs = sampled.logprobs.copy()
        hidden = np.zeros((*logprobs.shape, outputs[0].hidden.shape[1]), np.uint16)
        for m, output in enumerate(outputs):
            n = len(output.logprobs)
            logprobs[m, :n], hidden[m, :n] = output.logprobs, output.hidden
        return Sampled(sampled.tokens, sampled.lengths, logprobs, sampled.chosen, hidden)

    def rollouts(self, leases: Leases, sampled: Sampled) -> list[Rollout]:
        """Rows as a worker hands them in, graded honestly, with proofs of the claimed states."""
        lengths = sampled.lengths
        proofs = build_proofs_batch([h[:n] for h, n in zip(sampled.hidden, lengths, strict=True)])
        rows: list[Rollout] = []
        for signed, lease in zip(leases.signed, leases.leases, strict=True):
            digest = lease_digest(signed)
            for task in assignments(lease, n_problems=len(self.task_set), targets=[]):
                for number in range(GROUP_SIZE):
                    m = len(rows)
                    tokens = sampled.tokens[m, : lengths[m]]
                    (grade,) = self.task_set.grade_all([GradeItem(0, None, tokens.tolist())])
                    assert isinstance(grade, Graded)
                    rows.append(
                        Rollout(
                            run=RUN,
                            step=0,
                            worker=lease.worker,
                            lease=digest,
                            problem_id=self.task_set.problem(task.problem).problem_id,
                            group=task.group,
                            sample=number,
                            version=0,
                            prompt_tokens=leases.prompts[m],
                            output_tokens=tokens,
                            logprobs=sampled.logprobs[m, : lengths[m]],
                            finish_reason="stop" if tokens[-1] == END else "length",
                            temperature=TEMPERATURE,
                            top_p=1.0,
                            top_k=-1,
                            target=None,
                            task_reward=grade.task_reward,
                            length_penalty=0.0,
                            proofs=proofs[m],
                        )
                    )
        return rows

    def examine(self, leases: Leases, rows: list[Rollout]) -> list[Verdict]:
        """Signs and encodes whole submissions, and has them judged."""
        files = []
        for number, (signed, lease) in enumerate(zip(leases.signed, leases.leases, strict=True)):
            table = encode_rollouts(rows[ROLLOUTS * number : ROLLOUTS * (number + 1)])
            digest = lease_digest(signed)
            envelope = sign_submission(
                table, run=RUN, step=0, index=lease.index, lease=digest, key=self._worker
            )
            files.append(SubmissionFile(digest_bytes(table), lease, digest, envelope, table))
        return self._examiner.examine(files)

    def subject(self, leases: Leases, rows: list[Rollout]) -> Subject:
        """All rows as one submission: what the checks of rows need of it."""
        requests = [
            prefill_request(row, leases.leases[m // ROLLOUTS], seeded=True, end_token=END)
            for m, row in enumerate(rows)
        ]
        return Subject(
            submission="",
            rollouts=rows,
            lease=leases.leases[0],
            lease_digest="",
            pool=self.spec.samplers[0],
            group_size=GROUP_SIZE,
            vocab_size=self._vocab_size,
            task_set=self.task_set,
            assignments=[],
            limits=self.limits,
            last_version=1,
            recomputed=[*recompute(self.engine, 0, requests, temperature=TEMPERATURE)],
        )


def _key(number: int) -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


def _spec(pair: Pair) -> RunSpec:
    pool = {
        "name": "home",
        "hardware": {"kind": "cpu"},
        "dtype": pair.sampler,
        "max_model_len": PROMPT + LONGEST,
        "max_new_tokens": LONGEST,
        "groups_per_submission": GROUPS,
        "sampling": {"temperature": TEMPERATURE, "seeded": True},
    }
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": RUN,
            "seed": 1,
            "steps": 1,
            "model": {"hf": "trained-here", "max_context": PROMPT + LONGEST},
            "data": {"max_prompt_tokens": PROMPT, "sources": [{"name": "text", "kind": "text"}]},
            "algorithm": {"prompts_per_step": GROUPS, "group_size": GROUP_SIZE},
            "optimizer": {"lr": 1e-3},
            "reward": [{"name": "letters", "kind": "letters"}],
            "learner": {
                "hardware": {"kind": "cpu"},
                "packing": {"tokens": 2 * (PROMPT + LONGEST), "rows": 16},
                "compute_dtype": pair.validator,
            },
            "samplers": [pool],
        }
    )
