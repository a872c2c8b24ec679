"""The gate finds each of these faults: a promise is broken in a copy, and its tests must fail.

A fault is a piece of text in one file, the text that takes its place, and the tests that must fail
with it and pass without it. A text that is no longer in its file is an error, so that the list
follows the code. FAULTS (names, with commas between) chooses some.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Planted:
    """One fault."""

    promise: str
    """What no longer holds."""
    file: str
    old: str
    """Stands exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, one of which must fail."""


PLANTED = [
    Planted(
        "KL pulls towards the reference policy",
        "learner_jax/loss.py",
        "penalty = algorithm.kl.coef * at.kl",
        "penalty = -algorithm.kl.coef * at.kl",
        ("tests/learner_jax/test_papers.py", "tests/learner_jax/test_switches.py"),
    ),
    Planted(
        "advantages divide by the sample's standard deviation",
        "learner_jax/advantage.py",
        "x.std(axis=-1, ddof=1,",
        "x.std(axis=-1, ddof=0,",
        ("tests/learner_jax/test_advantage.py",),
    ),
    Planted(
        "negative advantages are bounded by delta",
        "learner_jax/loss.py",
        "jnp.minimum(ratio, clip.delta)",
        "jnp.maximum(ratio, clip.delta)",
        ("tests/learner_jax/test_loss.py",),
    ),
    Planted(
        "documents are believed for their signature",
        "runspec/core/signed.py",
        "if not signature_is_valid(key, _message(kind, payload), signature):",
        "if False:",
        ("tests/runspec/core/test_signed.py",),
    ),
    Planted(
        "a submission is signed by its worker",
        "verify/formats/submission.py",
        "if envelope.worker != key:",
        "if False:",
        ("tests/attacks/test_forgeries.py::TestForgedSignature",),
    ),
    Planted(
        "a manifest is signed by a publisher",
        "broadcast/manifest.py",
        "kind=KIND, keys=publishers,",
        "kind=KIND, keys=None,",
        ("tests/broadcast/faults/test_trust.py::test_a_stranger_cannot_publish",),
    ),
    Planted(
        "roles expire",
        "runspec/core/signed.py",
        "if now > expires + CLOCK_SKEW_S:",
        "if False:",
        ("tests/runspec/core/test_roles_and_latest.py",),
    ),
    Planted(
        "a tied head is new after a reload",
        "sampler/engine/engine.py",
        'self._rpc("repack_tied_head")',
        "pass",
        ("tests/sampler/engine/test_reload.py",),
    ),
    Planted(
        "a tied head is new after a patch",
        "sampler/engine/loaded_weights.py",
        "    if head_changed:\n",
        "    if False:\n",
        ("tests/sampler/engine/test_reload.py",),
    ),
    Planted(
        "rotary positions are those of transformers",
        "learner_jax/decoder.py",
        "(-np.arange(half, dtype=np.float64) / half)",
        "(-(np.arange(half, dtype=np.float64) + 1) / half)",
        ("tests/learner_jax/test_rope.py",),
    ),
    Planted(
        "rows of q are in the order of transformers",
        "runspec/core/models/decoder.py",
        '"D H h", "(H h) D"',
        '"D H h", "(h H) D"',
        (
            "tests/learner_jax/test_score.py::"
            "test_log_probs_are_those_of_transformers_in_the_files_order",
        ),
    ),
    Planted(
        "a delta holds every changed element",
        "bridge/delta/changes.py",
        "return np.concatenate(found)",
        "return np.concatenate(found)[:-1]",
        ("tests/bridge/delta/test_round_trip.py",),
    ),
    Planted(
        "a server serves no chunk that is not what its name says",
        "broadcast/chunk_files.py",
        "right = digest == path.name",
        "right = digest is not None",
        ("tests/broadcast/faults/test_damage.py",),
    ),
    Planted(
        "a resumed run has its optimizer's state",
        "learner_jax/full_states.py",
        "    state = load_state(states, info.step, programs.abstract_state)\n",
        "    state = load_state(states, info.step, programs.abstract_state)\n"
        "    import jax\n"
        "    state = jax.tree_util.tree_map_with_path(\n"
        "        lambda path, x: x if 'params' in str(path[0]) else x * 0, state\n"
        "    )\n",
        ("tests/learner_jax/test_runner.py::test_a_crash_changes_no_bit_and_no_line",),
    ),
    Planted(
        "a resumed run trains no batch twice",
        "learner_jax/full_states.py",
        "return Start(info.step, state,",
        "return Start(info.step - 1, state,",
        ("tests/learner_jax/test_runner.py::test_a_crash_changes_no_bit_and_no_line",),
    ),
    Planted(
        "each lease has a seed of its own",
        "verify/formats/lease.py",
        "bytes.fromhex(self.nonce), self.worker, self.index",
        "bytes.fromhex(self.nonce), self.worker, 0",
        ("tests/verify/test_lease_seeds.py",),
    ),
    Planted(
        "an outdated lease is refused",
        "verify/coordinator/services/leasing.py",
        '        if record.status == "expired" or record.expires <= now:\n'
        '            raise Refusal(409, "the lease has expired")\n'
        "        if record.lease.expires <= now and record.deferred != envelope.digest:\n"
        '            raise Refusal(409, "the lease has expired for all but what was deferred")\n',
        "",
        (
            "tests/attacks/test_leases.py::TestClockTricks",
            "tests/verify/coordinator/test_backlog.py",
        ),
    ),
    Planted(
        "TOPLOC has the published limits",
        "verify/thresholds.py",
        "mantissa_mean=10.0,",
        "mantissa_mean=100.0,",
        ("tests/verify/test_toploc.py",),
    ),
    Planted(
        "tokens follow the lease's noise",
        "verify/checks/prefill.py",
        "return [judge_gaps(_gaps(found), subject.limits) for _, found in subject.prefilled]",
        "return [judge_gaps(_gaps(found) * 0, subject.limits) for _, found in subject.prefilled]",
        ("tests/attacks/test_tokens.py",),
    ),
    Planted(
        "the sandbox makes no namespaces",
        "sampler/sandbox/filter.py",
        '"clone": [argument(0), (SET, 0, 1, _CLONE_REFUSED), DENY, ALLOW],',
        '"clone": [ALLOW],',
        ("tests/sampler/sandbox/test_filter.py",),
    ),
    Planted(
        "an empty answer earns nothing",
        "sampler/tasks/rewards/math.py",
        'return Score(0.0, "no answer")',
        "return Score(1.0)",
        ("tests/sampler/tasks/rewards/test_math.py",),
    ),
    Planted(
        "only groups without variance are filtered",
        "verify/coordinator/machine/verdicts.py",
        "filtered = zero_variance_filter and equal",
        "filtered = zero_variance_filter and not equal",
        ("tests/verify/coordinator/test_grading.py",),
    ),
    Planted(
        "each lint rule fires",
        "runspec/lint/rules/algorithm.py",
        "    if rollouts % algorithm.updates_per_step:\n",
        "    if False:\n",
        ("tests/runspec/lint/rules",),
    ),
    Planted(
        "audit follows the hash chain",
        "verify/audit/replay.py",
        'require(chain == expected, row.seq, "chain", chain, expected)',
        "pass",
        ("tests/verify/audit/test_audit.py",),
    ),
    Planted(
        "what the ledger cannot hold did not happen",
        "verify/coordinator/journal.py",
        "        try:\n            self.ledger.append(events)\n",
        "        self.state = state\n        try:\n            self.ledger.append(events)\n",
        ("tests/verify/coordinator/test_nothing_written.py",),
    ),
    Planted(
        "a submission waits in the outbox whole",
        "sampler/worker/outbox.py",
        'data = made.envelope + b"\\n" + made.table',
        'data = made.envelope + b"\\n"',
        ("tests/sampler/worker/test_outbox.py",),
    ),
    Planted(
        "files appear by a rename",
        "runspec/core/files.py",
        "            temporary.rename(path)\n        else:\n",
        "            path.write_bytes(temporary.read_bytes())\n        else:\n",
        ("tests/runspec/core/test_files_and_hashing.py",),
    ),
]


class Missed(Exception):
    """Faults that were not found, or tests that fail without one."""


def run() -> dict[str, object]:
    """Plants each fault in turn.

    Raises:
        Missed: naming each fault that no test found, or that could not be planted.
    """
    chosen = [name for name in os.environ.get("FAULTS", "").split(",") if name]
    planted = [fault for fault in PLANTED if not chosen or fault.promise in chosen]
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copy = Path(name)
        _copy_tracked(copy)
        sound = sorted({test for fault in planted for test in fault.tests})
        if (code := _pytest(copy, sound, stop=False)) != _PASSED:
            raise Missed(f"without any fault the tests end with exit code {code}")
        missed = [why for fault in planted if (why := _tried(copy, fault))]
    if missed:
        raise Missed("\n".join(missed))
    return {"faults": len(planted), "found": len(planted)}


def _tried(copy: Path, fault: Planted) -> str | None:
    """Why a fault was not found."""
    try:
        with _changed(copy / fault.file, fault.old, fault.new):
            code = _pytest(copy, fault.tests, stop=True)
    except ValueError as error:
        return f"{fault.promise}: {error}"
    print(f"{fault.promise}: exit code {code}", file=sys.stderr, flush=True)
    return None if code == _FAILED else f"{fault.promise}: exit code {code} of {fault.tests}"


@contextmanager
def _changed(path: Path, old: str, new: str) -> Iterator[None]:
    """Raises ValueError where the file does not hold the old text exactly once."""
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{path.name} holds {text.count(old)} times: {old.strip()!r}")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def _pytest(copy: Path, tests: tuple[str, ...] | list[str], *, stop: bool) -> int:
    """The exit code of pytest, whose processes import from the copy."""
    flags = ["-q", "-p", "no:cacheprovider", *(["-x"] if stop else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in ((_FAILED,) if stop else (_PASSED,)):
        print(done.stdout[-3000:], file=sys.stderr, flush=True)
    return done.returncode


def _copy_tracked(copy: Path) -> None:
    """The tracked files of the checkout as they lie there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
