"""A real language model small enough for tests, its task, an honest worker and a prefill engine.

The policy is a recurrent network in numpy: h_t = tanh(E[x_t] + h_{t-1} A), the final hidden state
h_t / rms(h_t), logits = hidden W. It is no stand-in for a result: what is sampled, proved and
recomputed is computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from verify.formats.lease import Assignment, Lease, assignments, episode_seed, lease_digest
from verify.formats.submission import Rollout
from verify.noise import gumbel, noise_key
from verify.plugins import (
    Graded,
    GradeItem,
    GraderFault,
    PrefillInput,
    PrefillOutput,
    Problem,
    TaskSet,
)
from verify.toploc import build_proofs
from verify.truncation import Truncation, describe, judged, thresholds

VOCAB, HIDDEN, EOS = 48, 64, 0
RUN = "small"


def fixed_key(number: int) -> SigningKey:
    """A key that is the same in every test run, and so are the leases' seeds."""
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))


def small_spec(**changes: object) -> RunSpec:
    """A spec of one pool for the small model; keyword arguments replace fields of the pool."""
    pool = {
        "name": "home",
        "hardware": {"kind": "cpu"},
        "dtype": "float32",
        "max_model_len": 128,
        "max_new_tokens": 40,
        "groups_per_submission": 2,
        "sampling": {"temperature": 0.8, "seeded": True},
    }
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": RUN,
            "seed": 1,
            "steps": 4,
            "model": {"hf": "small", "max_context": 128},
            "data": {"max_prompt_tokens": 32, "sources": [{"name": "parity", "kind": "parity"}]},
            "algorithm": {"prompts_per_step": 4, "group_size": 4},
            "optimizer": {"lr": 1e-3},
            "reward": [{"name": "parity", "kind": "parity"}],
            "learner": {
                "hardware": {"kind": "cpu"},
                "packing": {"tokens": 128, "rows": 1},
                "compute_dtype": "float32",
            },
            "samplers": [{**pool, **changes}],
        }
    )


@dataclass(frozen=True)
class SmallModel:
    """Parameters of one policy version."""

    embed: np.ndarray
    """f32 [V, D]."""
    mix: np.ndarray
    """f32 [D, D]."""
    head: np.ndarray
    """f32 [D, V]."""
    dtype: type = np.float32
    """What activations are rounded to."""

    @classmethod
    def random(cls, seed: int) -> SmallModel:
        rng = np.random.default_rng(seed)
        embed = rng.normal(size=(VOCAB, HIDDEN))
        mix = rng.normal(size=(HIDDEN, HIDDEN)) * 0.7 / HIDDEN**0.5
        head = rng.normal(size=(HIDDEN, VOCAB)) * 2.0 / HIDDEN**0.5
        return cls(*(a.astype(np.float32) for a in (embed, mix, head)))

    def perturbed(self, scale: float, seed: int = 0) -> SmallModel:
        """The same with relative Gaussian noise on every weight."""
        rng = np.random.default_rng(seed)
        arrays = [(name, getattr(self, name)) for name in ("embed", "mix", "head")]
        noisy = {name: a * (1 + scale * rng.normal(size=a.shape)) for name, a in arrays}
        return replace(self, **{name: a.astype(np.float32) for name, a in noisy.items()})

    def in_bfloat16(self) -> SmallModel:
        """The same model on an engine that rounds every activation to bf16."""
        return replace(self, dtype=ml_dtypes.bfloat16)

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """The state after some tokens, f32 [D]."""
        state = np.zeros(HIDDEN, np.float32)
        for token in tokens:
            state = self.step(state, token)
        return state

    def step(self, state: np.ndarray, token: int) -> np.ndarray:
        return self._round(np.tanh(self.embed[token] + state @ self.mix))

    def output(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Final hidden state f32 [D] and logits f32 [V]."""
        hidden = self._round(state / np.sqrt(np.mean(state**2)))
        return hidden, self._round(hidden @ self.head)

    def _round(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype).astype(np.float32)


def bf16_bits(hidden: np.ndarray) -> np.ndarray:
    """f32 [n, D] rounded to bf16, as u16."""
    return hidden.astype(ml_dtypes.bfloat16).view(np.uint16)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f32 [..., V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass
class ParityTask(TaskSet):
    """Rewards even tokens, and outputs as long as asked for."""

    eos_token_id: int = EOS
    targets: list[int] = field(default_factory=lambda: [8, 24])
    faulty: frozenset[int] = frozenset()
    """Problems on which the grader fails."""
    repeatable: bool = True

    def __len__(self) -> int:
        return 30

    def problem(self, index: int) -> Problem:
        return Problem(f"parity-{index}", "parity", f"problem {index}", {})

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        assert target is not None
        return [1 + index % (VOCAB - 1), 1 + index * 7 % (VOCAB - 1), target]

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        return [self._grade(item) for item in items]

    def close(self) -> None:
        """Nothing is open."""

    def _grade(self, item: GradeItem) -> Graded | GraderFault:
        if item.problem in self.faulty:
            return GraderFault(f"the grader of problem {item.problem} hung")
        assert item.target is not None
        tokens = item.output_tokens
        task = sum(token % 2 == 0 for token in tokens) / len(tokens)
        length = -0.01 * abs(item.target - len(tokens))
        return Graded(task, length, task + length, repeatable=self.repeatable)


@dataclass
class NumpyEngine:
    """A prefill engine over small models."""

    versions: dict[int, SmallModel]
    directory: Path
    prefills: list[int] = field(default_factory=list)
    """Rollouts of each call."""

    def close(self) -> None:
        """Nothing is open."""

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        path = self.directory / f"v{version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
        return path

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        self.prefills.append(len(inputs))
        model = self.versions[version]
        return [recomputed(model, item, temperature, truncation) for item in inputs]


def recomputed(
    model: SmallModel, item: PrefillInput, temperature: float, truncation: Truncation | None = None
) -> PrefillOutput:
    """Claims of every output token. States follow one another, all the rest is done at once."""
    state = model.read(item.prompt_tokens)
    hidden, logits = [], []
    for token in item.output_tokens:
        row, scores = model.output(state)
        hidden.append(row)
        logits.append(scores)
        state = model.step(state, token)
    own_rows = item.sampled
    hidden, logits = np.array(hidden)[own_rows], np.array(logits)[own_rows]
    scaled = logits / np.float32(temperature)
    noise = token_noise(item.noise_key or (0, 0), np.arange(len(scaled), dtype=np.int32)[:, None])
    own = np.arange(VOCAB) == item.output_tokens[own_rows, None]
    choices = None
    if item.end_token is not None:
        choices = describe(np, scaled, own, np.arange(VOCAB)[None] == item.end_token, truncation)
    if truncation is None:
        noisy = scaled + noise
        logprobs, gaps = log_softmax(scaled)[own], noisy.max(-1) - noisy[own]
    else:
        logprobs, gaps = judged(np, scaled, noise, own, truncation)
    return PrefillOutput(
        logprobs=logprobs.astype(np.float32),
        hidden=bf16_bits(hidden),
        seeded_gap=None if item.noise_key is None else gaps.astype(np.float32),
        choices=choices,
    )


def token_noise(key: tuple[int, int], position: int | np.ndarray) -> np.ndarray:
    """f32 [V] of a position, [n, V] of i32 [n, 1] positions."""
    with np.errstate(over="ignore"):  # 32-bit hashing wraps on purpose
        return gumbel(
            np,
            np.int32(key[0]),
            np.int32(key[1]),
            np.asarray(position, np.int32),
            np.arange(VOCAB, dtype=np.int32),
        )


@dataclass
class Worker:
    """Samples what a lease asks for, honestly; an attack overrides one of its methods."""

    key: SigningKey
    model: SmallModel
    spec: RunSpec
    task_set: ParityTask

    @property
    def truncation(self) -> Truncation | None:
        """What it cuts; no margin, which is the validator's."""
        sampling = self.spec.samplers[0].sampling
        rule = Truncation(sampling.top_p, sampling.top_k)
        return rule if rule.cuts else None

    def rollouts(self, signed_lease: bytes, lease: Lease) -> list[Rollout]:
        """Every sample of every group of a lease."""
        given = assignments(lease, n_problems=len(self.task_set), targets=self.task_set.targets)
        samples = range(self.spec.algorithm.group_size)
        digest = lease_digest(signed_lease)
        return [self._rollout(lease, digest, task, n) for task in given for n in samples]

    def sample(self, prompt: list[int], key: tuple[int, int]) -> list[int]:
        """Output tokens: argmax(logits / T + noise) until the end token."""
        pool = self.spec.samplers[0]
        state = self.model.read(prompt)
        noise = token_noise(key, np.arange(pool.max_new_tokens, dtype=np.int32)[:, None])
        tokens: list[int] = []
        while len(tokens) < pool.max_new_tokens and (not tokens or tokens[-1] != EOS):
            _, logits = self.model.output(state)
            scaled = logits / np.float32(pool.sampling.temperature)
            if (rule := self.truncation) is not None:
                least = thresholds(np, scaled, rule).kept
                scaled = np.where(scaled >= least, scaled, -np.inf)
            tokens.append(int(np.argmax(scaled + noise[len(tokens)])))
            state = self.model.step(state, tokens[-1])
        return tokens

    def explain(self, prompt: list[int], tokens: list[int]) -> PrefillOutput:
        """The log-probs and hidden states that the worker claims for its tokens."""
        item = PrefillInput(np.array(prompt, np.int32), np.array(tokens, np.int32), None)
        pool = self.spec.samplers[0]
        return recomputed(self.model, item, pool.sampling.temperature, self.truncation)

    def _rollout(self, lease: Lease, digest: str, task: Assignment, sample: int) -> Rollout:
        sampling = self.spec.samplers[0].sampling
        seed = episode_seed(lease, task.group)
        prompt = self.task_set.prompt_tokens(task.problem, task.target, seed)
        tokens = self.sample(prompt, noise_key(lease.seed, task.group, sample))
        claims = self.explain(prompt, tokens)
        (graded,) = self.task_set.grade_all([GradeItem(task.problem, task.target, tokens)])
        if isinstance(graded, GraderFault):
            graded = Graded(0.0, 0.0, 0.0, reason=str(graded))
        return Rollout(
            run=lease.run,
            step=lease.step,
            worker=lease.worker,
            lease=digest,
            problem_id=self.task_set.problem(task.problem).problem_id,
            group=task.group,
            sample=sample,
            version=lease.version,
            prompt_tokens=np.array(prompt, np.int32),
            output_tokens=np.array(tokens, np.int32),
            logprobs=claims.logprobs,
            finish_reason="stop" if tokens[-1] == EOS else "length",
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            target=task.target,
            task_reward=graded.task_reward,
            length_penalty=graded.length_penalty,
            proofs=build_proofs(claims.hidden),
        )
