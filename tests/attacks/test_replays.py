"""Work handed in twice, elsewhere, or by another than who did it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from tests.attacks.setting import fresh, refused, rejection, take_lease
from tests.verify.bench import Bench, lease_for
from tests.verify.coordinator.deployment import DEADLINE_S, RUN, Site, submission
from tests.verify.coordinator.over_http import granted, post, status
from tests.verify.small_model import Worker, fixed_key
from tests.weak_keys import WEAK_KEYS, WeakKey
from verify.client import SubmissionRefused
from verify.formats.lease import lease_digest
from verify.formats.submission import Rollout, sign_submission
from verify.request_auth import sign_request
from verify.toploc.codec import build_proofs


def handed_in(site: Site) -> list[Path]:
    return sorted(site.run_dir.glob("rollouts/*/*.safetensors"))


class TestReplayedSubmission:
    """The same work once more: for the same lease, for the next one, in another step or run."""

    def test_for_the_same_lease_it_counts_once(self, site: Site) -> None:
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        for _ in range(3):
            worker.submit(envelope, table)
        assert [path.stem for path in handed_in(site)] == [digest_bytes(table)]
        validator = site.client(site.validator)
        assert validator.next_submission(DEADLINE_S) is not None
        assert validator.next_submission(0.0) is None

    @pytest.mark.parametrize(("index", "step"), [(1, 0), (0, 1)], ids=["lease", "step"])
    def test_rows_of_another_lease_or_step(self, bench: Bench, index: int, step: int) -> None:
        old = bench.honest()
        take_lease(bench, index, step=step)
        reason = refused(bench, *bench.packed(old))
        words = "step is '0'" if step else "lease is"
        assert reason.startswith(f"assignment: row 0: {words}")

    def test_the_signed_file_in_another_run(self, bench: Bench) -> None:
        envelope, table = bench.packed(bench.honest())
        other = fresh(bench)
        other.lease = replace(bench.lease, run="another")
        reason = refused(other, envelope, table)
        assert reason.startswith("lease: the envelope names another run, step, worker")


class TestAnotherWorkersFile:
    """A thief has an honest worker's file, and hands it in as its own."""

    thief = fixed_key(9)

    def test_as_it_is_under_a_lease_of_the_thiefs(self, bench: Bench) -> None:
        rows = bench.honest()
        own = self.leased_to_the_thief(bench)
        assert refused(own, *own.packed(rows)).startswith("assignment: row 0: worker is")

    def test_with_every_name_changed(self, bench: Bench) -> None:
        """Even where the thief is assigned the same problems, the noise is its own."""
        rows = bench.honest()
        own = self.leased_to_the_thief(bench)
        mine = own.honest()
        renamed = [
            replace(
                r, worker=n.worker, lease=n.lease, problem_id=n.problem_id, target=n.target,
                prompt_tokens=n.prompt_tokens,
            )
            for r, n in zip(rows, mine, strict=True)
        ]  # fmt: skip
        explained = [self.explained(own.worker, r) for r in renamed]
        found = rejection(own, explained)
        assert found.check == "seeded_sampling" and found.value >= 0.5 > found.limit

    def test_over_the_wire(self, site: Site) -> None:
        key, worker = site.worker()
        thief_key, thief = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        with pytest.raises(UserError, match="403, the submission is another worker's"):
            thief.submit(envelope, table)
        with pytest.raises(UserError, match="403, the lease is another worker's"):
            thief.submit(*submission(data, lease, thief_key))
        worker.submit(envelope, table)
        data, lease = granted(site, thief)
        stolen = sign_submission(
            *(table,), run=RUN, step=lease.step, index=lease.index, lease=lease_digest(data),
            key=thief_key,
        )  # fmt: skip
        with pytest.raises(SubmissionRefused, match="same bytes were submitted for another lease"):
            thief.submit(stolen, table)
        assert [path.stem for path in handed_in(site)] == [digest_bytes(table)]

    def leased_to_the_thief(self, bench: Bench) -> Bench:
        own = fresh(bench)
        own.worker_key = self.thief
        own.worker = replace(bench.worker, key=self.thief)
        own.signed_lease, own.lease = lease_for(self.thief, bench.coordinator_key)
        verdict = own.verdict(own.honest())  # what is its own is accepted
        assert verdict.accepted, verdict.reason
        return own

    @staticmethod
    def explained(worker: Worker, row: Rollout) -> Rollout:
        """The row's tokens, with claims and rewards that are right for its new prompt."""
        made = worker.explain(row.prompt_tokens.tolist(), row.output_tokens.tolist())
        length = -0.01 * abs(row.target - len(row.output_tokens))
        return replace(
            row,
            logprobs=made.logprobs,
            proofs=build_proofs(made.hidden),
            length_penalty=float(np.float32(length)),
        )


class TestWeakKey:
    """Comes with a key as which anybody can sign, so that nobody can be held to what it did."""

    @pytest.mark.parametrize("public_hex", WEAK_KEYS)
    def test_it_is_not_registered(self, site: Site, public_hex: str) -> None:
        body = canonical_json({"pool": "near", "info": {}})
        answer = post(site, WeakKey(public_hex), "/v1/workers", body)
        assert (answer.status_code, "anybody can sign" in answer.text) == (401, True)
        assert public_hex not in {worker["key"] for worker in status(site)["workers"]}


class TestReplayedRequest:
    """A captured request, sent again within the time that its signature holds."""

    @pytest.mark.parametrize("path", ["/v1/leases", "/v1/heartbeat", "/v1/release"])
    def test_it_is_refused(self, site: Site, path: str) -> None:
        key, _ = site.worker()
        body = canonical_json(
            {
                "/v1/leases": {"wait": 0, "holding": []},
                "/v1/heartbeat": {"state": {}},
                "/v1/release": {"leases": []},
            }[path]
        )
        headers = sign_request(key, run=RUN, method="POST", path=path, body=body)
        ask = lambda: httpx.post(site.url + path, content=body, headers=headers, verify=False)  # noqa: E731
        assert ask().status_code == 200
        for _ in range(2):
            assert (ask().status_code, "made before" in ask().json()["error"]) == (401, True)
