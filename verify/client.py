"""Client of the coordinator's HTTP API, for samplers and validators.

The client is synchronous, and threads may share it (a heartbeat beside the work). Every request is
signed and every answer is limited in size (`verify.coordinator_http`). The client checks answers:
the coordinator must have signed the spec and the leases, and roles.json, signed by the pinned root
key, must name the coordinator.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from runspec.core.canonical import canonical_json, digest_bytes, parse_object
from runspec.core.errors import UserError
from runspec.core.files import locked, open_folder_lock
from runspec.core.http_client import Answer
from runspec.core.process import Role, not_retried
from runspec.core.roles import use_invite
from runspec.core.schema import RunSpec
from runspec.core.schema.source_files import compare_data_digests, data_digest, file_digest
from runspec.core.signed import BadSignature, SigningKey
from verify import BACKLOG_S, COORDINATOR_S, HEARTBEAT_S
from verify.coordinator_http import (
    MAX_ANSWER_BYTES,
    CoordinatorHttp,
    RunFinished,
    SubmissionRefused,
)
from verify.formats import documents
from verify.formats.lease import lease_digest, open_lease
from verify.formats.submission import largest_submission_bytes, open_submission
from verify.formats.verdict import open_verdict
from verify.plugins import WeightsLocation, fetch_data

__all__ = ["CoordinatorClient", "RunFinished", "SubmissionRefused", "WorkItem"]

_LONGEST_HEARTBEAT_S = 3600.0
MAX_LIST_BYTES = 64 * 1024 * 1024
"""Largest list of evaluations."""


@dataclass(frozen=True)
class WorkItem:
    """A submission that a validator is to check."""

    submission: str
    """Digest of the table; `download` fetches it."""
    lease: bytes
    """The signed lease."""
    envelope: bytes
    """The signed submission envelope."""
    share: float
    """Share of the worker's submissions to recompute, in [0, 1]; it follows from its reputation."""


class CoordinatorClient:
    """Calls one coordinator with one key.

    Args:
        url: URL such as http://127.0.0.1:8000.
        key: key of the caller; roles.json must name a validator's.
        run: name of the run.
        root_public_key: the pinned root key (hex).
        deadline_s: seconds for which a call retries while the coordinator cannot be reached,
            answers 429 or 5xx, or does not complete its answer; then it raises UserError.
    """

    def __init__(
        self,
        url: str,
        key: SigningKey,
        *,
        run: str,
        root_public_key: str,
        deadline_s: float = COORDINATOR_S,
    ) -> None:
        self._key, self._run = key, run
        self._http = CoordinatorHttp(
            url, key, run=run, root_public_key=root_public_key, deadline_s=deadline_s
        )
        self.roles = self._http.roles
        """Returns the run's roles, read again every few minutes."""
        self._spec: RunSpec | None = None
        self._lock = threading.Lock()
        self._leases: set[str] = set()
        """Digests of the leases that this process works on; other leases of the key are granted
        again."""
        self._claims: set[str] = set()
        """Digests of the submissions that this process has claimed."""

    def spec(self) -> RunSpec:
        """Return the run's resolved spec, which the coordinator signed."""
        if self._spec is None:
            data = self._http.call(
                "GET", "/v1/spec", max_bytes=documents.MAX_SIGNED_SPEC_BYTES
            ).content
            place = f"{self._http.url}/v1/spec"
            spec = self._http.opened(
                data, documents.open_spec, coordinators=self.roles().coordinator, place=place
            )
            if spec.name != self._run:
                raise UserError(
                    f"serves run {spec.name!r}, not {self._run!r}",
                    place=self._http.url,
                    remedy="check --coordinator and --run",
                )
            self._spec = spec
        return self._spec

    def register(self, pool: str, info: Mapping[str, Any], *, invite: str | None = None) -> None:
        """Register the key as a worker of a pool; a second call changes nothing.

        Args:
            pool: name of the pool.
            info: a few scalars about the worker (software versions, hardware) for people.
            invite: text of an invite, if the run needs one; the first call needs it only.
        """
        body: dict[str, Any] = {"pool": pool, "info": dict(info)}
        if invite is not None:
            try:
                body["invite"] = use_invite(invite, self._key.public_hex)
            except BadSignature as error:
                raise UserError(
                    str(error), place="invite", remedy="copy the whole link that you were sent"
                ) from error
        self._post("/v1/workers", body)

    def lease(self, wait_s: float) -> bytes | None:
        """Return a signed lease (checked), or None if there was no work within `wait_s` seconds.

        A worker may hold `MAX_OPEN_LEASES`: it samples one while the last sequences of another end
        and a third is being submitted. Leases that a process held when it ended are granted to the
        next process of the key, with the same bytes, until they are answered or expire.

        Raises:
            RunFinished: the run needs no more rollouts.
        """
        with self._lock:
            body = {"wait": wait_s, "holding": sorted(self._leases)}
        answer = self._post("/v1/leases", body, wait_s=wait_s)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        lease = self._http.opened(answer.content, open_lease, coordinators=self.roles().coordinator)
        if lease.worker != self._key.public_hex or lease.run != self._run:
            raise self._http.not_believed(BadSignature("a lease for another worker or run"))
        self.hold(lease_digest(answer.content))
        return answer.content

    def submit(self, envelope: bytes, table: bytes) -> None:
        """Send a submission: its signed envelope and its table.

        Sending the same bytes again changes nothing. If too many submissions wait for a verdict,
        the coordinator names the time of a retry, and this call waits for it.

        Raises:
            SubmissionRefused: the lease expired, or was answered with other bytes.
            RunFinished: the run needs no more rollouts.
        """
        lease = open_submission(envelope).lease
        try:
            self._http.call(
                *("POST", "/v1/submissions"), body=table, envelope=envelope, backlog_s=BACKLOG_S
            )
        except SubmissionRefused:
            self._forget(self._leases, lease)
            raise
        self._forget(self._leases, lease)

    def hold(self, lease: str) -> None:
        """Record that this process answers a lease that was granted to an earlier process.

        Args:
            lease: digest of the lease.
        """
        with self._lock:
            self._leases.add(lease)

    def release(self, *, but: Collection[str] = ()) -> int:
        """Give back the open leases that this process holds and will not answer.

        Others may be leased their groups at once. A stranger that gives a lease back is new again,
        and gets trials only (`verify.coordinator.machine.filling`).

        Args:
            but: digests of leases that will still be answered.

        Returns:
            The number of leases given back.
        """
        with self._lock:
            leases = sorted(self._leases - set(but))
        if leases:
            self._post("/v1/release", {"leases": leases})
        self._forget(self._leases, *leases)
        return len(leases)

    def stop_waiting(self) -> None:
        """Have the requests of this key that wait for a lease answered with none."""
        self._post("/v1/release", {"leases": []})

    def site(self) -> documents.Site:
        """Return the signed site: URLs of the weights, and the files of the data."""
        data = self._http.call("GET", "/v1/site", max_bytes=documents.MAX_SITE_BYTES).content
        return self._http.opened(
            data, documents.open_site, coordinators=self.roles().coordinator, run=self._run
        )

    def register_relay(self, url: str) -> dict[str, Any]:
        """Register a relay, or say that it still serves; to be called every minute.

        Returns:
            `listed`; the `reason` if not; `bytes_per_s` as measured.
        """
        answer = self._post("/v1/relays", {"url": url}).content
        return self._http.opened(answer, partial(parse_object, max_bytes=MAX_ANSWER_BYTES))

    def heartbeat(self, state: Mapping[str, Any]) -> float:
        """Send a heartbeat with what the process has done since its start.

        Args:
            state: scalars. Workers send `version` (loaded), `busy_s` (seconds spent sampling) and
                `tokens` (output tokens), both cumulative. Validators send `busy_s` and `checked`.

        Returns:
            The seconds until the next, at least `HEARTBEAT_S`; longer where workers are many.
        """
        data = self._post("/v1/heartbeat", {"state": dict(state)}).content
        answer = self._http.opened(data, partial(parse_object, max_bytes=MAX_ANSWER_BYTES))
        every_s: Any = answer.get("every_s")
        known = type(every_s) in (int, float) and HEARTBEAT_S <= every_s < _LONGEST_HEARTBEAT_S
        return float(every_s) if known else HEARTBEAT_S

    def next_submission(self, wait_s: float) -> WorkItem | None:
        """Return the next submission to check, or None if there was none within `wait_s` seconds.

        This validator has claimed it until `verdict`, or until the coordinator's claim deadline. A
        process may have several claims; those of a process that died are offered again.

        Raises:
            RunFinished: every batch is closed.
        """
        body = {"wait": wait_s, "holding": self.claims}
        answer = self._post("/v1/validator/next", body, wait_s=wait_s)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        item = self._http.opened(answer.content, self._work_item)
        with self._lock:
            self._claims.add(item.submission)
        return item

    def download(self, digest: str) -> bytes:
        """Return the table of a submission; its digest is checked, its contents are not."""
        most = largest_submission_bytes(self.spec())
        data = self._http.call("GET", f"/v1/submissions/{digest}", max_bytes=most).content
        if digest_bytes(data) != digest:
            raise self._http.not_believed(BadSignature(f"bytes that are not those of {digest}"))
        return data

    def verdict(self, envelope: bytes, table: bytes) -> None:
        """Send a verdict file: its signed envelope and its table.

        A second verdict on a submission changes nothing.
        """
        self._http.call("POST", "/v1/verdicts", body=table, envelope=envelope)
        own = open_verdict(envelope, validators=frozenset({self._key.public_hex}))
        self._forget(self._claims, own.submission)

    def release_claims(self, submissions: Sequence[str], fault: str = "") -> None:
        """Give back submissions that this process claimed and gives no verdict on.

        Args:
            submissions: digests of the submissions.
            fault: the error, if these submissions caused it; the coordinator counts a failed
                attempt. Empty if the validator itself is at fault.
        """
        self._post("/v1/validator/release", {"submissions": list(submissions), "fault": fault})
        self._forget(self._claims, *submissions)

    def evaluations(self) -> set[tuple[str, int]]:
        """Return the evaluations of versions whose results the coordinator has."""
        data = self._http.call("GET", "/v1/evaluations", max_bytes=MAX_LIST_BYTES).content

        def read(data: bytes) -> set[tuple[str, int]]:
            found = parse_object(data, max_bytes=MAX_LIST_BYTES)["evaluations"]
            return {(str(one["evaluation"]), int(one["version"])) for one in found}

        return self._http.opened(data, read)

    def evaluated(self, document: bytes) -> None:
        """Send a signed result. Sending it again changes nothing; the first of a version stays."""
        self._http.call("POST", "/v1/evaluations", body=document)

    @property
    def claims(self) -> list[str]:
        """Digests of the submissions that this process has claimed and not answered."""
        with self._lock:
            return sorted(self._claims)

    def _forget(self, held: set[str], *digests: str) -> None:
        with self._lock:
            held.difference_update(digests)

    def _work_item(self, data: bytes) -> WorkItem:
        answer = parse_object(data, max_bytes=MAX_ANSWER_BYTES)
        lease, envelope = (str(answer[name]).encode() for name in ("lease", "envelope"))
        open_lease(lease, coordinators=self.roles().coordinator)
        submitted, share = open_submission(envelope), answer["share"]
        if type(share) not in (int, float) or not 0.0 <= share <= 1.0:
            raise BadSignature(f"a share of {str(share)[:40]}")
        return WorkItem(submitted.digest, lease, envelope, float(share))

    def _post(self, path: str, body: Mapping[str, Any], *, wait_s: float = 0.0) -> Answer:
        return self._http.call("POST", path, body=canonical_json(dict(body)), wait_s=wait_s)


def connect(role: Role) -> tuple[CoordinatorClient, SigningKey]:
    """Return a client of the coordinator for a role of a run, and the key that it signs with.

    Raises:
        UserError: the key cannot be read.
    """
    key, run, root = role.key(), role.spec.name, role.root_public_key
    return CoordinatorClient(role.endpoints.coordinator, key, run=run, root_public_key=root), key


def problem_files(
    client: CoordinatorClient, spec: RunSpec, weights: WeightsLocation, log: logging.Logger
) -> Path | None:
    """Make sure that this machine has the coordinator's files of problems.

    Files with the same contents at the spec's own paths are used in place; others are fetched once
    for all processes that share a folder.

    Args:
        client: client of the coordinator.
        spec: the run's resolved spec.
        weights: relays or origin, and the folder of fetched files (`data_dir`).
        log: receives messages about what is fetched.

    Returns:
        `data_dir` of `verify.plugins.load_task_set`: the folder, or None for the spec's paths.

    Raises:
        RunStopped: the problems would still differ from the coordinator's.
        UserError: a file is not served as the coordinator lists it, or the disk is full.
    """
    site = client.site()
    if not site.data:
        return None  # the coordinator cannot read its files
    with suppress(UserError):  # a file is missing
        if data_digest(spec) == site.data:
            return None
    with not_retried():
        if not site.files:
            compare_data_digests(data_digest(spec), site.data, whose="the coordinator")
    folder, deadline_s = weights.data_dir, spec.verify.lease_timeout
    folder.mkdir(parents=True, exist_ok=True)
    busy = UserError("another process is still fetching the files of problems", place=str(folder))
    with locked(open_folder_lock(folder), deadline_s, busy):
        missing = {
            path: file
            for file in site.files
            if not (path := folder / file.source / file.path).is_file()
            or file_digest(path) != file.digest
        }
        if missing:
            total = sum(file.bytes for file in missing.values()) / 1e6
            log.info("fetching %d files of problems, %.1f MB", len(missing), total)
            fetch_data(weights, missing, deadline_s)
    with not_retried():
        compare_data_digests(data_digest(spec, folder), site.data, whose="the coordinator")
    return folder
