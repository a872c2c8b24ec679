"""Submissions over HTTP: whose, for which lease, in which form, and how often they count."""

from __future__ import annotations

import base64
from dataclasses import asdict, replace

import httpx
import pytest

from runspec.core.signed import sign_document
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from tests.verify.coordinator.over_http import granted, post
from verify.client import SubmissionRefused
from verify.formats.lease import lease_digest
from verify.formats.submission import KIND, open_submission, sign_submission
from verify.limits import max_submission_bytes
from verify.request_auth import ENVELOPE, sign_request


def test_a_restarted_worker_gets_its_lease_again_and_its_answer_counts_once(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)

        again, _ = granted(site, site.client(key))
        assert again == data

        envelope, table = submission(data, lease, key)
        worker.submit(envelope, table)
        worker.submit(envelope, table)  # the answer to the first was lost, say
        other = submission(data, lease, key, note=1)
        with pytest.raises(SubmissionRefused, match="answered already, with other bytes"):
            worker.submit(*other)


def test_malformed_submissions_are_refused_and_leave_no_file(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        wrong_step = sign_submission(
            table, run=RUN, step=lease.step + 1, index=0, lease=lease_digest(data), key=key
        )
        forged = envelope.replace(f'"index":{lease.index}'.encode(), b'"index":7')
        limit = max_submission_bytes(tiny_spec(), tiny_spec().samplers[0])
        large = bytes(limit + 1)
        too_large = sign_submission(
            large, run=RUN, step=0, index=0, lease=lease_digest(data), key=key
        )
        unknown = sign_submission(table, run=RUN, step=0, index=0, lease="0" * 64, key=key)
        more = replace(open_submission(envelope), bytes=limit)  # room would be kept for it
        less_than_announced = sign_document(KIND, asdict(more), key)

        for signed, body, status, words in (
            ("", table, 400, "is missing"),
            ("%%%", table, 400, "not base64"),
            (b"{}", table, 400, "fields"),
            (forged, table, 400, "signature does not match"),
            (wrong_step, table, 400, "not the lease's"),
            (envelope, table + b"x", 400, "names another body"),
            (too_large, large, 413, "allowed"),
            (less_than_announced, table, 400, f"and {limit} were announced"),
            (unknown, table, 409, "no such lease"),
        ):
            answer = post(site, key, "/v1/submissions", body, envelope=signed)
            assert (answer.status_code, words in answer.json()["error"]) == (status, True), words

        assert list((site.run_dir / "rollouts").glob("*/*")) == []
        worker.submit(envelope, table)  # the lease is still good


def test_a_body_other_than_the_signed_one_is_refused(site: Site):
    with site.serving():
        key, worker = site.worker()
        data, lease = granted(site, worker)
        envelope, table = submission(data, lease, key)
        headers = sign_request(key, run=RUN, method="POST", path="/v1/submissions", body=table)
        headers[ENVELOPE] = base64.b64encode(envelope).decode()

        answer = httpx.post(
            f"{site.url}/v1/submissions",
            content=table[:-1] + b"x",
            headers=headers,
            trust_env=False,
        )

        assert answer.status_code == 400
        assert "the body's digest is" in answer.json()["error"]
