"""Times a validator against the sampler whose work it checks, on the same machine; prints JSON.

    python -m benchmarks.validator_speed [--cache DIR]                       # the laptop profile
    python -m benchmarks.validator_speed --layers 8 --hidden 512 --vocabulary 8192 --new-tokens 128

Two sides in turn, round by round, each with one thread for its arithmetic:
- the sampler: our vLLM engine, seeded, with log-probs and proofs, two leases in flight, a new one
  when one is answered; it neither grades nor packs;
- the validator: the whole of `verify.validator.Validator`, from a queue of signed submissions (up
  to eight at once) to signed verdicts: leases, Parquet, checks, grading, prefill, proofs. Each
  engine in turn judges what the sampler made in that round.
Ratios are of output tokens a second, medians over the rounds, with the least and the largest; by
wall time and by CPU time of all processes of a side. `stages` says where the validator's CPU time
went, in microseconds an output token. Without a size the model is the laptop
profile's after its warm start (kept in --cache); with one a random Qwen2, which writes to the last
token. Load beside it slows both sides: trust the CPU ratio on a machine that is shared.

`limit` is what FLOPs allow: the peak of a core, as a matrix product of 1024 measures it here, over
the FLOPs that a validator needs for an output token (body over prompt and output, no prompt shared,
head over the output), against what the sampler reached in CPU time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

# Read when torch, JAX and vLLM are first imported: a thread for each side's arithmetic.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import torch

import verify.examiner
import verify.recompute
import verify.validator
from benchmarks.sampler_engine import WAIT_S, Side, cpu_s
from benchmarks.sampler_proofs import save_model
from bridge.config import load_config
from learner_jax.prefill import load_policy as load_jax
from learner_jax.prefill import prefill as prefill_jax
from learner_jax.sharding import make_mesh
from runspec.common.hashing import digest_bytes
from runspec.common.keys import SigningKey
from runspec.common.roles import Roles
from runspec.estimate.flops import matrix_parameters
from runspec.lint.check import check_spec
from runspec.spec import schema
from runspec.spec.load import SpecFiles
from runspec.spec.resolved import dump_resolved
from sampler.engine.engine import Engine
from sampler.engine.proofs import prove
from sampler.prefill.engine import load_policy as load_torch
from sampler.prefill.engine import prefill as prefill_torch
from sampler.worker.rollouts import claim_rewards, make_rollouts, plan_rollouts
from tests.verify.one_version import OneVersion
from verify.client import RunFinished, WorkItem
from verify.decoder import Decoder
from verify.formats.lease import Lease, lease_digest, sign_lease
from verify.formats.submission import encode_rollouts, sign_submission
from verify.formats.verdict import open_verdict
from verify.plugins import TaskSet, load_task_set, load_warm_start_data

SPEC = Path(__file__).parent.parent / "specs" / "target_short.yaml"
LEASES_IN_FLIGHT = 2
WORKER, COORDINATOR, VALIDATOR = (SigningKey.generate() for _ in range(3))


def spec_for(options: argparse.Namespace) -> schema.RunSpec:
    """The laptop profile, with the sizes asked for."""
    sets = ["name=validator-speed", f"algorithm.group_size={options.group_size}"]
    if options.layers:
        longest = 64 + options.new_tokens
        heads = max(1, options.hidden // 64)
        sets += [
            f"model.shape.num_hidden_layers={options.layers}",
            f"model.shape.hidden_size={options.hidden}",
            f"model.shape.intermediate_size={3 * options.hidden}",
            f"model.shape.vocab_size={options.vocabulary}",
            f"model.shape.num_attention_heads={heads}",
            f"model.shape.num_key_value_heads={max(1, heads // 4)}",
            f"model.max_context={longest}",
            f"samplers.volunteers.max_new_tokens={options.new_tokens}",
            f"samplers.volunteers.max_model_len={longest}",
            f"learner.packing.tokens={longest}",
        ]
    sets += [f"samplers.volunteers.dtype={options.dtype}", f"learner.compute_dtype={options.dtype}"]
    return check_spec(SpecFiles(SPEC, profile="laptop", overrides=sets)).require()


def make_version(spec: schema.RunSpec, options: argparse.Namespace, folder: Path) -> Path:
    """Version 0: after the profile's warm start, or random where a size was asked for."""
    if not options.layers:
        run = folder / "run"
        run.mkdir()
        (run / "spec.json").write_bytes(dump_resolved(spec))
        command = [sys.executable, "-m", "learner_jax", "warm-start", str(run)]
        cache = options.cache or folder / "cache"
        mesh = "--xla_force_host_platform_device_count=2"  # the profile's
        subprocess.run(
            [*command, "--cache", str(cache)],
            check=True,
            stdout=sys.stderr,
            env={**os.environ, "XLA_FLAGS": mesh},
        )
        return run / "initial"
    shape = {"prompt_tokens": 64, **vars(options)}
    version = save_model(folder / "v0", argparse.Namespace(**shape), torch.float32)
    load_warm_start_data(spec).write_tokenizer(version)
    return version


@dataclass(frozen=True)
class Handed:
    """A submission as a coordinator has it."""

    item: WorkItem
    table: bytes
    tokens: int
    """Output tokens."""
    prompts: int
    """Prompt tokens."""


class Sampler:
    """Samples leases, and makes submissions of the last ones."""

    def __init__(
        self, engine: Engine, tasks: TaskSet, spec: schema.RunSpec, options: argparse.Namespace
    ) -> None:
        self._engine, self._tasks, self._spec = engine, tasks, spec
        self._pool, self._options = spec.samplers[0], options
        self._index = 0
        self._done: list[tuple[bytes, Lease, Any, Any, Any]] = []

    def sample(self) -> int:
        """Samples and proves `leases` leases, two in flight; counts output tokens."""
        left = [self._lease() for _ in range(self._options.leases)]
        flying, self._done, tokens = [], [], 0
        while left or flying:
            while left and len(flying) < LEASES_IN_FLIGHT:
                signed, lease = left.pop()
                plan = plan_rollouts(
                    lease, self._tasks, self._pool, group_size=self._spec.algorithm.group_size
                )
                flying.append((signed, lease, plan, self._engine.submit([p.request for p in plan])))
            signed, lease, plan, future = flying.pop(0)
            sampled = future.result(WAIT_S)
            tokens += sum(len(each.output_tokens) for each in sampled)
            self._done.append((signed, lease, plan, sampled, prove(sampled)))
        return tokens

    def submissions(self) -> list[Handed]:
        """What was sampled last, as a worker hands it in."""
        return [self._submission(*each) for each in self._done]

    def _lease(self) -> tuple[bytes, Lease]:
        spec, index = self._spec, self._index
        self._index += 1
        lease = Lease(
            run=spec.name,
            step=0,
            nonce="0a" * 32,
            worker=WORKER.public_hex,
            pool=self._pool.name,
            index=index,
            groups=self._options.groups,
            version=0,
            manifest_digest="ab" * 32,
            issued=0.0,
            expires=1e12,
        )
        return sign_lease(lease, COORDINATOR), lease

    def _submission(
        self, signed: bytes, lease: Lease, plan: Any, sampled: Any, proofs: Any
    ) -> Handed:
        digest = lease_digest(signed)
        claims = claim_rewards(plan, sampled, self._tasks)
        rows = make_rollouts(
            lease, digest, plan, sampled, claims, proofs, tasks=self._tasks, pool=self._pool
        )
        table = encode_rollouts(rows)
        envelope = sign_submission(
            table, run=lease.run, step=lease.step, index=lease.index, lease=digest, key=WORKER
        )
        item = WorkItem(digest_bytes(table), signed, envelope, 1.0)
        tokens, prompts = (
            sum(len(getattr(row, name)) for row in rows)
            for name in ("output_tokens", "prompt_tokens")
        )
        return Handed(item, table, tokens, prompts)


@dataclass
class Queue:
    """The coordinator's side, in memory: hands out submissions, takes verdicts."""

    waiting: list[Handed] = field(default_factory=list)
    tables: dict[str, bytes] = field(default_factory=dict)
    accepted: int = 0

    def offer(self, handed: Sequence[Handed]) -> None:
        self.waiting = list(handed)
        self.tables = {each.item.submission: each.table for each in handed}
        self.accepted = 0

    def roles(self) -> Roles:
        held = {"publisher": (), "coordinator": (COORDINATOR,), "validator": (VALIDATOR,)}
        keys = {role: frozenset(key.public_hex for key in held[role]) for role in held}
        return Roles("validator-speed", 0.0, 1e12, **keys)

    def next_submission(self, wait_s: float) -> WorkItem | None:
        if self.waiting:
            return self.waiting.pop(0).item
        if wait_s:
            raise RunFinished
        return None

    def download(self, digest: str) -> bytes:
        return self.tables[digest]

    def verdict(self, envelope: bytes, table: bytes) -> None:
        verdict = open_verdict(envelope, validators=self.roles().validator)
        if not verdict.accepted:
            raise RuntimeError(f"an honest submission was rejected: {verdict.reason}")
        self.accepted += 1

    def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
        raise RuntimeError(f"no verdict on {len(submissions)} submissions: {fault}")


class Judge:
    """A validator with one engine, and the queue that it serves."""

    def __init__(
        self, spec: schema.RunSpec, engine: OneVersion, tasks: TaskSet, decoder: Decoder
    ) -> None:
        self._spec, self._engine, self._tasks, self._decoder = spec, engine, tasks, decoder
        self._queue = Queue()
        self._handed: list[Handed] = []
        self._validator = self._make()

    def give(self, handed: list[Handed]) -> None:
        self._handed = handed

    def judge(self) -> int:
        """Judges what was given; counts output tokens."""
        self._queue.offer(self._handed)
        self._validator.serve(threading.Event())
        if self._queue.accepted != len(self._handed):
            raise RuntimeError("not every submission has a verdict")
        return sum(each.tokens for each in self._handed)

    def stages(self, others: Sequence[int]) -> dict[str, float]:
        """CPU microseconds an output token of one more pass, by stage.

        Args:
            others: the processes that grade and parse.
        """
        spent: dict[str, float] = defaultdict(float)
        before = cpu_s(others)
        with ExitStack() as stack:
            for name, where, what in (
                ("parse", verify.examiner, "open_rows"),
                ("grade", verify.examiner, "grade"),
                ("prefill", self._engine, "prefill"),
                ("proofs", verify.recompute, "verify_proofs_batch"),
                ("fingerprints", verify.examiner, "fingerprints"),
                ("checks", verify.examiner, "examine"),
                ("sign", verify.validator, "encode_verdicts"),
                ("all", self, "judge"),
            ):
                stack.enter_context(_timed(where, what, spent, name))
            tokens = self.judge()
        spent["rest"] = 2 * spent["all"] - sum(spent.values())
        spent["graders and decoder"] = cpu_s(others) - before
        return {name: round(1e6 * seconds / tokens, 2) for name, seconds in spent.items()}

    def _make(self) -> verify.validator.Validator:
        return verify.validator.Validator(
            self._spec,
            VALIDATOR,
            self._queue,
            self._engine,
            decode=self._decoder.decode,
            task_set_of=lambda directory: self._tasks,
            log=logging.getLogger("validator"),
        )


@contextmanager
def _timed(where: Any, what: str, spent: dict[str, float], name: str) -> Iterator[None]:
    """Adds to `spent[name]` the CPU seconds in a function of a module or an object."""
    function = getattr(where, what)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.process_time() - begun

    with mock.patch.object(where, what, timed):
        yield


def peak_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a core, by the best of some matrix products."""
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(20):
        begun = time.perf_counter()
        a @ b
        best = max(best, 2 * 1024**3 / (time.perf_counter() - begun))
    return best


def children(without: Sequence[int]) -> list[int]:
    """Processes below this one, but for some: the graders and the decoder."""
    tasks = Path("/proc/self/task").iterdir()
    found = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return sorted(found - set(without))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    spec = spec_for(options)
    version = make_version(spec, options, folder)
    tasks = load_task_set(spec, version)
    policies = {
        "jax": (prefill_jax, load_jax(version, spec.learner, make_mesh(schema.Mesh()))),
        "torch": (prefill_torch, load_torch(version, spec.learner, torch.device("cpu"))),
    }
    with (
        closing(tasks),
        closing(Decoder()) as decoder,
        closing(Engine(spec.samplers[0], probe=False)) as engine,
    ):
        judges = {
            name: Judge(spec, OneVersion(prefill, policy, version), tasks, decoder)
            for name, (prefill, policy) in policies.items()
            if name in options.engines
        }
        engine.load(version, 0)
        sampler = Sampler(engine, tasks, spec, options)
        sampler.sample()
        warm = sampler.submissions()
        for judge in judges.values():
            judge.give(warm)
            judge.judge()
        others = children(engine.pids)
        sampling = Side(sampler.sample, engine.pids)
        judging = {name: Side(judge.judge, others) for name, judge in judges.items()}
        stages: dict[str, list[dict[str, float]]] = defaultdict(list)
        peaks = []
        for _ in range(options.rounds):
            sampling.round()
            handed = sampler.submissions()
            peaks.append(peak_flops(getattr(torch, options.dtype)))
            for name, judge in judges.items():
                judge.give(handed)
                judging[name].round()
                stages[name].append(judge.stages(others))
    tokens, prompts = sum(h.tokens for h in handed), sum(h.prompts for h in handed)
    row: dict[str, Any] = {
        "sequences_in_flight": LEASES_IN_FLIGHT * options.groups * options.group_size,
        "rollouts_a_round": options.leases * options.groups * options.group_size,
        "mean_prompt": round(prompts / options.leases / options.groups / options.group_size, 1),
        "mean_output": round(tokens / options.leases / options.groups / options.group_size, 1),
        "sampler_tokens_per_s": spread(sampling.wall),
        "sampler_tokens_per_cpu_s": spread(sampling.cpu),
    }
    row |= limit(version, tokens, prompts, median(peaks), median(sampling.cpu))
    for name, side in judging.items():
        row[name] = {
            "tokens_per_s": spread(side.wall),
            "ratio": spread(_ratios(side.wall, sampling.wall)),
            "cpu_ratio": spread(_ratios(side.cpu, sampling.cpu)),
            "stages": {
                stage: round(median(each.get(stage, 0.0) for each in stages[name]), 2)
                for stage in stages[name][0]
            },
        }
    return row


def limit(
    version: Path, tokens: int, prompts: int, peak: float, reached: float
) -> dict[str, float]:
    """The ratio that FLOPs allow, without attention: a validator that does nothing else."""
    config = load_config(version)
    head = config.vocab_size * config.hidden_size
    body = matrix_parameters(config) - head
    flops = 2.0 * (body * (tokens + prompts) + head * tokens) / tokens
    return {
        "peak_gflops": round(peak / 1e9, 1),
        "mflop_an_output_token": round(flops / 1e6, 3),
        "limit": round(peak / flops / reached, 2),
    }


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """The least, the median, the largest."""
    return [float(f"{value:.4g}") for value in (min(values), median(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=8, help="of a lease")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--leases", type=int, default=8, help="a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=0, help="0: the laptop profile's model")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engines", nargs="+", default=["jax", "torch"])
    parser.add_argument("--cache", type=Path, help="where warm starts are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(options, Path(folder))
    print(json.dumps({"benchmark": "validator_speed", **row}))


if __name__ == "__main__":
    main()
