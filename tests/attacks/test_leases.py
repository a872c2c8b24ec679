"""Workers that would choose what they are leased: by their key, by the version, by keeping silent,
by their clock.

The coordinator's own decisions, without its IO: `tests.verify.coordinator.filled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from tests.attacks.setting import rejection
from tests.verify.bench import Bench
from tests.verify.coordinator.deployment import DEADLINE_S, Site, submission, tiny_spec
from tests.verify.coordinator.filled import Filled, key, started
from tests.waiting import eventually
from verify.client import SubmissionRefused
from verify.coordinator.machine.events import LeaseGranted
from verify.coordinator.machine.reputation import reputation
from verify.coordinator.machine.state import LeaseRecord, Rank
from verify.formats.lease import MAX_OPEN_LEASES, Lease, assignments, open_lease
from verify.formats.submission import encode_rollouts
from verify.request_auth import RequestChecker, Unauthorised, sign_request
from verify.validator import is_drawn

PROBLEMS = 1_000_000


def held_by(run: Filled, name: str) -> list[str]:
    return [d for d, r in run.state.leases.items() if r.lease.worker == key(name)]


def leased(run: Filled, name: str) -> LeaseRecord | None:
    """A further lease for who holds all that it was granted."""
    return run.lease(name, holding=held_by(run, name))


class TestKeyGrinding:
    """Makes keys until one's problems, targets and noise are to its liking."""

    def test_a_key_chosen_to_suit_a_nonce_gets_another_nonce(self) -> None:
        # given a step at work, and who knows its nonce and all about how seeds are made
        run = started()
        known = run.lease("x").lease
        # when it grinds for a key of which an easy problem would be asked, and registers it
        wanted = 7
        ground = next(
            name
            for name in (f"g{n}" for n in range(10_000))
            if problem(replace(known, worker=key(name), index=0), of=50) == wanted
        )
        run.register(ground)
        granted = run.lease(ground).lease
        # then its nonce is a fresh one, and what it is asked has nothing to do with it
        assert granted.nonce != known.nonce
        predicted = replace(granted, nonce=known.nonce)
        assert problem(granted) != problem(predicted)


def problem(lease: Lease, of: int = PROBLEMS) -> int:
    return assignments(lease, n_problems=of, targets=[])[0].problem


class TestVersionPicking:
    """Samples by the version that gives it most, or waits for one."""

    @pytest.mark.parametrize("version", [1, 2**31 - 1])
    def test_another_version_than_leased_is_claimed(self, bench: Bench, version: int) -> None:
        rows = [replace(r, version=version) for r in bench.honest()]
        found = rejection(bench, rows)
        assert (found.check, found.value) == ("assignment", 1)
        assert f"version is '{version}', assigned '0'" in found.words

    def test_a_lease_keeps_its_version_whoever_waits(self) -> None:
        run = started()
        lease = run.lease("x")
        run.publish(1)
        assert run.lease("x").document == lease.document

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

    def test_silence_until_there_is_a_newer_version_counts_as_withheld(self) -> None:
        run = started()
        lease = run.lease("x")
        run.publish(1)
        run.now += 31.0
        run.advance()
        following = run.lease("x")
        # then the newest is leased, to everybody alike, under the next index and at a price
        assert following.lease.version == 1 == run.lease("y").lease.version
        assert following.lease.index == lease.lease.index + 1
        assert run.state.workers[key("x")].standing.withheld == 1


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
        granted = [event.lease for event in run.events if isinstance(event, LeaseGranted)]
        following = [leased(run, "x").lease for _ in range(MAX_OPEN_LEASES)]
        for known in granted:
            for lease in following:
                assert (lease.step, lease.index) != (known.step, known.index)
                assert lease.seed != known.seed

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
    nothing: the verdict shows it, and then the lease takes no other file (`test_replays.py`)."""

    share = 0.3

    def drawn(self, validator: SigningKey, files: list[str]) -> list[bool]:
        return [is_drawn(validator, file, self.share) for file in files]

    def test_a_file_says_nothing_of_whether_it_is_drawn(self, bench: Bench) -> None:
        # given the same rows as many files, and a worker that knows how the draw is made
        rows = encode_rollouts(bench.honest())
        files = [digest_bytes(rows + bytes([n % 256, n // 256])) for n in range(600)]
        validator, guess = SigningKey.generate(), SigningKey.generate()
        truly, foreseen = self.drawn(validator, files), self.drawn(guess, files)
        # then those that it takes for safe are drawn as often as any (6 standard deviations)
        safe = [true for true, drawn in zip(truly, foreseen, strict=True) if not drawn]
        assert abs(sum(truly) / len(truly) - self.share) < 0.12
        assert abs(sum(safe) / len(safe) - self.share) < 0.14


NOW = 1_700_000_000.0


class TestClockTricks:
    """A clock ahead or behind, a request kept for later, a lease answered after its time."""

    @staticmethod
    def ask(checker: RequestChecker, signer: SigningKey, *, at: float, now: float = NOW) -> None:
        headers = sign_request(signer, run="run", method="POST", path="/", body=b"", now=at)
        checker.check(headers, method="POST", path="/", now=now)

    @pytest.mark.parametrize("seconds", [-301, 301, -86_400, 86_400, -NOW, 900_000_000_000 - NOW])
    def test_a_clock_that_is_off_by_more_than_five_minutes(self, seconds: float) -> None:
        checker, signer = RequestChecker("run"), SigningKey.generate()
        for fine in (-299, 0, 299):
            self.ask(checker, signer, at=NOW + fine)
        with pytest.raises(Unauthorised, match="set the clock"):
            self.ask(checker, signer, at=NOW + seconds)

    @pytest.mark.parametrize("ahead", [0, 150, 299])
    def test_a_request_of_the_future_is_no_second_one(self, ahead: int) -> None:
        """Signed for later, it stays fresh for longer: and is remembered as long."""
        checker, signer = RequestChecker("run"), SigningKey.generate()
        at = NOW + ahead
        headers = sign_request(signer, run="run", method="POST", path="/", body=b"", now=at)
        ask = lambda now: checker.check(headers, method="POST", path="/", now=now)  # noqa: E731
        ask(NOW)
        for later in range(0, ahead + 301, 50):
            with pytest.raises(Unauthorised, match="made before"):
                ask(NOW + later)
        with pytest.raises(Unauthorised, match="set the clock"):
            ask(NOW + ahead + 301)

    def test_a_lease_ends_by_the_coordinators_clock(self, quick_site: Site) -> None:
        # given a lease that is over, and a worker whose clock says that it is not
        site = quick_site
        signer, worker = site.worker()
        data = worker.lease(DEADLINE_S)
        assert data is not None
        lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
        withheld = lambda: httpx.get(f"{site.url}/v1/status", verify=False).json()["workers"][0]  # noqa: E731
        eventually(lambda: withheld()["withheld_leases"] > lease.index, "the lease expires")
        # then its answer is refused, and a lease that says otherwise is none
        with pytest.raises(SubmissionRefused, match="the lease has expired"):
            worker.submit(*submission(data, lease, signer))
        later = data.replace(b'"expires":', b'"expires":9')
        with pytest.raises(UserError, match="no such lease"):
            worker.submit(*submission(later, lease, signer))
        assert list(site.run_dir.glob("rollouts/*/*.safetensors")) == []


@pytest.fixture
def quick_site(tmp_path: Path) -> Iterator[Site]:
    """A coordinator whose leases last a twentieth of a second."""
    site = Site(tmp_path, tiny_spec(lease_timeout="50ms"))
    site.publish(0)
    with site.origin(), site.serving():
        yield site
