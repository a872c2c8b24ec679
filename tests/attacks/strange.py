"""What a stranger may send in the right form with hostile content: tables, facts about itself.

All is drawn from a `random.Random`, so that Hypothesis (`st.randoms`) and a campaign draw alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from runspec.local.dashboard.rollouts import Rollouts
from tests.runspec.local.dashboard.made_run import bytes_tokenizer
from tests.verify.bench import envelope_of, lease_for
from tests.verify.small_model import small_spec
from tests.verify.test_validator import COORDINATOR, WORKER, QueueCoordinator, serve
from verify.coordinator.machine.events import LeaseGranted, SubmissionJudged
from verify.coordinator_http import ContentRefused
from verify.formats.lease import lease_digest
from verify.formats.submission import Rollout, encode_rollouts
from verify.formats.verdict import VerdictEnvelope, open_verdict

PIECES = [
    *(
        "[" * 60,
        "{" * 60,
        "]",
        "}",
        '"',
        "\\",
        "'",
        ",",
        ":",
        "<script>",
        "&",
        "${HOME}",
        "{{ 1 }}",
    ),
    *("\0", "\x07", "\x1b[2J", "\x1b]0;x\x07", "\r", "\n", "\t", "\x85", "\u2028", "\u202e"),
    *(
        "é",
        "😀",
        "\ud7ff",
        "\uffff",
        "\ufeff",
        "a",
        "0",
        "-1",
        "1e999",
        "NaN",
        "../",
        "x" * 300,
        "%n",
    ),
]
TOKENS = [0, 1, 5, 2**15, 2**31 - 1, -1, -(2**31)]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), float("-inf")]
INTEGERS = [*range(4), 8, 2**31 - 1, -1, -(2**31)]
_TEXTS = ("run", "worker", "lease", "problem_id", "finish_reason")
_NUMBERS = ("temperature", "top_p", "task_reward", "length_penalty")
_INTEGERS = ("step", "group", "sample", "version", "top_k", "target")


def strange_text(random: Random) -> str:
    return "".join(random.choice(PIECES) for _ in range(random.randrange(8)))


def strange_info(random: Random) -> dict[str, Any]:
    """What a worker says of itself when it registers."""
    values = [strange_text(random), random.choice(INTEGERS), True, None]
    return {strange_text(random)[:40] or "engine": random.choice(values) for _ in range(4)}


def strange_table(rows: Sequence[Rollout], random: Random) -> bytes:
    """A table of rows of which some fields are hostile; one of eight tables is damaged besides.

    Args:
        rows: of the right shape for a lease.
        random: source of every choice.
    """
    changed = list(rows)
    for _ in range(random.choice((0, 1, 1, 1, 8))):
        at = random.randrange(len(rows))
        changed[at] = _strange(changed[at], random)
    table = bytearray(encode_rollouts(changed))
    if random.randrange(8) == 0:
        at = random.randrange(len(table))
        table[at : at + random.randrange(9)] = bytes(random.randrange(256) for _ in range(4))
    return bytes(table)


def _strange(row: Rollout, random: Random) -> Rollout:
    count, changes = random.randrange(40), dict[str, Any]()
    tokens = np.array([random.choice(TOKENS) for _ in range(count)], np.int32)
    match random.randrange(6):
        case 0:
            changes[random.choice(_TEXTS)] = strange_text(random)
        case 1:
            changes[random.choice(_NUMBERS)] = random.choice(NUMBERS)
        case 2:
            changes[random.choice(_INTEGERS)] = random.choice(INTEGERS)
        case 3:
            logprobs = np.full(count, random.choice(NUMBERS), np.float32)
            changes |= {"output_tokens": tokens, "logprobs": logprobs}
        case 4:
            changes["prompt_tokens"] = tokens
        case _:
            size = len(row.output_tokens)
            changes["logprobs"] = np.full(size, random.choice(NUMBERS), np.float32)
    return replace(row, **changes)


class Refusing(QueueCoordinator):
    """It reads verdicts as the coordinator does, and may refuse some more."""

    def refuses(self, envelope: VerdictEnvelope) -> bool:
        return False

    def verdict(self, envelope: bytes, table: bytes) -> None:
        if self.refuses(open_verdict(envelope, validators=self.roles().validator)):
            raise ContentRefused("POST /v1/verdicts: 400, no")
        super().verdict(envelope, table)


def judge(honest: Sequence[Rollout], engine: Any, random: Random) -> str:
    """Let a validator judge one strange submission, and a page show it; return what became of it.

    Args:
        honest: rows that answer the lease of `lease_for`.
        engine: of the validator.
        random: source of every choice.

    Raises:
        AssertionError: the validator ended without a verdict, or its words cannot be shown.
    """
    signed, lease = lease_for(WORKER, COORDINATOR)
    table = strange_table(honest, random)
    coordinator = Refusing(engine=engine)
    envelope = envelope_of(table, signed, lease, WORKER)
    submission = coordinator.offer(envelope, table, signed)
    assert serve(coordinator).checked == 1
    ((said, _),) = coordinator.opened()
    assert said.reason.isprintable() and bool(said.reason) != said.accepted
    tables = {"submission": table, "verdict": coordinator.verdicts[0][1]}
    source = SimpleNamespace(spec=small_spec(), tokenizer=bytes_tokenizer)
    source.table = lambda kind, step, digest: tables[kind]
    rollouts, digest = Rollouts(source), lease_digest(signed)
    rollouts.take(LeaseGranted(1.0, lease, digest, "{}"))
    named = (digest, submission, said.digest, "v")
    rollouts.take(SubmissionJudged(2.0, *named, said.accepted, said.reason, ()))
    while rollouts.is_behind:
        rollouts.read(1.0)
    shown = rollouts.changes(-1)
    details = [rollouts.detail(row[0]) for row in shown["rows"]]
    json.dumps([shown, details, rollouts.search("a")], allow_nan=False).encode()
    return "accepted" if said.accepted else said.reason.partition(":")[0]
