"""Lane: whole requests to a coordinator at work, and what they upload."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from runspec.core.canonical import canonical_json
from runspec.core.hashing import digest_bytes
from runspec.core.keys import SigningKey
from runspec.core.signed import sign_document
from tests.fuzz.bounds import OPEN
from tests.fuzz.mutate import Changer, damaged, damaged_json
from tests.fuzz.requests import BODIES, DIGEST, ODD, OURS
from tests.fuzz.text import TEXT_PIECES
from tests.verify.coordinator.deployment import RUN, Site, submission, tiny_spec
from verify.coordinator.edge import limits
from verify.formats.lease import open_lease
from verify.formats.verdict import VerdictEnvelope
from verify.request_auth import ENVELOPE, sign_request

PATIENT = limits.Rate(1e9, 10**9)
NO_WAIT: list[Any] = [0, 0.0, -1, -(10**400), 1e-9, True, "0", None, [], 1e-300]
SUBMISSIONS, VERDICTS = "/v1/submissions", "/v1/verdicts"


@dataclass(frozen=True)
class Served:
    """A coordinator at work, and what would be sound to say to it."""

    site: Site
    http: httpx.Client
    keys: dict[str, SigningKey]
    table: bytes
    signed: bytes
    """Envelope of a submission that could be made."""
    envelopes: dict[str, dict[str, Any]]
    """Payloads: of that submission, and of a verdict on one that was made."""

    def post(self, path: str, body: bytes, who: str, envelope: str = "") -> httpx.Response:
        headers = sign_request(self.keys[who], run=RUN, method="POST", path=path, body=body)
        if envelope:
            headers[ENVELOPE] = envelope
        return self.http.post(self.site.url + path, content=body, headers=headers)


@contextmanager
def _served() -> Iterator[Served]:
    """Starts a coordinator; at the end it still runs, and takes the submission that was sound."""
    folder = OPEN.enter_context(TemporaryDirectory())
    site = Site(Path(folder), tiny_spec(lease_timeout="24h"))
    site.publish(0)
    logging.getLogger("verify").setLevel(logging.WARNING)
    with (
        pytest.MonkeyPatch.context() as patch,
        site.origin(),
        site.serving() as task,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        patch.setattr(limits, "RATES", dict.fromkeys(limits.RATES, PATIENT))
        key, client = site.worker()
        made = []
        for _ in range(2):
            data = client.lease(20.0)
            assert data is not None
            lease = open_lease(data, coordinators=frozenset({site.coordinator.public_hex}))
            made.append(submission(data, lease, key, note=len(made)))
            if len(made) == 1:
                client.submit(*made[0])
        signed, table = made[1]
        judged = VerdictEnvelope(RUN, 0, digest_bytes(made[0][1]), True, "", [0], "", DIGEST, 9)
        payloads = {SUBMISSIONS: json.loads(signed)["payload"], VERDICTS: asdict(judged)}
        keys = {"worker": key, "validator": site.validator, "stranger": OURS}
        served = Served(site, http, keys, table, signed, payloads)
        yield served
        assert not task.done(), f"the coordinator ended: {task.result()}"
        header = base64.b64encode(signed).decode()
        assert served.post(SUBMISSIONS, table, "worker", header).status_code == 202
    logging.getLogger("verify").setLevel(logging.NOTSET)


def requests() -> Callable[[Random], bool]:
    """Bodies, uploads and envelopes: the caller is at fault or the request is sound."""
    served = OPEN.enter_context(_served())
    draws = {path: Changer([body], ODD) for path, body in BODIES.items()}
    kinds = (_body, _body, _upload, _envelope)
    return lambda rng: rng.choice(kinds)(served, draws, rng).is_success


Draws = dict[str, Changer]


def _body(served: Served, draws: Draws, rng: Random) -> httpx.Response:
    """A changed JSON body."""
    path = rng.choice(sorted(BODIES))
    body = draws[path](rng)
    if "wait" in BODIES[path]:
        body["wait"] = rng.choice(NO_WAIT)  # the server waits as long as it is asked to
        sent = canonical_json(body)
    else:
        sent = canonical_json(body)
        sent = damaged_json(rng, sent, [sent]) if len(sent) > 2 and rng.random() < 0.5 else sent
    answer = served.post(path, sent, rng.choice(list(served.keys)))
    assert answer.status_code in (200, 204, 400, 401, 403, 404, 413, 422), answer.text[:500]
    return _explained(answer)


def _upload(served: Served, draws: Draws, rng: Random) -> httpx.Response:
    """A damaged file: no verdict table, and a submission with a flaw, so that neither is taken."""
    path = rng.choice((SUBMISSIONS, VERDICTS))
    table = damaged(rng, served.table, [served.table], TEXT_PIECES)
    payload = {**served.envelopes[path], "digest": digest_bytes(table), "bytes": len(table)}
    if rng.random() < 0.3:  # of a lease that nobody has, so that no change makes it sound
        made = Changer([{**payload, "lease": DIGEST}], ODD)(rng)
    elif path == SUBMISSIONS:
        flaw, value = rng.choice([("bytes", len(table) - 1), ("index", 7), ("digest", DIGEST)])
        made = {**payload, flaw: value}
    else:
        made = payload
    kind, who = ("submission", "worker") if path == SUBMISSIONS else ("verdict", "validator")
    envelope = base64.b64encode(sign_document(kind, made, served.keys[who])).decode()
    answer = served.post(path, table, who, envelope[:16_000])
    # 202 of a verdict: on another submission that nobody knows.
    expected = (202, 400, 403, 409, 413) if path == VERDICTS else (400, 403, 409, 413)
    assert answer.status_code in expected, answer.text[:500]
    folder = served.site.run_dir / "rollouts" / "step_0"
    assert len(list(folder.iterdir())) == 2, "what was refused leaves nothing behind"
    return _explained(answer)


def _envelope(served: Served, draws: Draws, rng: Random) -> httpx.Response:
    """A damaged envelope, or any printable text, with a file that nobody signed."""
    text = "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 80)))
    broken = base64.b64encode(damaged_json(rng, served.signed, [served.signed])).decode()
    path, who = rng.choice(((SUBMISSIONS, "worker"), (VERDICTS, "validator")))
    answer = served.post(path, served.table + b"x", who, rng.choice((text, broken)))
    assert answer.status_code in (400, 403), answer.text[:500]
    return answer


def _explained(answer: httpx.Response) -> httpx.Response:
    assert answer.is_success or 0 < len(answer.json()["error"]) <= 500
    return answer
