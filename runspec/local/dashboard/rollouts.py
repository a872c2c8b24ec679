"""Rollouts of a run, for people: what each is, what became of it, and which check rejected it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from runspec.core.errors import UserError
from runspec.local.dashboard.source import Source
from verify.coordinator.machine import events
from verify.coordinator.machine.events import Event
from verify.formats.lease import Lease
from verify.formats.submission import Rollout, decode_rollouts, largest_accepted_bytes
from verify.formats.tables import MalformedTable
from verify.formats.turns import Joined, joined
from verify.formats.verdict import MAX_ROWS, RolloutVerdict, decode_verdicts

MOST = 20_000
"""Rollouts that are listed, the newest ones."""
MAX_TOKENS = 20_000
"""Output tokens of one rollout that are shown; the page says how many more there are."""
_FILES_KEPT = 8
"""Submissions whose files stay in memory: a page asks for all rollouts of a group."""
_PENDING = 8
"""Tokens that may begin a character before they count as broken: more than the bytes of one."""
_WORDS = 200
"""Characters of a prompt that the list shows at most."""
_SEARCHED_TOKENS = 1000
"""Tokens at either end of a prompt and an output that a search looks through."""

FIELDS = (
    "id",
    "step",
    "group",
    "problem",
    "sample",
    "worker",
    "version",
    "target",
    "length",
    "task",
    "penalty",
    "reward",
    "advantage",
    "gap",
    "outcome",
    "check",
    "words",
)
"""Columns of a listed rollout. `group` names those that share a prompt; `advantage` is the reward
minus the group's mean; `gap` is the mean |claimed - recomputed| log-prob, null if not recomputed;
`outcome` is trained, accepted (not trained yet, or never), filtered (all of the group earned the
same), dropped (the grader failed) or rejected; `check` names the check that failed; `words` are
the prompt's first, at the first rollout of a group alone."""
_OUTCOME = FIELDS.index("outcome")
_OF_GRADE = {"usable": "accepted", "filtered": "filtered", "dropped": "dropped"}


@dataclass
class _Submission:
    """A judged submission, by the ledger's events."""

    lease: Lease
    digest: str
    outcomes: dict[int, str]
    """Outcome by group; empty if it was rejected."""
    reason: str
    """Why it was rejected."""
    ids: list[tuple[int, int]] = field(default_factory=list)
    """Id and group of each listed rollout, in order of its rows."""

    def outcome(self, group: int) -> str:
        return "rejected" if self.reason else self.outcomes.get(group, "accepted")


@dataclass
class _Entry:
    """A listed rollout."""

    values: list[Any]
    lease: str
    row: int
    """Its row in the files of the submission."""
    text: str
    """What a search looks through, in lower case."""
    revision: int
    """Of its last change."""


class Rollouts:
    """The newest rollouts of a run; threads may share it.

    Args:
        source: of the run.
        most: how many are listed.
    """

    def __init__(self, source: Source, most: int = MOST) -> None:
        self._source, self._most = source, most
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._submissions: dict[str, _Submission] = {}
        """By lease."""
        self._unread: list[str] = []
        """Leases of judged submissions whose files were not read, oldest first."""
        self._listed: dict[int, _Entry] = {}
        """By id."""
        self._removed: list[tuple[int, int]] = []
        """Revision and id of what is not listed any more."""
        self._tokenizer: Tokenizer | None = None
        self._opened = lru_cache(_FILES_KEPT)(self._open)
        self._next = 0
        self.revision = 0
        """Grows with every change."""
        self.judged = 0
        """Rollouts that were judged, listed or not."""
        self.unreadable = 0
        """Submissions whose files are gone or damaged."""

    @property
    def is_behind(self) -> bool:
        """Whether files wait to be read."""
        return bool(self._unread)

    def take(self, event: Event) -> None:
        """Follow an event of the ledger."""
        with self._lock:
            if isinstance(event, events.LeaseGranted):
                self._leases[event.digest] = event.lease
            elif isinstance(event, events.SubmissionJudged) and event.lease in self._leases:
                lease = self._leases.pop(event.lease)
                outcomes = {grade.group: _OF_GRADE[grade.outcome] for grade in event.groups}
                reason = "" if event.accepted else event.reason or "rejected"
                judged = _Submission(lease, event.submission, outcomes, reason)
                self._submissions[event.lease] = judged
                self._unread.append(event.lease)
                self.judged += lease.groups * self._source.spec.grpo.group_size
            elif isinstance(event, events.StepClosed):
                for trained in event.trained:
                    self._train(trained.lease, trained.group)
            elif isinstance(event, events.RolledBack):  # forget what it took back
                self.revision += 1
                for lease_digest, submission in list(self._submissions.items()):
                    if submission.lease.step >= event.version:
                        for each, _ in submission.ids:
                            self._remove(each)
                        del self._submissions[lease_digest]
                self._unread = [lease for lease in self._unread if lease in self._submissions]
                self._leases.clear()

    def _train(self, lease: str, group: int) -> None:
        if (submission := self._submissions.get(lease)) is None:
            return
        submission.outcomes[group] = "trained"
        changed = [each for each, of in submission.ids if of == group and each in self._listed]
        if changed:
            self.revision += 1
        for each in changed:
            self._listed[each].values[_OUTCOME] = "trained"
            self._listed[each].revision = self.revision

    def _remove(self, each: int) -> None:
        if self._listed.pop(each, None) is not None:
            self._removed.append((self.revision, each))

    def read(self, budget_s: float) -> None:
        """Read files of submissions, the newest first, for about so many seconds."""
        deadline = time.monotonic() + budget_s
        while self._unread and time.monotonic() < deadline:
            lease = self._unread.pop()
            submission = self._submissions[lease]
            if len(self._listed) >= self._most:
                listed = (self._submissions[e.lease].lease.step for e in self._listed.values())
                if submission.lease.step < min(listed):  # all that are listed are newer
                    self._unread.clear()
                    return
            try:
                read = self._open(submission.lease.step, submission.digest)
            except (UserError, MalformedTable):
                self.unreadable += 1
                continue
            texts = [self._searched(rollout) for rollout, _ in read]
            with self._lock:
                self._add(lease, submission, read, texts)

    def _open(self, step: int, digest: str) -> list[tuple[Rollout, RolloutVerdict]]:
        rollouts = decode_rollouts(
            self._source.table("submission", step, digest),
            max_rows=MAX_ROWS,
            max_bytes=largest_accepted_bytes(self._source.spec),
        )
        verdicts = decode_verdicts(self._source.table("verdict", step, digest))
        if len(rollouts) != len(verdicts):
            raise MalformedTable("the verdict has other rows than the submission")
        return list(zip(rollouts, verdicts, strict=True))

    def _add(
        self,
        lease: str,
        submission: _Submission,
        read: Sequence[tuple[Rollout, RolloutVerdict]],
        texts: Sequence[tuple[str, str]],
    ) -> None:
        self.revision += 1
        advantages, before = _advantages(read), None
        for row, (rollout, verdict) in enumerate(read):
            words = None if rollout.group == before else texts[row][1]
            each, before = self._next, rollout.group
            self._next += 1
            group = f"{rollout.step}-{submission.digest[:8]}-{rollout.group}"
            values = [
                *(each, rollout.step, group, rollout.problem_id, rollout.sample),
                *(rollout.worker[:8], rollout.version, verdict.target, len(rollout.output_tokens)),
                *(rounded(verdict.task_reward), rounded(verdict.length_penalty)),
                *(rounded(verdict.reward), rounded(advantages[row]), rounded(verdict.logprob_diff)),
                submission.outcome(rollout.group),
                next((check.name for check in verdict.checks if not check.passed), None),
                words,
            ]
            self._listed[each] = _Entry(values, lease, row, texts[row][0], self.revision)
            submission.ids.append((each, rollout.group))
        while len(self._listed) > self._most:
            self._remove(min(self._listed, key=lambda i: (self._listed[i].values[1], i)))

    def changes(self, since: int) -> dict[str, Any]:
        """Return what changed after a revision, for the page."""
        with self._lock:
            rows = [each.values for each in self._listed.values() if each.revision > since]
            return {
                "revision": self.revision,
                "fields": FIELDS,
                "rows": rows,
                "removed": [i for rev, i in self._removed if rev > since >= 0],
                "judged": self.judged,
                "unread": len(self._unread),
                "unreadable": self.unreadable,
            }

    def search(self, words: str) -> list[int]:
        """Return the ids of rollouts whose texts contain all the words, in whatever case."""
        wanted = words.lower().split()
        with self._lock:
            texts = [(i, each.text) for i, each in self._listed.items()]
        return [i for i, text in texts if all(word in text for word in wanted)]

    def detail(self, each: int) -> dict[str, Any] | None:
        """Return all of one rollout; None if it is not listed.

        Keys: `prompt`, `pieces` (texts of the output's tokens, with those between its turns),
        `logprobs` (claimed; null where the policy did not sample the token), `recomputed` (null if
        not), `turns` (their number), `more` (tokens that are left out), `worker`, `submission`,
        `versions`, `finish_reason`, `reason` (why the submission was rejected), `checks` (name,
        passed, value, limit, reason).

        Raises:
            UserError: its files cannot be read any more.
        """
        with self._lock:
            if (entry := self._listed.get(each)) is None:
                return None
            submission = self._submissions[entry.lease]
        try:
            rollout, verdict = self._opened(submission.lease.step, submission.digest)[entry.row]
        except MalformedTable as error:
            raise UserError(str(error), place=submission.digest, remedy="audit the run") from error
        whole, recomputed = _whole(rollout, verdict), verdict.logprobs
        tokens = whole.tokens[:MAX_TOKENS].tolist()
        return {
            "prompt": self._decoded(rollout.prompt_tokens[-MAX_TOKENS:]),
            "pieces": self._pieces(tokens),
            "logprobs": _placed(rollout.logprobs, whole),
            "recomputed": None if recomputed is None else _placed(recomputed, whole),
            "turns": 1 if rollout.turns is None else len(rollout.turns),
            "more": len(whole.tokens) - len(tokens),
            "worker": rollout.worker,
            "submission": submission.digest,
            "finish_reason": rollout.finish_reason,
            "reason": submission.reason,
            "checks": [
                [c.name, c.passed, rounded(c.value), rounded(c.limit), c.reason]
                for c in verdict.checks
            ],
        }

    def _searched(self, rollout: Rollout) -> tuple[str, str]:
        """Return what a search looks through, and the prompt's first words."""
        parts = [rollout.problem_id]
        for tokens in (rollout.prompt_tokens, rollout.output_tokens):
            whole = len(tokens) <= 2 * _SEARCHED_TOKENS
            ends = (tokens,) if whole else (tokens[:_SEARCHED_TOKENS], tokens[-_SEARCHED_TOKENS:])
            parts += map(self._decoded, ends)
        system = self._source.spec.data.system_prompt
        prompt = parts[1].rpartition(system)[2] if system else parts[1]
        return "\n".join(parts).lower(), " ".join(prompt[: 2 * _WORDS].split())[:_WORDS]

    def _decoded(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; a worker may have sent some that are outside the vocabulary,
        which are shown as numbers."""
        if self._tokenizer is None:
            self._tokenizer = self._source.tokenizer()
        words, parts = self._tokenizer, []

        def is_known(token: int) -> bool:
            return token >= 0 and words.id_to_token(token) is not None

        for known, run in groupby(map(int, tokens), key=is_known):
            if known:
                parts.append(words.decode(list(run), skip_special_tokens=False))
            else:
                parts += [f"<{token}>" for token in run]
        return "".join(parts)

    def _pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's part of the text; the last token of a split character has it.

        A token's part is what the text of a few tokens before it grows by, for a tokenizer may
        write the first token of a text differently. So the time is linear in the tokens.
        """
        pieces, context, begin = [], 0, 0
        for end in range(1, len(tokens) + 1):
            before = self._decoded(tokens[context:begin])
            text = self._decoded(tokens[context:end])
            waits = text.endswith("\ufffd") or len(text) <= len(before)
            if waits and end < len(tokens) and end - begin < _PENDING:
                pieces.append("")
                continue
            pieces.append(text[len(before) :])
            context, begin = begin, end
        return pieces


def _advantages(read: Iterable[tuple[Rollout, RolloutVerdict]]) -> list[float]:
    """Return the reward minus the mean of the group, which is a run of equal group numbers."""
    found: list[float] = []
    for _, rows in groupby(read, key=lambda pair: pair[0].group):
        rewards = [verdict.reward for _, verdict in rows]
        mean = sum(rewards) / len(rewards)
        found += [reward - mean for reward in rewards]
    return found


def rounded(value: float | None) -> float | None:
    """Return a number with five significant digits, which the page shows; no NaN, no infinity."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _whole(rollout: Rollout, verdict: RolloutVerdict) -> Joined:
    """Return a rollout with what stands between its turns, if its verdict says that."""
    gaps = verdict.between, verdict.between_lengths
    if rollout.turns is None or gaps[0] is None:
        return Joined(rollout.output_tokens, None)
    try:
        return joined(rollout.output_tokens, rollout.turns, *gaps)
    except ValueError:  # a rejected row may have any lengths
        return Joined(rollout.output_tokens, None)


def _placed(values: np.ndarray, whole: Joined) -> list[float | None]:
    """Return the values at the policy's own tokens of the first `MAX_TOKENS`, None elsewhere."""
    each = map(float, values)
    own = np.ones(len(values), bool) if whole.own is None else whole.own
    return [rounded(next(each, None)) if mine else None for mine in own[:MAX_TOKENS].tolist()]
