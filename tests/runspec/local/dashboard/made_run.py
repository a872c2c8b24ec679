"""Run directories with rollouts, which no role wrote, and what an exported page holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runspec.core.canonical import digest_bytes
from runspec.core.files import write_atomic
from runspec.core.run_files import initial_model, submission_files
from runspec.core.schema.load import FILE_NAME, dump_resolved
from runspec.local.state import RunState
from tests.runspec.local.fake_run import small_spec
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine import events
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, encode_rollouts
from verify.formats.verdict import CheckResult, RolloutVerdict, encode_verdicts

BEGAN = 1_760_000_000.0
WORKER, VALIDATOR = "aa" * 32, "bb" * 32
REASON = "toploc, row 3: 9 errors (measured 9, limit 8)"
Say = Callable[[int, int, int], str]
"""Returns the output of step, group and sample."""


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte, so that any text is a sequence of its tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def metrics_row(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl that every figure is drawn of."""
    odd = step % 2 == 1
    row = {"step": step, "time": BEGAN + 10.0 * (step + 1), "train_s": 6.0}
    row |= {"wait_s": 0.3 * odd, "waits": {"coordinator": 0.2, "checkpoint": 0.1} if odd else {}}
    row |= {"task_reward": 0.3 + 0.005 * step, "reward": -0.2, "length_error": 12 - 0.1 * step}
    row |= {"by_target": {t: {"length_mean": float(t) + 3} for t in ("8", "16")}}
    row |= {"lag_mean": 1.2, "lag_max": 2, "logprob_diff": 1e-6, "policy_drift": 0.04}
    row |= {"kl": 1e-3, "kl_sampler": 2e-3, "kl_sampler_old": 1e-3, "entropy": 1.5}
    row |= {"ratio_p01": 0.8, "ratio_p50": 1.0, "ratio_p99": 1.3, "grad_norm": 0.3}
    row |= {"clip_fraction_low": 0.01, "clip_fraction_high": 0.02, "clip_fraction_delta": 0.0}
    row |= {"score_s": 0.5, "update_s": 1.5, "tokens_per_s": 9000.0, "mfu": 0.41, "mfu_update": 0.5}
    row |= {"trained_rollouts": 8, "accepted_rollouts": 8, "rejected_rollouts": 0}
    row |= {"learner_busy_fraction": 0.8, "sampler_busy_fraction": 0.7}
    row |= {"verdict_latency_p50": 1.5, "verdict_latency_p99": 4.25}
    return row | {"manifest_latency_p50": 20.0, "manifest_latency_p99": None}


class MadeRun:
    """A run of two groups of four a step; every fifth step's submission is rejected.

    Args:
        runs_dir: folder of runs.
        name: of the run.
        say: texts of its outputs.
    """

    def __init__(
        self, runs_dir: Path, name: str = "small", say: Say = lambda s, g, n: f"out {s}-{g}-{n}"
    ) -> None:
        self.dir, self._say, self.steps = runs_dir / name, say, 0
        self._tokenizer = bytes_tokenizer()
        sizes = ("algorithm.prompts_per_step=2", "algorithm.group_size=4", "evaluations=null")
        sizes += ("algorithm.updates_per_step=2", "changes.calmer.step=7", "changes.calmer.lr=1e-4")
        spec = small_spec(name, 5000, *sizes)
        pools = [pool.model_copy(update={"max_new_tokens": 2**21}) for pool in spec.samplers]
        self.spec = spec.model_copy(update={"samplers": pools})  # room for megabytes
        write_atomic(self.dir / FILE_NAME, dump_resolved(self.spec))
        initial_model(self.dir).mkdir()
        self._tokenizer.save(str(initial_model(self.dir) / "tokenizer.json"))
        with closing(RunState(self.dir)) as state:
            state.begin(name, "0" * 64, self.spec.steps)
            state.set_run("paused", "for a test")
        self._append([events.WorkerRegistered(BEGAN, WORKER, "volunteers")])

    def add_steps(self, count: int) -> None:
        """Trains that many steps more, by the files."""
        new = range(self.steps, self.steps + count)
        self._append(event for step in new for event in self._step(step))
        with (self.dir / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(metrics_row(step)) + "\n" for step in new)
        self.steps += count

    def _append(self, added: Iterable[events.Event]) -> None:
        with closing(Ledger(self.dir / "state.db")) as ledger:
            ledger.append(list(added))

    def _step(self, step: int) -> Sequence[events.Event]:
        at, accepted = BEGAN + 10.0 * step, step % 5 != 4
        pool = (WORKER, "volunteers", 0, 2, step)
        lease = Lease(self.spec.name, step, "ab" * 32, *pool, "cd" * 32, at, at + 60)
        digest = digest_bytes(f"lease {step}".encode())
        rollouts = [self._rollout(step, digest, g, n) for g in range(2) for n in range(4)]
        table = encode_rollouts(rollouts)
        submission = digest_bytes(table)
        verdicts = encode_verdicts(
            [_verdict(submission, i, r, accepted or i != 3) for i, r in enumerate(rollouts)]
        )
        files = submission_files(self.dir, step, submission)
        files.submission.parent.mkdir(parents=True)
        files.submission.write_bytes(table)
        files.verdict.write_bytes(verdicts)
        grades = [events.GroupGrade(g, "usable", 4, 40, 8, 0.5, 0.4, 1.0, 1e-6) for g in range(2)]
        trained = [events.TrainedGroup(digest, g) for g in range(2)] if accepted else []
        judged = ("", tuple(grades)) if accepted else (REASON, ())
        return [
            events.VersionPublished(at, step, "ef" * 32),
            events.NonceDrawn(at, step, "ab" * 32, 1),
            events.LeaseGranted(at + 0.5, lease, digest, "{}"),
            events.SubmissionReceived(at + 3, digest, submission, len(table)),
            events.SubmissionJudged(
                *(at + 4, digest, submission, digest_bytes(verdicts), VALIDATOR, accepted), *judged
            ),
            events.StepClosed(at + 5, step, tuple(trained), "{}"),
        ]

    def _rollout(self, step: int, lease: str, group: int, sample: int) -> Rollout:
        output = np.asarray(self._tokenizer.encode(self._say(step, group, sample)).ids, np.int32)
        prompt = np.asarray(self._tokenizer.encode(f"Prompt {step} {group}").ids, np.int32)
        logprobs = np.full(len(output), -0.5, np.float32)
        return Rollout(
            *(self.spec.name, step, WORKER, lease, f"problem-{step % 7}", group, sample, step),
            *(prompt, output, logprobs, "stop", 1.0, 1.0, -1),
            target=8,
            task_reward=float(sample % 2),
            length_penalty=-0.1,
            proofs=[],
        )


def _verdict(submission: str, row: int, rollout: Rollout, passed: bool) -> RolloutVerdict:
    off, reward = 0.0 if passed else 0.25, rollout.task_reward - 0.1
    toploc = CheckResult("toploc", passed, *((1, 8, "") if passed else (9, 8, "9 errors")))
    return RolloutVerdict(
        *(submission, row, rollout.group, rollout.task_reward, -0.1, reward),
        *(len(rollout.output_tokens), 8, rollout.logprobs + np.float32(off), off),
        checks=[CheckResult("signature", True, 0, 0), toploc],
    )


class Page(HTMLParser):
    """Elements of a page, and the data that it holds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data" and data.strip():
            self.data = json.loads(data)


def report(path: Path) -> dict[str, Any]:
    """The data of the one run of a page: head, figures and the rest, without revisions."""
    [run] = Page(path.read_text()).data["runs"]
    return {name: value[1] if isinstance(value, list) else value for name, value in run.items()}
