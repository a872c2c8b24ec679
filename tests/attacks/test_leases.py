"""Work handed in twice, elsewhere, or by another than who did it; workers that would choose what
they are leased: by their key, the version, silence or their clock; keys that keep a run from its
steps.

What needs no IO are the coordinator's own decisions: `tests.verify.coordinator.filled`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec
from runspec.core.signed import SigningKey
from tests.attacks.conftest import fresh, refused, rejection, take_lease
from tests.attacks.hostile_keys import attack, standings
from tests.verify.bench import MODEL, Bench, lease_for
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.coordinator.filled import Filled, key, policy, started
from tests.verify.coordinator.over_http import granted, post, request, status
from tests.verify.small_model import ParityTask, Worker, fixed_key, small_spec
from tests.verify.test_workers_to_batches import at_work, validate, work
from tests.waiting import eventually
from tests.weak_keys import WEAK_KEYS, WeakKey
from verify.client import SubmissionRefused
from verify.coordinator.machine.events import LeaseGranted
from verify.coordinator.machine.leases import LeaseRecord, Rank
from verify.coordinator.machine.trust import reputation
from verify.coordinator_http import RequestChecker, Unauthorised, sign_request
from verify.formats.lease import MAX_OPEN_LEASES, Lease, assignments
from verify.formats.submission import Rollout, encode_rollouts
from verify.toploc import build_proofs
from verify.validator import is_drawn

pytestmark = pytest.mark.slow

PATIENCE_S = 600.0
NOW = 1_700_000_000.0


def handed_in(site: Site) -> list[str]:
    return sorted(path.stem for path in site.run_dir.glob("rollouts/*/*.safetensors"))


class TestReplayedSubmission:
    """The same work once more: for the next lease, in another step or run."""

    @pytest.mark.parametrize(
        ("index", "step", "words"),
        [(1, 0, "lease is"), (0, 1, "step is '0'")],
        ids=["lease", "step"],
    )
    def test_rows_of_another_lease_or_step(
        self, bench: Bench, index: int, step: int, words: str
    ) -> None:
        old = bench.honest()
        take_lease(bench, index, step=step)
        reason = refused(bench, *bench.packed(old))
        assert reason.startswith(f"assignment: row 0: {words}")

    def test_the_signed_file_in_another_run(self, bench: Bench) -> None:
        envelope, table = bench.packed(bench.honest())
        bench.lease = replace(bench.lease, run="another")
        reason = refused(bench, envelope, table)
        assert reason.startswith("lease: the envelope names another run, step, worker")


class TestAnotherWorkersFile:
    """A thief has an honest worker's file, and hands it in as its own."""

    thief = fixed_key(9)

    def test_under_a_lease_of_the_thiefs(self, bench: Bench) -> None:
        rows, own = bench.honest(), fresh(bench)
        own.worker_key, own.worker = self.thief, replace(bench.worker, key=self.thief)
        own.signed_lease, own.lease = lease_for(self.thief, bench.coordinator_key)
        mine = own.honest()
        assert own.verdict(mine).accepted  # what is its own
        # as it is
        assert refused(own, *own.packed(rows)).startswith("assignment: row 0: worker is")
        # with every name changed: even where the thief is assigned the same, the noise is its own
        names = ("worker", "lease", "problem_id", "target", "prompt_tokens")
        renamed = [
            explained(own.worker, replace(row, **{name: getattr(its, name) for name in names}))
            for row, its in zip(rows, mine, strict=True)
        ]
        found = rejection(own, renamed)
        assert found.check == "seeded_sampling" and found.value >= 0.5 > found.limit


def explained(worker: Worker, row: Rollout) -> Rollout:
    """The row's tokens, with claims and rewards that are right for its new prompt."""
    made = worker.explain(row.prompt_tokens.tolist(), row.output_tokens.tolist())
    length = float(np.float32(-0.01 * abs(row.target - len(row.output_tokens))))
    claims = {"logprobs": made.logprobs, "proofs": build_proofs(made.hidden)}
    return replace(row, **claims, length_penalty=length)


class TestWeakKey:
    """Comes with a key as which anybody can sign, so that nobody can be held to what it did."""

    def test_it_is_not_registered(self, site: Site) -> None:
        body = canonical_json({"pool": "near", "info": {}})
        for public_hex in WEAK_KEYS:
            answer = post(site, WeakKey(public_hex), "/v1/workers", body)
            assert (answer.status_code, "anybody can sign" in answer.text) == (401, True)
        assert status(site)["workers"] == []


class TestReplayedRequest:
    """A captured request, sent again within the time that its signature holds."""

    def test_it_is_refused(self, site: Site) -> None:
        signer, worker = site.worker()
        granted(site, worker)
        for path, said in (
            ("/v1/leases", {"wait": 0, "holding": []}),
            ("/v1/heartbeat", {"state": {}}),
            ("/v1/release", {"leases": []}),
        ):
            body = canonical_json(said)
            headers = sign_request(signer, run=RUN, method="POST", path=path, body=body)
            ask = lambda: request(site, "POST", path, content=body, headers=headers)  # noqa: B023, E731
            assert ask().status_code == 200
            for _ in range(2):
                assert (ask().status_code, "made before" in ask().json()["error"]) == (401, True)


def leased(run: Filled, name: str) -> LeaseRecord | None:
    """A further lease for who holds all that it was granted."""
    held = [d for d, r in run.state.leases.items() if r.lease.worker == key(name)]
    return run.lease(name, holding=held)


class TestKeyGrinding:
    """Makes keys until one's problems, targets and noise are to its liking."""

    def test_a_key_chosen_to_suit_a_nonce_gets_another_nonce(self) -> None:
        def problem(lease: Lease, of: int = 1_000_000) -> int:
            return assignments(lease, n_problems=of, targets=[])[0].problem

        # given a step at work, and who knows its nonce and all about how seeds are made
        run = started()
        known = run.lease("x").lease
        # when it grinds for a key of which an easy problem would be asked, and registers it
        ground = next(
            name
            for name in (f"g{n}" for n in range(10_000))
            if problem(replace(known, worker=key(name), index=0), of=50) == 7
        )
        run.register(ground)
        granted = run.lease(ground).lease
        # then its nonce is a fresh one, and what it is asked has nothing to do with it
        assert granted.nonce != known.nonce
        assert problem(granted) != problem(replace(granted, nonce=known.nonce))


class TestVersionPicking:
    """Samples by the version that gives it most, or waits for one."""

    @pytest.mark.parametrize("version", [1, 2**31 - 1])
    def test_another_version_than_leased_is_claimed(self, bench: Bench, version: int) -> None:
        found = rejection(bench, [replace(r, version=version) for r in bench.honest()])
        assert (found.check, found.value) == ("assignment", 1)
        assert f"version is '{version}', assigned '0'" in found.words

    def test_a_lease_keeps_its_version_and_silence_counts_as_withheld(self) -> None:
        run = started()
        lease = run.lease("x")
        run.publish(1)
        assert run.lease("x").document == lease.document
        run.now += 31.0
        run.advance()
        following = run.lease("x")
        # then the newest is leased, to everybody alike, under the next index and at a price
        assert following.lease.version == 1 == run.lease("y").lease.version
        assert following.lease.index == lease.lease.index + 1
        assert run.state.workers[key("x")].standing.withheld == 1

    def test_a_stranger_that_gives_a_lease_back_for_a_newer_version_is_new_again(self) -> None:
        run = started()
        run.register("s", own=False)
        run.work("s")
        lease = run.lease("s")
        run.publish(1)
        run.release(lease)
        # then the newest is leased, as a trial
        assert run.state.workers[key("s")].standing.trust == 0
        following = run.lease("s")
        assert (following.rank, following.lease.version, following.lease.groups) == (Rank.NEW, 1, 1)


class TestWithholding:
    """Looks at what it is leased, and answers only what it likes."""

    def test_it_costs_reputation_and_buys_no_second_look(self) -> None:
        run = started(groups=8, max_groups=100)
        for _ in range(2):
            run.work("x")
        before = run.state.workers[key("x")].standing
        assert leased(run, "x") is not None  # and does not like it
        run.now += 31.0
        run.advance()
        after = run.state.workers[key("x")].standing
        # then it counts as a rejection does: 2 / 22 before, and from the beginning after
        assert (before.withheld, after.withheld) == (0, 1)
        assert (reputation(before), reputation(after)) == (pytest.approx(2 / 22), 0.0)
        # and the index is used up, the seed gone
        known = [event.lease for event in run.events if isinstance(event, LeaseGranted)]
        for lease in [leased(run, "x").lease for _ in range(MAX_OPEN_LEASES)]:
            assert (lease.step, lease.index) not in [(one.step, one.index) for one in known]
            assert lease.seed not in [one.seed for one in known]

    def test_no_more_groups_at_once_than_it_delivered(self) -> None:
        run = started(groups=100, max_groups=1000)
        run.register("s", own=False)
        for _ in range(3):
            run.work("s")  # 1, 1 and 2 groups
        looked_at = [leased(run, "s") for _ in range(2)]
        assert [record.lease.groups for record in looked_at] == [2, 2]
        assert leased(run, "s") is None
        # nor by giving them back: what comes after that is a trial, and one at a time
        for record in looked_at:
            run.release(run.state.leases[record.digest])
        assert leased(run, "s").lease.groups == 1
        assert leased(run, "s") is None

    def test_many_keys_that_look_and_keep_silent(self) -> None:
        """A hundred new keys see two groups of eight in the time of a lease, and delay nobody."""
        run = started(groups=8, newcomer_groups=2)
        for number in range(100):
            run.register(f"s{number}", own=False)
        seen = [run.lease(f"s{number}") for number in range(100)]
        assert [record.lease.groups for record in seen if record is not None] == [1, 1]
        # when they keep silent, then the step fills at once
        for _ in range(4):
            run.work("x")
        assert [closed.step for closed in run.advance()] == [0]


class TestDrawGrinding:
    """Writes its file until it is one that is not prefilled, where only a share is. Trying tells
    nothing: the verdict shows it, and then the lease takes no other file."""

    def test_a_file_says_nothing_of_whether_it_is_drawn(self, bench: Bench) -> None:
        # given the same rows as many files, and a worker that knows how the draw is made
        rows = encode_rollouts(bench.honest())
        files = [digest_bytes(rows + bytes([n % 256, n // 256])) for n in range(600)]
        truly, foreseen = (
            [is_drawn(validator, file, 0.3) for file in files]
            for validator in (fixed_key(4), fixed_key(5))
        )
        # then those that it takes for safe are drawn as often as any (6 standard deviations)
        safe = [true for true, drawn in zip(truly, foreseen, strict=True) if not drawn]
        assert abs(sum(truly) / len(truly) - 0.3) < 0.12
        assert abs(sum(safe) / len(safe) - 0.3) < 0.14


class TestClockTricks:
    """A clock ahead or behind, a request kept for later, a lease answered after its time."""

    @pytest.mark.parametrize("ahead", [0, 150, 299])
    def test_a_request_of_the_future_is_no_second_one(self, ahead: int) -> None:
        """Signed for later, it stays fresh for longer: and is remembered as long."""
        checker, signer = RequestChecker("run"), SigningKey.generate()
        said = {"method": "POST", "path": "/"}
        headers = sign_request(signer, run="run", **said, body=b"", now=NOW + ahead)
        checker.check(headers, **said, now=NOW)
        for later in range(0, ahead + 301, 50):
            with pytest.raises(Unauthorised, match="made before"):
                checker.check(headers, **said, now=NOW + later)
        with pytest.raises(Unauthorised, match="set the clock"):
            checker.check(headers, **said, now=NOW + ahead + 301)

    def test_a_lease_ends_by_the_coordinators_clock(self, quick_site: Site) -> None:
        # given a lease that is over, and a worker whose clock says that it is not
        site = quick_site
        signer, worker = site.worker()
        data, lease = granted(site, worker)
        withheld = lambda: status(site)["workers"][0]["withheld_leases"]  # noqa: E731
        eventually(lambda: withheld() > lease.index, "the lease expires")
        # then its answer is refused, and a lease that says otherwise is none
        with pytest.raises(SubmissionRefused, match="the lease has expired"):
            worker.submit(*submission(data, lease, signer))
        later = data.replace(b'"expires":', b'"expires":9')
        with pytest.raises(UserError, match="no such lease"):
            worker.submit(*submission(later, lease, signer))
        assert handed_in(site) == []


@pytest.fixture
def quick_site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator whose leases last a twentieth of a second."""
    site = Site(tmp_path, tiny_spec(lease_timeout="50ms"))
    site.publish(0)
    with site.origin(), site.serving():
        yield site


# --- Strangers that look at their leases and answer the best ones alone ---------------------------

GROUPS, NEWCOMER_GROUPS, LEASE_S, STEPS, KEYS = 16, 8, 30.0, 30, 100


@dataclass
class Step:
    """One step: what strangers saw of it."""

    seconds: float = 0.0
    unanswered: dict[Rank, int] = field(default_factory=lambda: dict.fromkeys(Rank, 0))
    """Groups that strangers were leased and did not answer, by the rank of the lease."""
    answered: int = 0
    """Groups of strangers."""


class Crowd:
    """One known worker, and strangers that choose: the reward of each group is a uniform draw that
    its key knows at once, and they answer a lease whose draw is among the best tenth.

    Args:
        step_s: in which the known worker alone fills a step.
        give_back: whether strangers give back what they do not answer; else they keep silent.
    """

    def __init__(self, step_s: float, *, give_back: bool) -> None:
        limits = {"groups": GROUPS, "min_groups": GROUPS, "newcomer_groups": NEWCOMER_GROUPS}
        limits |= {"max_groups": 100_000, "deadline_s": 1e9, "lease_timeout_s": LEASE_S}
        given = {"steps": STEPS + 1, "async_level": 0, "groups_per_submission": {"a": 1}}
        self.run = Filled(policy(**limits, **given))
        self._tick, self._give_back, self._dice = step_s / GROUPS, give_back, Random(1)
        self._seen: set[str] = set()
        self._strangers: list[str] = []
        self.run.register("known", own=True)
        self.run.publish(0)
        self.step()  # by the known worker alone
        self._strangers = [f"s{number}" for number in range(KEYS)]
        for name in self._strangers:
            self.run.register(name, own=False)

    def step(self) -> Step:
        """Fills a step: strangers ask first whenever the known worker asks."""
        step, begun = Step(), self.run.now
        while True:
            for name in self._strangers:
                while (record := self._lease(name)) is not None:
                    self._choose(record, step)
            working = self._lease("known")
            self.run.now += self._tick
            if working is not None:
                self.run.answer(working)
            if closed := self.run.advance():
                break
        step.seconds = self.run.now - begun
        self.run.publish(closed[0].step + 1)
        return step

    def _lease(self, name: str) -> LeaseRecord | None:
        """A lease that nobody has seen."""
        record = self.run.lease(name, holding=self._seen)
        if record is None or record.digest in self._seen:
            return None
        self._seen.add(record.digest)
        return record

    def _choose(self, record: LeaseRecord, step: Step) -> None:
        if self._dice.random() >= 0.9:
            self.run.answer(record)
            step.answered += record.lease.groups
            return
        step.unanswered[record.rank] += record.lease.groups
        if self._give_back:
            self.run.release(record)


class TestChoosingAmongLeases:
    """A hundred keys answer the best tenth of what they are leased."""

    @pytest.mark.parametrize("give_back", [False, True], ids=["silent", "gives back"])
    @pytest.mark.parametrize("step_s", [LEASE_S / 10, 3 * LEASE_S], ids=["short", "long"])
    def test_leases_seen_and_not_answered_are_bounded_a_step(
        self, step_s: float, give_back: bool
    ) -> None:
        delivered = wasted = 0
        crowd = Crowd(step_s, give_back=give_back)
        for step in [crowd.step() for _ in range(STEPS)]:
            # then new keys see so many of a step, however many they are
            looks = NEWCOMER_GROUPS * (1 + math.ceil(step_s / LEASE_S))
            assert step.unanswered[Rank.NEW] <= looks
            # and those with a record no more than was accepted of them
            delivered += step.answered
            wasted += step.unanswered[Rank.RECORDED]
            assert wasted <= delivered
            # and the known worker closes it
            assert step.seconds <= 1.5 * step_s


# --- Many keys of one attacker that would keep a run from its steps -------------------------------

OWN = fixed_key(5)


def spec_of_a_run(steps: int) -> RunSpec:
    """All steps are leased at version 0, and leases last a second."""
    spec = small_spec()
    algorithm = spec.algorithm.model_copy(update={"async_level": steps})
    verify = spec.verify.model_copy(update={"lease_timeout": 1.0})
    return spec.model_copy(update={"steps": steps, "algorithm": algorithm, "verify": verify})


class TestManyHostileKeys:
    """Rubbish from eight keys, eight that go silent, and one that answers one lease in four. The
    same on a whole run: `python -m tests.campaigns liveness`."""

    @pytest.mark.parametrize(
        ("name", "keys", "most"), [("rubbish", 8, 12), ("silent", 8, 8), ("alternating", 1, 3)]
    )
    def test_every_step_is_closed_whole(
        self, tmp_path: Path, name: str, keys: int, most: int
    ) -> None:
        # given a run that hostile keys attacked for a while when its own worker comes
        spec = spec_of_a_run(12)
        site, own = Site(tmp_path, spec), Worker(OWN, MODEL, spec, ParityTask())
        site.own_worker("home-0", OWN)

        def misdeeds() -> int:
            """Leases that strangers did not answer as they should."""
            _, others = standings(site.run_dir, OWN.public_hex)
            return sum(each.rejected + each.withheld for each in others)

        with ThreadPoolExecutor(3) as pool, at_work(site):
            where = {"url": site.url, "pool": "home", "sample": own.rollouts}
            attacker = pool.submit(attack, {name: keys}, site.client, **where)
            checked = pool.submit(validate, site, tmp_path / "weights", spec)
            eventually(lambda: misdeeds() >= most, f"{most} misdeeds")
            # when the worker works to the end of the run
            for each in (checked, pool.submit(work, site, own), attacker):
                each.result(PATIENCE_S)
        # then every step was closed, complete, and the worker has done no wrong; on a machine that
        # is slow it may miss a lease's second
        assert all(site.batch(step).complete for step in range(12))
        found, _ = standings(site.run_dir, OWN.public_hex)
        assert found is not None
        assert (found.rejected, found.quarantine) == (0, None)
